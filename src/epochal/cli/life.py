"""`epochal adopt`, `fork`, `rename`: a person's word on what a checkpoint is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from epochal.logs import checkpoint_log
from epochal.protocol.state import State
from epochal.spark import identity

Place = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A Spark checkpoint location on this machine.")
]


def adopt(checkpoint: Place) -> None:
    """
    Bind a moved checkpoint to where it is now, or follow one that other code ran meanwhile.

    A driver that still runs on it is fenced. Stop it first.
    """
    _tell(identity.adopt(checkpoint_log(checkpoint), checkpoint))


def fork(checkpoint: Place) -> None:
    """
    Make a copied checkpoint a pipeline of its own, under a new uid.

    What the original has decided and not yet carried out stays the original's.
    """
    _tell(identity.fork(checkpoint_log(checkpoint), checkpoint))


def rename(
    checkpoint: Place,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's new name.")],
) -> None:
    """Give the pipeline of a checkpoint another name."""
    _tell(identity.rename(checkpoint_log(checkpoint), name))


def _tell(state: State) -> None:
    sys.stderr.write(
        f"pipeline {state.pipeline!r}, uid {state.uid}, at {state.location}: "
        f"goes on at epoch {state.expected}\n"
    )
