"""A pipeline in miniature: what a driver that stays and its tasks do to one table."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pyarrow as pa
import pytest

from epochal.contract import Begin, Committer, Sink, Task
from epochal.terms import EpochNumber, Generation, Handle, Identity, Limits, Receipt, Uid

UID = Uid("abcdefgh2345")
QUICK = Limits(retry_backoff_ms=(1, 5))


@dataclass(kw_only=True)
class DriverLife:
    """One driver of one pipeline with one sink."""

    sink: Sink
    generation: int = 1
    uid: Uid = UID
    run: str | None = None
    location: str | None = None
    committed: EpochNumber | None = None
    limits: Limits = QUICK
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
            location=self.location,
            committed=self.committed,
        )

    @property
    def committer(self) -> Any:
        """The driver's: one per driver."""
        if not self.opened:
            self.opened.append(self.sink.committer(self.identity, self.limits))
        return self.opened[0]

    def fresh(self, **changes: Any) -> Self:
        """Another process with the same sink."""
        return replace(self, opened=[], **changes)

    def close(self) -> None:
        for committer in self.opened:
            committer.close()
        self.opened.clear()

    def next_handle(self, epoch: int, partition: int) -> Handle:
        """Of one more attempt."""
        attempt = next(self.attempts)
        return self.identity.handle(EpochNumber(epoch), partition=partition, attempt=attempt)

    def rehearse(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.rehearse(EpochNumber(epoch), receipts)

    def commit(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.commit(EpochNumber(epoch), receipts)


class Life(DriverLife):
    """The same with its tasks, each of which asks the driver to begin."""

    def start(self, rows: pa.Table) -> None:
        self.committer.check(rows.schema)

    def writer(self, schema: pa.Schema, epoch: int, partition: int = 0) -> Any:
        handout = self.committer.begin(Begin(epoch=EpochNumber(epoch)))
        handle = self.next_handle(epoch, partition)
        return self.sink.writer(
            Task(handle=handle, schema=schema, handout=handout, limits=self.limits)
        )

    def prepare(self, rows: pa.Table, epoch: int, partition: int = 0) -> Receipt:
        writer = self.writer(rows.schema, epoch, partition)
        for batch in rows.to_batches(max_chunksize=1000):
            writer.write(batch)
        return writer.prepare()

    def write(self, epoch: int, *parts: pa.Table) -> list[Receipt]:
        """A whole epoch; each table is one task."""
        if not self.opened and parts:
            self.start(parts[0])
        receipts = [self.prepare(rows, epoch, number) for number, rows in enumerate(parts)]
        self.rehearse(epoch, receipts)
        self.commit(epoch, receipts)
        return receipts

    def write_after(
        self, undo: Callable[[], object], rows: pa.Table, error: type[Exception], text: str
    ) -> None:
        """An epoch whose rehearsal fails with this error, and passes once its cause is undone."""
        self.start(rows)
        receipts = [self.prepare(rows, 0)]
        with pytest.raises(error, match=text):
            self.rehearse(0, receipts)
        if self.sink.rejects_to is not None:
            assert self.committer.rejected(0) is None
        undo()
        self.rehearse(0, receipts)
        self.commit(0, receipts)

    @contextmanager
    def writing_beside(self, first: int, *parts: pa.Table) -> Iterator[None]:
        """Epochs of these rows, one after the other from the first, for the time of a block."""
        over = threading.Event()

        def write() -> None:
            for epoch in itertools.count(first):
                if over.is_set():
                    return
                self.write(epoch, *parts)

        with ThreadPoolExecutor(1) as beside:
            writing = beside.submit(write)
            try:
                yield
            finally:
                over.set()
            writing.result()
