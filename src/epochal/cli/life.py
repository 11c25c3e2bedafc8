"""`epochal adopt`, `fork`, `rename`: a person's word on a checkpoint and its log."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from epochal.assembly import log_at
from epochal.coordinator import life
from epochal.protocol.admission import Unfinished
from epochal.protocol.state import State
from epochal.spark.checkpoint import open_checkpoint

Place = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A Spark checkpoint on this machine, the folder of a once-only load, or the log of a "
        "session.",
    ),
]


def adopt(
    checkpoint: Place,
    unfinished: Annotated[
        Unfinished,
        typer.Option(
            help="A batch that other code planned and did not finish: are its rows there?"
        ),
    ] = Unfinished.ASK,
) -> None:
    """
    Bind a moved checkpoint to where it is now, or follow one that other code ran meanwhile.

    A driver that still runs on it is fenced. Stop it first.
    """
    found = open_checkpoint(checkpoint)
    _tell(
        life.adopt(
            log_at(checkpoint),
            location=found.location,
            query_id=found.query_id,
            position=found.position,
            unfinished=unfinished,
        )
    )


def fork(
    checkpoint: Place,
    is_original_alive: Annotated[
        bool,
        typer.Option(
            "--original-lives",
            help="The original is there and will carry out what it has decided.",
        ),
    ] = False,
) -> None:
    """
    Make a copied checkpoint a pipeline of its own, under a new uid.

    What the original has decided and not yet carried out stays the original's.
    """
    location = open_checkpoint(checkpoint).location
    _tell(life.fork(log_at(checkpoint), location=location, is_original_alive=is_original_alive))


def rename(
    checkpoint: Place,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's new name.")],
) -> None:
    """Give the pipeline of a checkpoint another name."""
    _tell(life.rename(log_at(checkpoint), pipeline=name))


def _tell(state: State) -> None:
    sys.stderr.write(
        f"pipeline {state.pipeline!r}, uid {state.uid}, at {state.location}: "
        f"goes on at epoch {state.expected}\n"
    )
