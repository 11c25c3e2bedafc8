"""Prepares calls by spooling their rows, with the word how many of them make a call."""

from __future__ import annotations

from dataclasses import replace

from epochal.contract import Task
from epochal.kit.spool import RowSpool, SpoolingWriter
from epochal.terms import Receipt

ROWS_PER_CALL = "rows_per_call"
"""In the receipt: were it taken from a later declaration, a key would mean other rows."""


class CallSpoolingWriter(SpoolingWriter):
    def __init__(self, task: Task, spool: RowSpool, *, rows_per_call: int) -> None:
        super().__init__(task, spool)
        self._rows_per_call = rows_per_call

    def prepare(self) -> Receipt:
        return replace(super().prepare(), token={ROWS_PER_CALL: self._rows_per_call})
