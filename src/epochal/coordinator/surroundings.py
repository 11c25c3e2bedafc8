"""Time, chance, threads and names, as the coordinator is given them: a simulation gives others."""

from __future__ import annotations

import base64
import os
import random
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from epochal.clock import SystemClock
from epochal.contract import Clock
from epochal.coordinator.waiting import Together, in_threads
from epochal.terms import EpochNumber, Uid

Watch = Callable[[str, EpochNumber | None], None]
"""Told after every step of an epoch; what it raises stops the driver there."""

_UID_BYTES = 8
_UID_LETTERS = 12


def mint_uid() -> Uid:
    letters = base64.b32encode(secrets.token_bytes(_UID_BYTES)).decode().lower()
    return Uid(letters[:_UID_LETTERS])


def fresh_nonce() -> str:
    return secrets.token_hex(16)


def this_driver() -> str:
    """Who claims, for people who look into the log."""
    return f"{socket.gethostname()} pid {os.getpid()}"


def watch_nothing(step: str, epoch: EpochNumber | None) -> None:
    """Nobody is watching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    clock: Clock = field(default_factory=SystemClock)
    chance: Callable[[], float] = random.random
    nonce: Callable[[], str] = fresh_nonce
    mint: Callable[[], Uid] = mint_uid
    together: Together = in_threads
    watch: Watch = watch_nothing
