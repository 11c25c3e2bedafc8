"""
The same guarantees without Spark, in one process: begin, write, commit or abort.

A session is for programs that produce rows themselves: a consumer loop, a test, a script. The
program numbers its epochs and says where in the source their rows come from; after a crash it asks
for `next_epoch` and goes on there. An epoch that turns out to be decided already takes its rows
again and writes none of them, except where a target lost them after the decision: then they are
written again, if their hashes prove that they are the decided ones.

Verbs are called from one thread at a time. While no epoch is open, a thread of the session sweeps
the targets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from epochal.contract import Sink, Task, Writer
from epochal.coordinator import Coordinator, Environment, Gate, Metrics, this_driver
from epochal.coordinator.idle_sweep import IdleSweep
from epochal.coordinator.journal import EpochLog
from epochal.coordinator.targets import described
from epochal.errors import EpochalError, Misconfigured, TryAgain, Unsettled
from epochal.logs import open_log
from epochal.protocol.admission import Admission, Start
from epochal.protocol.machine import Move, Phase, advance
from epochal.protocol.recovery import give_up_command
from epochal.row_hash import fingerprint_of, is_hashable
from epochal.telemetry.exporters import attach
from epochal.terms import (
    DEFAULT_LIMITS,
    NO_OFFSETS,
    NO_ROWS,
    EpochNumber,
    Limits,
    Offsets,
    Receipt,
    Receipts,
    SinkName,
)

logger = logging.getLogger("epochal")

_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}

_ONLY_PARTITION = 0


class Session:
    """
    Exactly-once writes to one or more sinks from plain Python.

        with Session("orders", sinks=[Files("out/orders")], schema=schema, log="log") as session:
            session.begin(session.next_epoch)
            session.write(rows)
            session.commit()

    Leaving the block aborts an epoch that is still open and lets go of the pipeline.
    """

    def __init__(
        self,
        name: str,
        *,
        sinks: Sequence[Sink],
        log: EpochLog | str | Path,
        schema: pa.Schema,
        gates: Iterable[Gate] = (),
        limits: Limits = DEFAULT_LIMITS,
        run: str | None = None,
        retarget: Sequence[str] = (),
        fingerprint: bool = True,
        environment: Environment | None = None,
    ) -> None:
        """`retarget`: names of sinks that write to another target from now on."""
        _require_whole_rows(sinks)
        log = open_log(str(log)) if isinstance(log, str | Path) else log
        self._sinks = {sink.name: sink for sink in sinks}
        self._schema = _without_views(schema)
        self._limits = limits
        self._is_hashed = fingerprint and is_hashable(self._schema)
        self._fingerprint = NO_ROWS
        self._coordinator = Coordinator(
            log=log, sinks=sinks, gates=gates, limits=limits, environment=environment
        )
        attach(self._coordinator.tracker, log, limits)
        self._writers: dict[SinkName, Writer] = {}
        self._buffer: list[Mapping[str, Any]] = []
        self._attempt = 0
        self._offsets = NO_OFFSETS
        self._is_replay = False
        start = Start(
            pipeline=name,
            location=log.place,
            sinks=described(sinks),
            driver=this_driver(),
            run=run,
            retarget=tuple(map(SinkName, retarget)),
            fence=limits.fence_on_start,
        )
        try:
            self._coordinator.start(start, {sink.name: self._schema for sink in sinks}, {})
        except BaseException:
            self._coordinator.stop()
            raise
        self._lock = threading.RLock()
        """Held by each verb: a sweep runs between them or not at all."""
        self._idle_sweep = IdleSweep(
            self._coordinator, self._lock, every_s=limits.sweep_every_s, on_error=_report
        )

    @property
    def state(self) -> Phase:
        return self._coordinator.phase

    @property
    def next_epoch(self) -> EpochNumber:
        """The epoch after the last decided one."""
        return self._coordinator.state.expected

    @property
    def metrics(self) -> Metrics:
        return self._coordinator.tracker.metrics()

    def begin(self, epoch: int, *, offsets: str = "") -> Admission:
        """
        Open an epoch. `offsets` says where in the source its rows are, in the caller's own words.

        `Admission.REPLAY` means that it was decided in an earlier life: its rows may be written
        again and go nowhere, except to a target that lost them. The same epoch with other offsets
        is refused (I10).
        """
        with self._lock:
            return self._begin(EpochNumber(epoch), Offsets(digest=offsets, text=offsets))

    def _begin(self, epoch: EpochNumber, offsets: Offsets) -> Admission:
        if self._is_replay:
            # A replay leaves the coordinator's phase alone; the caller still holds an open epoch.
            advance(Phase.ACTIVE, Move.BEGIN, epoch)
        lost = tuple(self._coordinator.lost)
        self._require_rewritable(epoch, lost)
        admission = self._coordinator.begin(epoch, offsets=offsets)
        self._offsets = offsets
        self._fingerprint = NO_ROWS
        self._is_replay = admission is Admission.REPLAY
        if not self._is_replay:
            self._coordinator.preparing()
        self._open_writers(epoch, lost if self._is_replay else self._sinks)
        return admission

    def write(self, rows: pa.RecordBatch | pa.Table | Iterable[Mapping[str, Any]]) -> None:
        """
        Take rows, as Arrow or as mappings from column to value.

        An error aborts the epoch, and so does Ctrl-C: a caller that goes on can't commit what one
        sink took and another did not.
        """
        if self._is_replay and not self._writers:
            return
        with self._lock:
            self._require_open()
            try:
                self._take(rows)
            except BaseException as error:
                self._give_up({}, because=error)
                raise

    def commit(self) -> None:
        """Make the open epoch visible everywhere, or abort it and raise why."""
        with self._lock:
            if self._is_replay:
                self._commit_replay()
                return
            self._require_open()
            receipts = self._prepared()
            self._coordinator.conclude(
                receipts, offsets=lambda: self._offsets, began_with=self._offsets
            )

    def _commit_replay(self) -> None:
        """Bring rows to the targets that lost them, if they are the decided ones."""
        again: dict[SinkName, tuple[Receipt, ...]] = {}
        try:
            self._prepare(list(self._writers), again)
            self._coordinator.rewrite(again)
        finally:
            self._is_replay = False

    def abort(self) -> None:
        """Throw the open epoch away; it may be begun again under the same number."""
        with self._lock:
            if self._is_replay:
                self._drop_writers()
                self._is_replay = False
                return
            self._require_open()
            self._give_up({})

    def close(self) -> None:
        self._idle_sweep.stop()
        with self._lock:
            try:
                if self._writers:
                    self.abort()
            finally:
                self._coordinator.stop()
        self._idle_sweep.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_rewritable(self, epoch: int, lost: Sequence[SinkName]) -> None:
        """Where a target lost decided rows, only these can be written, and only if proven equal."""
        decided = self._coordinator.state.unsettled
        if not lost or decided is None:
            return
        fact = (
            f"epoch {decided.epoch} is decided, and {', '.join(lost)} threw its prepared rows away"
        )
        if not self._is_hashed:
            raise Unsettled(
                fact,
                "a session that does not hash rows (fingerprint=False, or a type without a hash) "
                "can't prove that rows given again are the same: bring them to the target by hand, "
                f"then record where they are: {give_up_command(lost[0], decided.epoch)}",
            )
        if epoch != decided.epoch:
            raise Unsettled(
                f"{fact}: epoch {epoch} can't begin",
                f"begin epoch {decided.epoch} again with the same offsets, and write its rows: "
                "they are compared with those decided",
            )

    def _require_open(self) -> None:
        if not self._is_replay and self._coordinator.phase is not Phase.PREPARING:
            advance(self._coordinator.phase, Move.GATHER)

    def _open_writers(self, epoch: EpochNumber, sinks: Iterable[SinkName]) -> None:
        self._attempt += 1
        try:
            for name in sinks:
                self._writers[name] = self._sinks[name].writer(self._task(epoch, name))
        except BaseException as error:
            self._give_up({}, because=error)
            raise

    def _task(self, epoch: EpochNumber, sink: SinkName) -> Task:
        return Task(
            handle=self._coordinator.identity(sink).handle(
                epoch, partition=_ONLY_PARTITION, attempt=self._attempt
            ),
            schema=self._schema,
            handout=self._coordinator.handout(sink),
            is_first=True,
            limits=self._limits,
        )

    def _take(self, rows: pa.RecordBatch | pa.Table | Iterable[Mapping[str, Any]]) -> None:
        if isinstance(rows, pa.RecordBatch | pa.Table):
            self._flush()
            self._write_batches(_batches(rows, self._limits.buffer_rows))
        else:
            self._gather(rows)

    def _gather(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self._buffer.append(row)
            if len(self._buffer) >= self._limits.buffer_rows:
                self._flush()

    def _flush(self) -> None:
        """Hand gathered rows to the writers, inside the transaction: nothing becomes visible."""
        if self._buffer:
            gathered, self._buffer = self._buffer, []
            self._require_known_fields(gathered)
            self._write_batches([pa.RecordBatch.from_pylist(gathered, schema=self._schema)])

    def _require_known_fields(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Arrow leaves out what its schema lacks, and takes what a row lacks for null."""
        unknown = set[str]().union(*rows).difference(self._schema.names)
        if unknown:
            raise Misconfigured(
                f"rows have the fields {sorted(unknown)}, and the session's columns are "
                f"{self._schema.names}",
                "name them as schema= does, or leave them out of the rows",
            )

    def _write_batches(self, batches: Iterable[pa.RecordBatch]) -> None:
        for given in batches:
            if _without_views(given.schema) != self._schema:
                raise Misconfigured(
                    f"rows have the schema\n{given.schema}\nthe session has\n{self._schema}",
                    "give the session the schema of its rows: schema=",
                )
            batch = given if given.schema == self._schema else given.cast(self._schema)
            if self._is_hashed:
                self._fingerprint += fingerprint_of([batch])
            for name, writer in self._writers.items():
                with self._preparing(name):
                    writer.write(batch)

    def _preparing(self, sink: SinkName) -> AbstractContextManager[None]:
        """Measures what one sink does before the decision."""
        return self._coordinator.tracker.timing(sink, Phase.PREPARING)

    def _prepared(self) -> Receipts:
        receipts: dict[SinkName, tuple[Receipt, ...]] = {}
        late = [name for name, sink in self._sinks.items() if sink.prepares_last]
        self._prepare([name for name in self._sinks if name not in late], receipts)
        if late:
            self._examine(receipts)
            self._prepare(late, receipts)
        return receipts

    def _prepare(
        self, sinks: Iterable[SinkName], receipts: dict[SinkName, tuple[Receipt, ...]]
    ) -> None:
        try:
            self._flush()
            for name in sinks:
                with self._preparing(name):
                    receipts[name] = (self._hashed(self._writers[name].prepare()),)
                del self._writers[name]
        except BaseException as error:
            if not isinstance(error, TryAgain | Misconfigured):
                # Of a prepare that was not answered, rows may still arrive.
                self._coordinator.note_late_tasks()
            self._give_up(receipts, because=error)
            raise

    def _hashed(self, receipt: Receipt) -> Receipt:
        return replace(receipt, fingerprint=self._fingerprint) if self._is_hashed else receipt

    def _examine(self, receipts: Receipts) -> None:
        try:
            self._coordinator.examine(receipts)
        except BaseException:
            self._drop_writers()
            raise

    def _give_up(self, receipts: Receipts, *, because: BaseException | None = None) -> None:
        self._drop_writers()
        if self._is_replay:
            # The epoch is decided. No decision names what was prepared again: a start clears it.
            self._is_replay = False
            return
        self._coordinator.abort(receipts, because=because)

    def _drop_writers(self) -> None:
        for name, writer in self._writers.items():
            try:
                writer.abort()
            except Exception as error:  # noqa: BLE001  or it would hide why it is given up
                logger.warning("sink %s: a writer could not be given up: %s", name, error)
        self._writers = {}
        self._buffer = []


def _report(error: EpochalError) -> None:
    """What ended a session between two epochs: the next `begin` raises it, too."""
    logger.error("%s", error)


def _batches(rows: pa.RecordBatch | pa.Table, rows_max: int) -> Iterable[pa.RecordBatch]:
    return rows.to_batches(max_chunksize=rows_max) if isinstance(rows, pa.Table) else [rows]


def _without_views(schema: pa.Schema) -> pa.Schema:
    """polars and others give texts as views, which not every target takes."""
    plain = [field.with_type(_PLAIN.get(field.type, field.type)) for field in schema]
    return pa.schema(plain, schema.metadata)


def _require_whole_rows(sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        if sink.where is not None or sink.select is not None:
            raise Misconfigured(
                f"sink {sink.name!r} has where= or select=, which are SQL for Spark",
                "a session hands every row to every sink: choose rows and columns before write()",
            )
