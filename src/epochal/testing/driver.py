"""
A driver as the judges run it: what Spark and its runner do, without Spark.

Start, then epoch after epoch: the engine plans it, the coordinator admits it, tasks prepare (a
task whose attempt fails gets a second one, and a speculative copy may win instead), the
coordinator concludes, the engine takes note. While the source is idle, the targets are swept. A
decided epoch that comes again is written again only where a target lost its rows. Whatever is
raised ends the driver; somebody else may start the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from epochal.contract import Sink, Task
from epochal.coordinator import Coordinator, Environment, Gate
from epochal.coordinator.journal import EpochLog
from epochal.coordinator.retry import OnEnd, OnLate
from epochal.coordinator.targets import described
from epochal.errors import EpochalError, InvariantBroken, OutcomeUnknown, TryAgain
from epochal.protocol.admission import Admission, Position, Start
from epochal.protocol.machine import Phase
from epochal.terms import EpochNumber, Limits, Offsets, Receipt, Receipts, SinkName

_ATTEMPTS_MAX = 2
_OPEN = frozenset({Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED})

Partitions = Sequence[Sequence[Any]]
"""The batches of each partition of an epoch, as the sink's writer takes them."""


class Engine(Protocol):
    """What the engine remembers, whether it runs a task twice, and whether rows are waiting."""

    def position(self) -> Position: ...

    def plan(self, epoch: EpochNumber) -> bool: ...

    def offsets(self, epoch: EpochNumber) -> Offsets: ...

    def finish(self, epoch: EpochNumber) -> None: ...

    def twice(self, epoch: EpochNumber, partition: int) -> bool: ...

    def idle(self) -> bool:
        """Whether no row has come for as long as the time between two sweeps."""


class Crash(BaseException):
    """The driver is gone, as after SIGKILL. No handler may catch it, so it is no Exception."""


class JobFailed(Exception):
    """A task used up its attempts."""


class Overtaken(Exception):
    """The engine found another driver at work on its checkpoint."""


class Checkpoint:
    """The engine's own memory: offsets before an epoch, a mark after it."""

    __slots__ = ("digests", "finished", "planned")

    def __init__(self, digests: Sequence[str]) -> None:
        self.digests = tuple(digests)
        """The offsets of each epoch: fixed by the source, unless somebody edits the checkpoint."""
        self.planned = -1
        self.finished = -1

    def copy(self) -> Checkpoint:
        other = Checkpoint(self.digests)
        other.planned, other.finished = self.planned, self.finished
        return other

    def key(self) -> Hashable:
        return (self.digests, self.planned, self.finished)

    def position(self) -> Position:
        return Position(
            planned=None if self.planned < 0 else EpochNumber(self.planned),
            finished=None if self.finished < 0 else EpochNumber(self.finished),
        )

    def plan(self, epoch: EpochNumber) -> bool:
        """False where another driver is ahead: the engine then stops this one."""
        if epoch < self.planned:
            return False
        self.planned = max(self.planned, epoch)
        return True

    def offsets(self, epoch: EpochNumber) -> Offsets:
        return Offsets(digest=self.digests[epoch], text=f"the rows of epoch {epoch}")

    def finish(self, epoch: EpochNumber) -> None:
        self.finished = max(self.finished, epoch)

    def twice(self, epoch: EpochNumber, partition: int) -> bool:  # noqa: ARG002
        return False

    def idle(self) -> bool:
        return False


def one_after_the_other(
    jobs: Sequence[Callable[[], None]],
    *,
    late_s: Sequence[float],  # noqa: ARG001
    give_up_s: float,  # noqa: ARG001
    on_end: OnEnd,
    on_late: OnLate,  # noqa: ARG001
) -> Sequence[BaseException | None]:
    """`Environment.parallel` without threads, for runs that must repeat themselves."""
    results = []
    for at, job in enumerate(jobs):
        results.append(_error_of(job))
        on_end(at, results[-1])
    return results


def _error_of(job: Callable[[], None]) -> BaseException | None:
    try:
        job()
    except Exception as error:  # noqa: BLE001  as in threads: the caller sorts it
        return error
    return None


