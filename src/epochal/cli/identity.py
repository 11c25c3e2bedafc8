"""`epochal adopt`, `fork` and `rename`: change which pipeline a checkpoint belongs to."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from epochal.config.resolve_target import log_at
from epochal.coordinator import by_hand
from epochal.protocol.admission import Unfinished
from epochal.protocol.state import State
from epochal.spark.checkpoint import open_checkpoint

_Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A Spark checkpoint on this machine, the folder of a once-only load, or the log of a "
        "session.",
    ),
]


def adopt(
    checkpoint: _Checkpoint,
    unfinished: Annotated[
        Unfinished,
        typer.Option(
            help="A batch that other code planned and did not finish: `skip` it if its rows are in "
            "the targets, `redo` it if not."
        ),
    ] = Unfinished.ASK,
) -> None:
    """
    Bind a moved checkpoint to its new location, or catch up with batches that other code ran.

    A driver that still runs on the checkpoint is fenced: stop it first.
    """
    found = open_checkpoint(checkpoint)
    _print_state(
        by_hand.adopt(
            log_at(checkpoint),
            location=found.location,
            query_id=found.query_id,
            position=found.position,
            unfinished=unfinished,
        )
    )


def fork(
    checkpoint: _Checkpoint,
    is_original_alive: Annotated[
        bool,
        typer.Option(
            "--original-lives",
            help="The original still exists and will commit the epoch that it has decided.",
        ),
    ] = False,
) -> None:
    """
    Make a copied checkpoint an independent pipeline with a new uid.

    An epoch that the original has decided and not yet committed remains the original's.
    """
    location = open_checkpoint(checkpoint).location
    _print_state(
        by_hand.fork(log_at(checkpoint), location=location, is_original_alive=is_original_alive)
    )


def rename(
    checkpoint: _Checkpoint,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's new name.")],
) -> None:
    """Rename the pipeline of a checkpoint."""
    _print_state(by_hand.rename(log_at(checkpoint), pipeline=name))


def _print_state(state: State) -> None:
    sys.stderr.write(
        f"pipeline {state.pipeline!r}, uid {state.uid}, at {state.location}: "
        f"next epoch {state.expected}\n"
    )
