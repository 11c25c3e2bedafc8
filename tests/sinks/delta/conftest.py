"""A table and a pipeline in miniature for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sinks.delta import delta_stage

from epochal.contract import Committer, Limits, Task
from epochal.sinks.delta import Delta
from epochal.terms import EpochNumber, Generation, Identity, Receipt, Uid

UID = Uid("abcdefgh2345")
QUICK = Limits(retry_backoff_ms=(1, 5, 20))


@dataclass(kw_only=True)
class Life:
    """One driver of one pipeline with one sink, and its tasks."""

    sink: Delta
    generation: int = 1
    uid: Uid = UID
    run: str | None = None
    attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    opened: list[Committer] = field(default_factory=list)

    @property
    def identity(self) -> Identity:
        return Identity(
            pipeline="orders",
            uid=self.uid,
            sink=self.sink.name,
            generation=Generation(self.generation),
            run=self.run,
        )

    @property
    def committer(self) -> Any:
        """The driver's: one a life."""
        if not self.opened:
            self.opened.append(self.sink.committer(self.identity, QUICK))
        return self.opened[0]

    def fresh(self, **changes: Any) -> Life:
        """Another process with the same sink."""
        return replace(self, opened=[], **changes)

    def prepare(self, rows: pa.Table, epoch: int, partition: int = 0) -> Receipt:
        handout = self.committer.begin(EpochNumber(epoch))
        handle = self.identity.handle(
            EpochNumber(epoch), partition=partition, attempt=next(self.attempts)
        )
        task = Task(handle=handle, schema=rows.schema, handout=handout, limits=QUICK)
        writer = self.sink.writer(task)
        for batch in rows.to_batches(max_chunksize=1000):
            writer.write(batch)
        return writer.prepare()

    def rehearse(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.rehearse(EpochNumber(epoch), receipts)

    def commit(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.commit(EpochNumber(epoch), receipts)

    def write(self, epoch: int, *parts: pa.Table) -> list[Receipt]:
        """A whole epoch, each table a task."""
        if not self.opened and parts:
            self.committer.check(parts[0].schema)
        receipts = [self.prepare(rows, epoch, number) for number, rows in enumerate(parts)]
        self.rehearse(epoch, receipts)
        self.commit(epoch, receipts)
        return receipts


@dataclass(kw_only=True)
class Lake:
    """One table of one test."""

    folder: Path

    def made(self, schema: pa.Schema, **options: Any) -> Any:
        return delta_stage.made(self.folder, schema, **options)

    def life(self, **options: Any) -> Life:
        return Life(sink=Delta(self.folder, **options))

    def rows(self, columns: str = "*") -> list[tuple[Any, ...]]:
        found = delta_stage.rows(self.folder, columns)
        return sorted((tuple(row.values()) for row in found), key=repr)

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in delta_stage.rows(self.folder, "id"))

    def leftovers(self) -> list[str]:
        return delta_stage.leftovers(self.folder)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(folder=tmp_path / "table")


ORDERS = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])


@pytest.fixture
def orders(lake: Lake) -> Lake:
    lake.made(ORDERS)
    return lake


@pytest.fixture
def some() -> Callable[..., pa.Table]:
    """Rows with these ids."""

    def made(*ids: int, name: str = "n") -> pa.Table:
        names = [f"{name}{number}" for number in ids]
        return pa.table({"id": list(ids), "name": names}, schema=ORDERS)

    return made
