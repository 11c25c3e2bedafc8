"""A pipeline into a table that others change between any two of its steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from epochal.errors import Misconfigured, PreparedLost, TryAgain
from epochal.terms import Fingerprint, Receipt


class Changes(Protocol):
    """Somebody who changes the table by chance."""

    chance: random.Random

    def maybe(self, likely: float = ...) -> None: ...


class AdaptedDriver:
    """Adapted to the table whenever it is refused, and restarted by chance."""

    changes: Changes

    def started(self) -> Any:
        """The next life of the pipeline."""
        raise NotImplementedError

    def rows(self, ids: range) -> pa.Table:
        """Rows with a value in every column that the table has now."""
        raise NotImplementedError

    def judge(self, ids: range, names: Sequence[str]) -> None:
        """Looks at an epoch that was just committed, by the columns that it was decided with."""

    def epoch(self, epoch: int, ids: range) -> None:
        life, receipts, names = self.decided(epoch, ids)
        self.changes.maybe(likely=0.7)
        if self.changes.chance.random() < 0.4:
            life = self.started()
        try:
            life.commit(epoch, receipts)
        except PreparedLost:
            again, rows = self.started(), self.rows(ids)
            again.start(rows)
            again.commit(epoch, [again.prepare(rows, epoch)])
            life.committer.abort(epoch, receipts)
        self.judge(ids, names)
        self.changes.maybe()

    def decided(self, epoch: int, ids: range) -> tuple[Any, list[Receipt], list[str]]:
        while True:
            life, rows = self.started(), self.rows(ids)
            receipts: list[Receipt] = []
            try:
                life.start(rows)
                self.changes.maybe()
                receipts = [life.prepare(rows.slice(at, 4), epoch, at) for at in (0, 4)]
                self.changes.maybe()
                life.rehearse(epoch, receipts)
            except (Misconfigured, TryAgain):
                life.committer.abort(epoch, receipts)
            else:
                return life, receipts, rows.schema.names

    def sweep(self) -> None:
        """As a start does with all that was never committed."""
        life = self.started()
        for one in life.committer.in_doubt():
            receipt = Receipt(handle=one.handle, fingerprint=Fingerprint(0))
            life.committer.abort(one.handle.epoch, [receipt])