@dataclass(kw_only=True)
class Driver:
    log: EpochLog
    sinks: Sequence[Sink]
    engine: Engine
    read: Callable[[EpochNumber], Partitions]
    """The rows of an epoch; a source that is not deterministic gives others each time."""
    epochs: int
    limits: Limits = Limits()
    environment: Environment = field(default_factory=Environment)
    gates: Iterable[Gate] = ()
    schema: Any = None
    location: str = "the checkpoint"
    pipeline: str = "simulated"
    attempts: int = 0
    """Task attempts so far: no two of one driver share a number (I6)."""

    def run(self) -> None:
        """One life of a driver, to its end or to the first error."""
        coordinator = Coordinator(
            log=self.log,
            sinks=self.sinks,
            gates=self.gates,
            limits=self.limits,
            environment=self.environment,
        )
        try:
            position = self.engine.position()
            coordinator.start(
                self._start(position), {sink.name: self.schema for sink in self.sinks}
            )
            for number in range(position.upcoming, self.epochs):
                self._idle(coordinator)
                self._epoch(coordinator, EpochNumber(number))
            self._idle(coordinator)
        finally:
            coordinator.stop()

    def _idle(self, coordinator: Coordinator) -> None:
        while not coordinator.lost and self.engine.idle():
            coordinator.sweep()

    def _start(self, position: Position) -> Start:
        return Start(
            pipeline=self.pipeline,
            location=self.location,
            sinks=described(self.sinks),
            query_id="the query",
            position=position,
            fence=self.limits.fence_on_start,
        )

    def _epoch(self, coordinator: Coordinator, epoch: EpochNumber) -> None:
        if not self.engine.plan(epoch):
            raise Overtaken(f"epoch {epoch} was planned by another driver")
        offsets = self.engine.offsets(epoch)
        admission = coordinator.begin(epoch, query_id="the query", offsets=offsets)
        if admission is Admission.FRESH:
            self._write(coordinator, epoch, offsets)
        elif coordinator.lost:
            coordinator.rewrite(self._prepared(coordinator, epoch, coordinator.lost))
        self.engine.finish(epoch)

    def _write(self, coordinator: Coordinator, epoch: EpochNumber, offsets: Offsets) -> None:
        try:
            coordinator.preparing()
            receipts = self._prepared_in_order(coordinator, epoch)
        except Exception:
            if coordinator.phase in _OPEN:
                coordinator.abort({})
            raise
        coordinator.conclude(
            receipts, offsets=lambda: self.engine.offsets(epoch), began_with=offsets
        )

    def _prepared_in_order(self, coordinator: Coordinator, epoch: EpochNumber) -> Receipts:
        late = [sink.name for sink in self.sinks if sink.prepares_last]
        early = [sink.name for sink in self.sinks if not sink.prepares_last]
        first = self._prepared(coordinator, epoch, early)
        if late and early:
            coordinator.examine(first)
        return {**first, **self._prepared(coordinator, epoch, late)}

    def _prepared(
        self, coordinator: Coordinator, epoch: EpochNumber, names: Iterable[SinkName]
    ) -> Receipts:
        """The receipts of a job that succeeded as a whole: one per partition and sink (I6)."""
        partitions = self.read(epoch)
        wanted = [sink for sink in self.sinks if sink.name in set(names)]
        return {
            sink.name: tuple(
                self._run(_Partition(coordinator, sink, epoch, at, batches))
                for at, batches in enumerate(partitions)
            )
            for sink in wanted
        }

    def _run(self, one: _Partition) -> Receipt:
        won = self._attempts(one)
        if self.engine.twice(one.epoch, one.number):
            return self._attempt(one, is_first=False)
        return won

    def _attempts(self, one: _Partition) -> Receipt:
        for attempt in range(_ATTEMPTS_MAX):
            try:
                return self._attempt(one, is_first=attempt == 0)
            except (TryAgain, OutcomeUnknown, OSError):
                continue
        raise JobFailed(f"epoch {one.epoch}, partition {one.number}: no attempt was left")

    def _attempt(self, one: _Partition, *, is_first: bool) -> Receipt:
        self.attempts += 1
        identity = one.coordinator.identity(one.sink.name)
        handle = identity.handle(one.epoch, partition=one.number, attempt=self.attempts)
        task = Task(
            handle=handle,
            schema=self.schema,
            handout=one.coordinator.handout(one.sink.name),
            is_first=is_first,
            limits=self.limits,
        )
        writer = one.sink.writer(task)
        for batch in one.batches:
            writer.write(batch)
        try:
            return writer.prepare()
        except (OutcomeUnknown, OSError):
            one.coordinator.note_late_tasks()
            raise


@dataclass(frozen=True, slots=True)
class _Partition:
    """What one task writes: a partition's rows to one sink."""

    coordinator: Coordinator
    sink: Sink
    epoch: EpochNumber
    number: int
    batches: Sequence[Any]


def ends_by_the_rules(error: BaseException) -> bool:
    """An end that a driver may come to; any other is a defect of ours."""
    return isinstance(error, (EpochalError, JobFailed, Overtaken)) and not isinstance(
        error, InvariantBroken
    )
