"""A pipeline in miniature: what a driver and its tasks would do to one sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from epochal.contract import Committer, Sink, Task
from epochal.terms import (
    EpochNumber,
    Generation,
    Handle,
    Identity,
    Limits,
    Receipt,
    Uid,
)

# Tests that several databases share show as much as others when they fail.
pytest.register_assert_rewrite("kit.sql")

UID = Uid("abcdefgh2345")


@dataclass(frozen=True)
class Driver:
    """One life of one pipeline with one sink."""

    sink: Sink
    uid: Uid = UID
    pipeline: str = "orders"
    generation: int = 1
    run: str | None = None
    limits: Limits = Limits()

    @property
    def identity(self) -> Identity:
        return Identity(
            pipeline=self.pipeline,
            uid=self.uid,
            sink=self.sink.name,
            generation=Generation(self.generation),
            run=self.run,
        )

    @property
    def committer(self) -> Committer:
        return self.sink.committer(self.identity, self.limits)

    def handle(self, epoch: int, partition: int = 0, attempt: int = 0) -> Handle:
        return self.identity.handle(EpochNumber(epoch), partition=partition, attempt=attempt)

    def task(self, rows: pa.Table, epoch: int, partition: int = 0, attempt: int = 0) -> Task:
        handle = self.handle(epoch, partition, attempt)
        return Task(handle=handle, schema=rows.schema, limits=self.limits)

    def prepare(self, rows: pa.Table, epoch: int, partition: int = 0, attempt: int = 0) -> Receipt:
        writer = self.sink.writer(self.task(rows, epoch, partition, attempt))
        for batch in rows.to_batches(max_chunksize=1000):
            writer.write(batch)
        return writer.prepare()

    def commit(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.commit(EpochNumber(epoch), receipts)

    def write(self, rows: pa.Table, epoch: int) -> list[Receipt]:
        receipts = [self.prepare(rows, epoch)]
        self.commit(epoch, receipts)
        return receipts

    def another(self, **changes: Any) -> Driver:
        return replace(self, **changes)


@pytest.fixture
def drive() -> Callable[..., Driver]:
    return Driver


@pytest.fixture
def numbers() -> Callable[..., pa.Table]:
    def numbered(*values: int) -> pa.Table:
        return pa.table({"n": pa.array(values, pa.int64())})

    return numbered


@pytest.fixture
def some() -> Callable[..., pa.Table]:
    """Rows with these ids."""

    def made(*ids: int, name: str = "n") -> pa.Table:
        return pa.table(
            {"id": pa.array(ids, pa.int64()), "name": [f"{name}{number}" for number in ids]}
        )

    return made
