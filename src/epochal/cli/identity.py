"""`epochal adopt`, `fork` and `rename`: change which pipeline a checkpoint belongs to."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from epochal.cli.output import DryRun, UnfinishedBatch
from epochal.config.resolve_target import log_at
from epochal.coordinator import by_hand
from epochal.protocol.admission import Unfinished
from epochal.protocol.state import State
from epochal.spark.checkpoint import open_checkpoint

_Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A Spark checkpoint in a folder or an object store, the folder of a once-only load, "
        "or the log of a session.",
    ),
]
_Log = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The epoch log, if it is not in the checkpoint: its `log=`."),
]


def adopt(
    checkpoint: _Checkpoint,
    log: _Log = None,
    unfinished: UnfinishedBatch = Unfinished.ASK,
    dry_run: DryRun = False,
) -> None:
    """
    Bind a moved checkpoint to its new location, or catch up with batches that other code ran.

    A driver that still runs on the checkpoint is fenced: stop it first.

    Example: epochal adopt /checkpoints/orders --dry-run

    Example: epochal adopt /checkpoints/orders --log postgresql://etl@db/shop#orders
    """
    found = open_checkpoint(checkpoint)
    state = by_hand.adopt(
        log_at(log or checkpoint),
        location=found.location,
        query_id=found.query_id,
        position=found.position,
        unfinished=unfinished,
        dry_run=dry_run,
    )
    _print_state(state, f"uid {state.uid}", dry_run=dry_run)


def fork(
    checkpoint: _Checkpoint,
    is_original_alive: Annotated[
        bool,
        typer.Option(
            "--original-lives",
            help="The original still exists and will commit the epoch that it has decided.",
        ),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """
    Make a copied checkpoint an independent pipeline with a new uid.

    An epoch that the original has decided and not yet committed remains the original's. The log
    must be in the copy: one that is kept elsewhere stays the original's.

    Example: epochal fork /checkpoints/orders-copy --dry-run
    """
    state = by_hand.fork(
        log_at(checkpoint),
        location=open_checkpoint(checkpoint).location,
        is_original_alive=is_original_alive,
        dry_run=dry_run,
    )
    _print_state(state, "a new uid" if dry_run else f"uid {state.uid}", dry_run=dry_run)


def rename(
    checkpoint: _Checkpoint,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's new name.")],
    log: _Log = None,
    dry_run: DryRun = False,
) -> None:
    """
    Rename the pipeline of a checkpoint.

    Example: epochal rename /checkpoints/orders shop-orders --dry-run
    """
    state = by_hand.rename(log_at(log or checkpoint), pipeline=name, dry_run=dry_run)
    _print_state(state, f"uid {state.uid}", dry_run=dry_run)


def _print_state(state: State, uid: str, *, dry_run: bool) -> None:
    sys.stderr.write(
        f"{'would be ' if dry_run else ''}pipeline {state.pipeline!r}, {uid}, at {state.location}: "
        f"next epoch {state.expected}\n"
    )
