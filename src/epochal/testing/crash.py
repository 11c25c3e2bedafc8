"""
Crash at every call: N = 1, 2, 3 … until no crash fires, then again with a crash during the
recovery.

For any sink and any log. Whatever a driver asks of its log, its targets and its engine's
checkpoint is counted; at the Nth call the driver is gone, before the effect or after it. The next
driver must bring every row to be visible once, and leave nothing behind. A few lines judge a sink
of your own:

    def test_a_crash_at_any_call_leaves_every_row_visible_once(tmp_path_factory):
        def fresh() -> Setting:
            folder = tmp_path_factory.mktemp("crash")
            sink = MySink(folder)
            return Setting(
                log=MemoryLog, sinks=lambda: [sink], epochs=some_epochs(),
                visible=lambda name: my_reader(folder),
            )
        crash_at_every_call(fresh)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from epochal.contract import (
    Committer,
    EpochLog,
    Limits,
    Select,
    SharedTransaction,
    Sink,
    Task,
    Writer,
)
from epochal.coordinator import Surroundings
from epochal.coordinator.starting import by_name
from epochal.terms import EpochNumber, Identity, Json, SinkName
from epochal.testing.driver import (
    Checkpoint,
    Crash,
    Driver,
    Engine,
    Partitions,
    one_after_the_other,
)

if TYPE_CHECKING:
    import pyarrow as pa

_CALLS_MAX = 100_000

READS = frozenset(
    {"numbers", "read", "in_doubt", "outcome", "newest", "position", "offsets", "twice"}
)
"""Verbs that change nothing outside: a crash there is a crash at the next one that does."""

_LOG_VERBS = frozenset({"put_if_absent", "numbers", "read", "delete"})
_ENGINE_VERBS = frozenset({"position", "plan", "finish"})
_WRITER_VERBS = frozenset({"write", "prepare"})
_COMMITTER_VERBS = frozenset(
    {"check", "begin", "rehearse", "commit", "abort", "in_doubt", "outcome", "newest", "prune"}
)

_SHARED_VERBS = frozenset({"rehearse", "commit"})


class Breach(AssertionError):
    """A promise was broken, and which."""

    def __init__(self, rule: str, fact: str) -> None:
        super().__init__(f"{rule}: {fact}")
        self.rule = rule


class Moment(Enum):
    BEFORE = "before"
    AFTER = "after"


@dataclass(kw_only=True)
class Setting:
    """A pipeline to crash, and how to look at what is left of it. Fresh for every run."""

    log: Callable[[], EpochLog]
    """Opens the log; a second call must open the same one."""
    sinks: Callable[[], Sequence[Sink]]
    """Declares the sinks; a second call must mean the same targets."""
    epochs: Sequence[Partitions]
    """Per epoch and partition, the batches that a writer takes."""
    visible: Callable[[SinkName], Iterable[Mapping[str, Any]]]
    """The rows of a sink, as a reader of its target sees them."""
    wanted: Callable[[SinkName], Iterable[Mapping[str, Any]]] | None = None
    """The rows that each sink is to show in the end; all rows of all epochs where not given."""
    leftovers: Callable[[], Collection[object]] = tuple
    """Whatever else must not be left at the targets: staging folders, tables, uploads."""
    schema: pa.Schema | None = None
    limits: Limits = field(default_factory=lambda: Limits(retry_backoff_ms=(1,), sweep_every_s=0.0))

    @cached_property
    def engine(self) -> Engine:
        """One checkpoint for all drivers of this setting."""
        return _SpeculativeCheckpoint([f"offsets-{at}" for at in range(len(self.epochs))])


class _SpeculativeCheckpoint(Checkpoint):
    """Runs the first task of every other epoch twice, so that there are losers to clear up."""

    def twice(self, epoch: EpochNumber, partition: int) -> bool:
        return epoch % 2 == 0 and partition == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    calls: int
    """Calls of an undisturbed run."""
    runs: int
    """Runs that were crashed, recovered and judged."""


class Countdown:
    """Lets a number of calls pass, then is the death of the driver that makes them."""

    def __init__(
        self, call: int | None, moment: Moment, *, passes: frozenset[str] = frozenset()
    ) -> None:
        self._call = call
        self._moment = moment
        self.passes = passes
        """Verbs that are not counted."""
        self._opened: list[Any] = []
        self.calls = 0
        self.has_fired = False

    def __call__(self, perform: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.has_fired:
            raise Crash
        self.calls += 1
        if self.calls == self._call and self._moment is Moment.BEFORE:
            self._fire()
        answer = perform(*args, **named)
        if self.calls == self._call:
            self._fire()
        return answer

    def opened(self, closable: Any) -> None:
        self._opened.append(closable)

    def bury(self) -> None:
        """What an operating system does for a dead process: its connections end."""
        for closable in self._opened:
            closable.close()

    def _fire(self) -> None:
        self.has_fired = True
        raise Crash


class _Counted:
    """Stands before an object and sends some of its verbs through the countdown."""

    def __init__(self, real: Any, verbs: frozenset[str], tick: Countdown) -> None:
        self._real = real
        self._verbs = verbs
        self._tick = tick

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in self._verbs - self._tick.passes:
            return found
        return lambda *args, **named: self._tick(found, *args, **named)

    def close(self) -> None:
        """Later, by `Countdown.bury`: a dead driver closes nothing, a live one may wait."""


class _CountedCommitter(_Counted):
    def share(self, members: Sequence[_Counted]) -> SharedTransaction:
        shared = self._real.share([member._real for member in members])
        return cast("SharedTransaction", _Counted(shared, _SHARED_VERBS, self._tick))


@dataclass(frozen=True, kw_only=True)
class _CountedSink:
    real: Sink
    tick: Countdown

    @property
    def name(self) -> SinkName:
        return self.real.name

    @property
    def where(self) -> str | None:
        return self.real.where

    @property
    def select(self) -> Select:
        return self.real.select

    @property
    def output_modes(self) -> frozenset[str]:
        return self.real.output_modes

    @property
    def prepares_last(self) -> bool:
        return self.real.prepares_last

    @property
    def rejects_to(self) -> Sink | None:
        taker = self.real.rejects_to
        return None if taker is None else _CountedSink(real=taker, tick=self.tick)

    @property
    def transaction_key(self) -> str | None:
        return self.real.transaction_key

    def describe(self) -> Mapping[str, Json]:
        return self.real.describe()

    def writer(self, task: Task) -> Writer:
        return cast("Writer", _Counted(self.real.writer(task), _WRITER_VERBS, self.tick))

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        committer = self.real.committer(identity, limits)
        self.tick.opened(committer)
        return cast("Committer", _CountedCommitter(committer, _COMMITTER_VERBS, self.tick))


def crash_at_every_call(
    fresh: Callable[[], Setting],
    *,
    second: bool = True,
    second_every: int = 1,
    effects_only: bool = False,
) -> CrashReport:
    """
    Crash at each call, before and after its effect; with `second`, crash the recovery at each
    call too.

    `second_every` takes only every so many-th call of the recovery, for targets that are slow. A
    second crash comes after effects only: before a call is after the one that precedes it. For the
    same reason `effects_only` crashes just after calls that change something, as between two of
    them a driver leaves the same behind wherever it dies.
    """
    passes = READS if effects_only else frozenset()
    runs, calls = 0, _undisturbed(fresh(), passes)
    for moment in [Moment.AFTER] if effects_only else Moment:
        for first in range(1, _CALLS_MAX):
            runs += 1
            if not _crashed_and_judged(fresh(), [(first, moment)], passes):
                break
    if not second:
        return CrashReport(calls=calls, runs=runs)
    for first in range(1, calls + 1):
        for again in range(1, _CALLS_MAX, second_every):
            runs += 1
            crashes = [(first, Moment.AFTER), (again, Moment.AFTER)]
            if not _crashed_and_judged(fresh(), crashes, passes):
                break
    return CrashReport(calls=calls, runs=runs)


def _undisturbed(setting: Setting, passes: frozenset[str]) -> int:
    countdown = Countdown(None, Moment.BEFORE, passes=passes)
    _drive(setting, countdown)
    _drive(setting, Countdown(None, Moment.BEFORE))
    judge_at_rest(setting, "undisturbed")
    return countdown.calls


def _crashed_and_judged(
    setting: Setting, crashes: Sequence[tuple[int, Moment]], passes: frozenset[str]
) -> bool:
    """Whether every crash fired; the run is judged either way."""
    fired = True
    for call, moment in crashes:
        countdown = Countdown(call, moment, passes=passes)
        _drive(setting, countdown)
        fired = fired and countdown.has_fired
    _drive(setting, Countdown(None, Moment.BEFORE))
    told = ", then ".join(f"{moment.value} call {call}" for call, moment in crashes)
    judge_at_rest(setting, f"crashed {told}")
    return fired


def _drive(setting: Setting, tick: Countdown) -> None:
    log = setting.log()
    driver = Driver(
        log=cast("EpochLog", _Counted(log, _LOG_VERBS, tick)),
        sinks=[_CountedSink(real=sink, tick=tick) for sink in setting.sinks()],
        engine=cast("Engine", _Counted(setting.engine, _ENGINE_VERBS, tick)),
        read=lambda epoch: setting.epochs[epoch],
        epochs=len(setting.epochs),
        limits=setting.limits,
        around=Surroundings(together=one_after_the_other),
        schema=setting.schema,
        location="crash test",
        pipeline="crash test",
    )
    tick.opened(log)
    try:
        driver.run()
    except Crash:
        return
    finally:
        tick.bury()


def judge_at_rest(setting: Setting, told: str) -> None:
    """Every row visible once in every sink, and nothing left behind."""
    for name in by_name(setting.sinks()):
        wanted = Counter(_row(row) for row in _wanted(setting, name))
        seen = Counter(_row(row) for row in setting.visible(name))
        if lost := wanted - seen:
            raise Breach("I4", f"{told}: {name} lost {sum(lost.values())} rows: {_some(lost)}")
        if more := seen - wanted:
            raise Breach(
                "I1", f"{told}: {name} shows {sum(more.values())} rows too many: {_some(more)}"
            )
    if left := setting.leftovers():
        raise Breach("I5", f"{told}: left behind: {_some(left)}")


def _wanted(setting: Setting, sink: SinkName) -> Iterable[Mapping[str, Any]]:
    if setting.wanted is not None:
        return setting.wanted(sink)
    return [
        row
        for epoch in setting.epochs
        for partition in epoch
        for batch in partition
        for row in batch.to_pylist()
    ]


def _row(row: Mapping[str, Any]) -> Hashable:
    return tuple(sorted((name, repr(value)) for name, value in row.items()))


def _some(things: Iterable[object]) -> str:
    listed = [str(thing) for thing in things]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
