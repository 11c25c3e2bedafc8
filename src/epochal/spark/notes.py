"""
What a driver of the data source door remembers from one process to the next, on disk.

    registered        is there as long as nobody cleared this folder
    <digest>.plan     the newest epoch that was planned on a checkpoint, and what was declared there

Without a note a driver that was fenced would take each next batch for its first one, and claim
back. Temporary folders are cleared of what is old: every batch touches all of it, `registered`
first, so that no note is ever older than it. Where it is there, a note that is not was never made.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from epochal.terms import EpochNumber

_REGISTERED = "registered"
_PLAN = ".plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a planner did last on one checkpoint."""

    epoch: EpochNumber
    declared: str
    """A digest of the pipeline, its target and its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Who registered the data source: the same in all processes of one driver."""

    key: str
    folder: str
    registered_at: float

    @property
    def remembers_all(self) -> bool:
        """False once somebody has cleared the folder: a missing note then says nothing."""
        return self._registered.exists()

    def enter(self) -> None:
        """Once, when the data source is registered."""
        self._registered.touch()

    def last_plan(self, location: str) -> Plan | None:
        try:
            told = json.loads(self._note(location).read_text())
        except FileNotFoundError:
            return None
        return Plan(epoch=EpochNumber(told["epoch"]), declared=told["declared"])

    def note(self, location: str, plan: Plan) -> None:
        """Remember a plan, and keep all notes of this driver from growing old."""
        path = self._note(location)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"epoch": plan.epoch, "declared": plan.declared}))
        new.replace(path)
        for kept in (self._registered, *path.parent.glob(f"*{_PLAN}")):
            # Not made again: notes of other checkpoints were cleared along with it.
            with suppress(FileNotFoundError):
                os.utime(kept)

    @property
    def _registered(self) -> Path:
        return Path(self.folder) / _REGISTERED

    def _note(self, location: str) -> Path:
        return Path(self.folder) / f"{hashlib.sha256(location.encode()).hexdigest()}{_PLAN}"
