"""
One micro-batch, from Spark's rows to a decision that is carried out at every sink.

    begin       the coordinator admits the epoch: FRESH, or REPLAY where it is decided already
    prepare     one Spark job per sink; nothing is visible yet
    conclude    the coordinator rehearses, decides and commits

Streaming queries and the once-only load (`Pipeline.write`) both write through this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from epochal.contract import Sink
from epochal.coordinator import Coordinator
from epochal.coordinator.gates import is_interrupt
from epochal.protocol.admission import Admission
from epochal.protocol.machine import Phase
from epochal.spark.batch_plan import opened, opens_plans
from epochal.spark.driver_write import DriverWrites
from epochal.spark.engine_write import SessionWriter
from epochal.spark.error_text import stop_or_error
from epochal.spark.jobs import Part, drain, evaluated, prepare_all
from epochal.spark.plan_analysis import PlanFacts
from epochal.terms import (
    NO_OFFSETS,
    EpochNumber,
    Limits,
    Offsets,
    Receipts,
    SinkName,
    quantity,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("epochal")


def no_offsets() -> Offsets:
    return NO_OFFSETS


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWriter:
    """Writes the epochs of one run, under the run's coordinator."""

    pipeline: str
    coordinator: Coordinator
    sinks: Sequence[Sink]
    limits: Limits
    has_gates: bool
    fingerprint: bool
    plan: PlanFacts
    writer: SessionWriter
    """Spark's own writer in this session."""
    job_numbers: Iterator[int] = field(default_factory=count)
    driver_writes: DriverWrites
    is_speculating: bool
    """Spark copies slow tasks: of two copies, the one that is killed may go on for a while."""
    known_settings: dict[str, str | None] = field(default_factory=dict)
    """Of the query's session, as they are between our jobs."""
    limited: set[SinkName] = field(default_factory=set)
    """Sinks whose slots limited the tasks of an epoch: each is logged once."""

    def write(
        self,
        batch: DataFrame,
        epoch: EpochNumber,
        *,
        query_id: str | None = None,
        query: StreamingQuery | None = None,
        offsets: Callable[[], Offsets] = no_offsets,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Write one epoch, or finish it where it is decided already. `query`: the one that the batch
        is from, where it is at hand. `is_stopped`: whether it was stopped; a load has none.

        Raises one of our errors, `Stopped` where the query was stopped meanwhile; and Ctrl-C.
        """
        began_with = offsets()
        admission = self.coordinator.begin(epoch, query_id=query_id, offsets=began_with)
        if admission is Admission.REPLAY:
            self._replay(batch, epoch, is_stopped)
        else:
            self._write_fresh(batch, epoch, began_with, offsets, is_stopped, query=query)

    def _write_fresh(
        self,
        batch: DataFrame,
        epoch: EpochNumber,
        began_with: Offsets,
        offsets: Callable[[], Offsets],
        is_stopped: Callable[[], bool],
        *,
        query: StreamingQuery | None,
    ) -> None:
        self.coordinator.preparing()
        if self.is_speculating:
            self.coordinator.note_late_tasks()
        is_read_once = self.plan.is_stateless and len(self.sinks) == 1 and not self.has_gates
        # With gates, and in a function of its user, others read the batch and use its session.
        only_ours = query if is_read_once else None
        rows = batch
        try:
            if only_ours is not None and self._is_to_open(batch):
                rows = opened(batch, only_ours, epoch)
            shared = nullcontext(rows) if is_read_once else evaluated(batch, self.pipeline, epoch)
            with shared as frame:
                receipts = self._prepare_in_order(
                    frame,
                    epoch,
                    is_narrow=self.plan.is_narrow or not is_read_once,
                    is_opened=rows is not batch,
                    has_session=only_ours is not None,
                )
                # From here on only the coordinator knows whether the epoch may still be aborted.
                self.coordinator.conclude(
                    receipts, offsets=offsets, began_with=began_with, frame=frame
                )
        except _PrepareFailed as failed:
            why = _to_raise(failed.error, f"epoch {epoch}", is_stopped)
            self.coordinator.abort(failed.receipts, because=why)
            raise why from None
        except BaseException as error:  # noqa: BLE001  every error is raised again as one of ours
            why = _to_raise(error, f"epoch {epoch}", is_stopped)
            if self._is_to_abort(error):
                self.coordinator.abort({}, because=why)
            raise why from None

    def _is_to_open(self, batch: DataFrame) -> bool:
        """Not where the driver writes: for few rows the calls take longer than they save."""
        (sink,) = self.sinks
        return opens_plans(sink) and self.driver_writes.expected(sink, batch) is None

    def _is_to_abort(self, error: BaseException) -> bool:
        """Whether the coordinator has not seen to the epoch itself: it does for every Exception."""
        phase = self.coordinator.phase
        return phase is Phase.PREPARING or (
            phase is Phase.PREPARED and not isinstance(error, Exception)
        )

    def _prepare_in_order(
        self,
        frame: DataFrame,
        epoch: EpochNumber,
        *,
        is_narrow: bool,
        is_opened: bool,
        has_session: bool,
    ) -> Receipts:
        """
        Prepare at every sink; at those with `prepares_last` after the others, and after rehearsals
        and gates that can refuse the epoch without them.
        """
        prepare = partial(
            self._prepare,
            frame,
            epoch,
            is_narrow=is_narrow,
            is_opened=is_opened,
            has_session=has_session,
        )
        late = [sink for sink in self.sinks if sink.prepares_last]
        early = [sink for sink in self.sinks if not sink.prepares_last]
        if not late or not (early or self.has_gates):
            return prepare(self.sinks)
        first = prepare(early) if early else {}
        self.coordinator.examine(first, frame=frame)
        try:
            return {**first, **prepare(late)}
        except _PrepareFailed as failed:
            raise _PrepareFailed({**first, **failed.receipts}, failed.error) from None

    def _prepare(
        self,
        frame: DataFrame,
        epoch: EpochNumber,
        sinks: Sequence[Sink],
        *,
        is_narrow: bool,
        is_opened: bool = False,
        has_session: bool = False,
        by_tasks: Collection[SinkName] = (),
        is_again: bool = False,
    ) -> Receipts:
        """
        `has_session`: nobody else uses the frame's session. `by_tasks`: the sinks whose rows only
        tasks may prepare, partition by partition.
        """
        parts = [
            self._part(sink, frame, is_by_tasks=sink.name in by_tasks, is_again=is_again)
            for sink in sinks
        ]
        prepared = prepare_all(
            frame,
            epoch,
            parts,
            writer=self.writer,
            limits=self.limits,
            fingerprint=self.fingerprint,
            is_narrow=is_narrow,
            is_opened=is_opened,
            timing=partial(self.coordinator.tracker.timing, phase=Phase.PREPARING),
            known_settings=self.known_settings if has_session else None,
        )
        if prepared.error is not None:
            self.coordinator.note_late_tasks()
            raise _PrepareFailed(prepared.receipts, prepared.error)
        self.driver_writes.note(prepared.receipts)
        if not is_again:
            self._log_limited(epoch, parts, prepared.receipts)
        return prepared.receipts

    def _log_limited(self, epoch: EpochNumber, parts: Sequence[Part], receipts: Receipts) -> None:
        """How many partitions a batch had is not asked: that may plan and run stages of it."""
        for part in parts:
            sink, tasks = part.sink.name, len(receipts[part.sink.name])
            if tasks == part.writers_max and sink not in self.limited:
                self.limited.add(sink)
                logger.warning(
                    "sink %s: epoch %s was written by %s, as many as its slots allow; partitions "
                    "beyond that are put together: slots= and `epochal staging` give more",
                    sink,
                    epoch,
                    quantity(tasks, "task"),
                )

    def _part(self, sink: Sink, frame: DataFrame, *, is_by_tasks: bool, is_again: bool) -> Part:
        engine = (
            self.coordinator.engine_writes(sink.name)
            if self.writer.is_within_reach and not is_by_tasks
            else None
        )
        is_by_engine = engine is not None and engine.tasks_refusal is not None
        writers_max = getattr(sink, "writers_max", None)
        if is_again and writers_max is not None and not is_by_tasks:
            # The decided attempts that are left keep their slots until the log names others.
            writers_max = 1
        return Part(
            sink=sink,
            identity=self.coordinator.identity(sink.name),
            handout=self.coordinator.handout(sink.name),
            engine=engine,
            job_number=next(self.job_numbers),
            on_driver=None
            if is_by_tasks or is_by_engine
            else self.driver_writes.expected(sink, frame),
            writers_max=writers_max,
        )

    def _replay(self, batch: DataFrame, epoch: EpochNumber, is_stopped: Callable[[], bool]) -> None:
        """The rows are decided: write none again but those that a target lost."""
        try:
            if not self.coordinator.lost:
                if not self.plan.is_stateless:
                    drain(batch, self.pipeline, epoch)
                return
            lost = [sink for sink in self.sinks if sink.name in self.coordinator.lost]
            with evaluated(batch, self.pipeline, epoch) as frame:
                # Checkpointed: the blocks that a stage reads are there, or the epoch fails.
                again = self._prepare(
                    frame,
                    epoch,
                    lost,
                    is_narrow=True,
                    by_tasks=self._lost_in_part(),
                    is_again=True,
                )
                self.coordinator.rewrite(again)
        except _PrepareFailed as failed:
            # No decision names what other sinks prepared again: the next start clears it.
            raise _to_raise(failed.error, f"epoch {epoch}, replayed", is_stopped) from None
        except BaseException as error:  # noqa: BLE001  every error is raised again as one of ours
            raise _to_raise(error, f"epoch {epoch}, replayed", is_stopped) from None

    def _lost_in_part(self) -> frozenset[SinkName]:
        """Sinks that lost some receipts of several: partition by partition, only tasks replace."""
        decision = self.coordinator.state.unsettled
        receipts = {} if decision is None else decision.receipts
        lost = self.coordinator.lost
        return frozenset(sink for sink in lost if len(receipts.get(sink, ())) > len(lost[sink]))


def _to_raise(error: BaseException, doing: str, is_stopped: Callable[[], bool]) -> BaseException:
    return error if is_interrupt(error) else stop_or_error(error, doing, is_stopped)


class _PrepareFailed(Exception):
    """A sink's job failed; what the others prepared is known, and can be aborted by name."""

    def __init__(self, receipts: Receipts, error: BaseException) -> None:
        super().__init__(str(error))
        self.receipts = receipts
        self.error = error
