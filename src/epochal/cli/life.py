"""`epochal adopt`, `fork`, `rename`: a person's word on what a checkpoint is."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.coordinator.life import adopt_checkpoint, fork_checkpoint, rename_pipeline
from epochal.spark.checkpoint import Checkpoint

Place = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A Spark checkpoint location.")]
