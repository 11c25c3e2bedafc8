"""`Environment`: clock, randomness, threads and ids that a coordinator is given.

Production uses the defaults. Simulation and model checker replace all of them, so that a run can be
repeated call by call.
"""

from __future__ import annotations

import base64
import os
import random
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from epochal.clock import Clock, SystemClock
from epochal.coordinator.retry import RunParallel, in_threads
from epochal.terms import Claim, EpochNumber, Uid

OnStep = Callable[[str, EpochNumber | None], None]
"""Called after every step of an epoch; an exception that it raises stops the driver there."""

_UID_BYTES = 8
_UID_LETTERS = 12
_CLAIM_BYTES = 5
_MACHINE_ID = Path("/etc/machine-id")
_MACHINE_LETTERS = 8


def new_uid() -> Uid:
    return Uid(_letters(_UID_BYTES)[:_UID_LETTERS])


def new_claim() -> Claim:
    return Claim(_letters(_CLAIM_BYTES))


def _letters(random_bytes: int) -> str:
    return base64.b32encode(secrets.token_bytes(random_bytes)).decode().lower()


def new_nonce() -> str:
    return secrets.token_hex(16)


def this_driver() -> str:
    """
    The name of this process in the epoch log: for people, who find a copy of the log by it. Nothing
    is decided by it: pods change their machine's id, and images share one.
    """
    process = f"{socket.gethostname()} pid {os.getpid()}"
    with suppress(OSError):
        return f"{process} machine {_MACHINE_ID.read_text()[:_MACHINE_LETTERS]}"
    return process


def ignore_step(step: str, epoch: EpochNumber | None) -> None:
    """The default of `Environment.on_step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    clock: Clock = field(default_factory=SystemClock)
    random: Callable[[], float] = random.random
    nonce: Callable[[], str] = new_nonce
    new_uid: Callable[[], Uid] = new_uid
    new_claim: Callable[[], Claim] = new_claim
    parallel: RunParallel = in_threads
    on_step: OnStep = ignore_step
