"""`epochal pause` and `resume`: stop a pipeline after its epoch, and keep it stopped."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from epochal.cli.output import Checkpoint, Target, message, person
from epochal.config.resolve_target import open_target
from epochal.coordinator import by_hand
from epochal.coordinator.journal import EpochLog
from epochal.errors import TryAgain
from epochal.reports.status import pipeline_status
from epochal.telemetry.health import Liveness

_LOOK_EVERY_S = 0.5
_RUNNING = frozenset({Liveness.ALIVE, Liveness.UNKNOWN})


def pause(
    pipeline: Target,
    because: Annotated[
        str, typer.Option(help="The reason, for those who find the pipeline stopped.")
    ],
    checkpoint: Checkpoint = None,
    wait_s: Annotated[
        float,
        typer.Option("--wait", help="Wait at most this many seconds until the driver has stopped."),
    ] = 0.0,
) -> None:
    """
    Let the driver end its epoch and stop cleanly; no start is admitted until `epochal resume`.

    For a planned hand-over or maintenance of a target. A driver that is idle notices it at its next
    sweep (sweep_every_s, 60 s). The pause is a record of the epoch log: no target is queried, and a
    pipeline that does not run is paused as well.

    Example: epochal pause chk/orders --because "upgrade of the database" --wait 120
    """
    log = open_target(pipeline, checkpoint=checkpoint).require_log()
    state = by_hand.pause(log, by=person(), because=because)
    message(f"pipeline {state.pipeline!r} is {state.pause}")
    if wait_s:
        _await_stop(log, wait_s)


def _await_stop(log: EpochLog, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    message("waiting until the driver has stopped")
    while (driver := pipeline_status(log).driver).liveness in _RUNNING:
        if time.monotonic() > deadline:
            raise TryAgain(
                f"the driver has not stopped within {wait_s:.0f} s: {driver.because}",
                "the pause stands, and the driver stops after its epoch: `epochal status` shows it",
            )
        time.sleep(_LOOK_EVERY_S)
    message(driver.because)


def resume(pipeline: Target, checkpoint: Checkpoint = None) -> None:
    """
    Admit starts of a paused pipeline again. It is not started by this.

    Example: epochal resume chk/orders
    """
    log = open_target(pipeline, checkpoint=checkpoint).require_log()
    state = by_hand.resume(log, by=person())
    message(f"pipeline {state.pipeline!r} may start; next epoch {state.expected}")
