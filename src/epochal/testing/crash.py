"""
Crashes of a pipeline, for any sink and any log, judged by what readers see in the end.

`crash_at_every_call` ends the driver at its Nth call to log, targets and checkpoint, N = 1, 2, 3 …
until no crash fires, before the effect and after it; then again with a crash of the recovery. The
next driver must make every row visible once, and leave nothing behind:

    def test_a_crash_at_any_call_leaves_every_row_visible_once(tmp_path_factory):
        def fresh() -> Setting:
            folder = tmp_path_factory.mktemp("crash")
            sink, log = MySink(folder), MemoryLog()
            batch = pa.record_batch({"id": [1, 2, 3]})
            return Setting(
                log=lambda: log,
                sinks=lambda: [sink],
                epochs=[[[batch]]],
                visible=lambda name: my_reader(folder),
                schema=batch.schema,
            )

        crash_at_every_call(fresh)

`crash_inside_commit` ends a session *inside* the verbs of a sink, between two calls to the target:
at every call where the target has a hook for it (`Target.calls`), else by SIGKILL of a process at
random moments. The conformance suite ends with it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from epochal.contract import Committer, Select, SharedTransaction, Sink, Task, Writer
from epochal.coordinator import Environment
from epochal.coordinator.journal import EpochLog
from epochal.coordinator.targets import by_name
from epochal.errors import EpochalError
from epochal.logs import MemoryLog
from epochal.session import Session
from epochal.terms import EpochNumber, Identity, Json, Limits, SinkName
from epochal.testing.driver import (
    Checkpoint,
    Crash,
    Driver,
    Engine,
    Partitions,
    one_after_the_other,
)
from epochal.testing.other_process import OtherProcess
from epochal.testing.trial import Tick, Trial

if TYPE_CHECKING:
    import pyarrow as pa

_CALLS_MAX = 100_000

READS = frozenset(
    {
        "idle",
        "in_doubt",
        "list_names",
        "newest",
        "numbers",
        "offsets",
        "outcome",
        "position",
        "read",
        "read_list",
        "twice",
    }
)
"""Verbs that change nothing outside: a crash there is a crash at the next one that does."""

_LOG_VERBS = frozenset(
    {
        "delete",
        "delete_lists",
        "list_names",
        "numbers",
        "put_if_absent",
        "put_list",
        "read",
        "read_list",
    }
)
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
        self.is_armed = True
        """False: calls pass without being counted."""
        self.has_fired = False

    def __call__(self, perform: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.has_fired:
            raise Crash
        if not self.is_armed:
            return perform(*args, **named)
        self.calls += 1
        if self.calls == self._call and self._moment is Moment.BEFORE:
            self._fire()
        answer = perform(*args, **named)
        if self.calls == self._call:
            self._fire()
        return answer

    def opened(self, closable: Any) -> None:
        self._opened.append(closable)

    def close_all(self) -> None:
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
        """Later, by `Countdown.close_all`: a dead driver closes nothing, a live one may wait."""


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
    where = ", then ".join(f"{moment.value} call {call}" for call, moment in crashes)
    judge_at_rest(setting, f"crashed {where}")
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
        environment=Environment(parallel=one_after_the_other),
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
        tick.close_all()


def judge_at_rest(setting: Setting, where: str) -> None:
    """Every row visible once in every sink, and nothing left behind."""
    for name in by_name(setting.sinks()):
        wanted = Counter(_row(row) for row in _wanted(setting, name))
        seen = Counter(_row(row) for row in setting.visible(name))
        if lost := wanted - seen:
            raise Breach("I4", f"{where}: {name} lost {sum(lost.values())} rows: {_some(lost)}")
        if more := seen - wanted:
            raise Breach(
                "I1", f"{where}: {name} shows {sum(more.values())} rows too many: {_some(more)}"
            )
    if left := setting.leftovers():
        raise Breach("I5", f"{where}: left behind: {_some(left)}")


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


# Inside a commit


def crash_inside_commit(trial: Trial, folder: Path, *, kills: int = 3) -> None:
    """
    Sessions write one epoch after another, and each is ended while it commits; the next one
    recovers and goes on.
    """
    if trial.target.calls is not None:
        _crash_at_every_target_call(trial, trial.target.calls)
    else:
        _kill_sessions(trial, str(folder / "log"), kills)


def _crash_at_every_target_call(
    trial: Trial, calls: Callable[[Tick], AbstractContextManager[object]]
) -> None:
    log, epochs = MemoryLog(), 0
    for moment in Moment:
        for call in range(1, _CALLS_MAX):
            countdown, epochs = Countdown(call, moment), epochs + 1
            where = f"{moment.value} call {call} inside a commit"
            try:
                _session_that_dies(trial, log, calls, countdown)
                _session_to(trial, log, epochs)
            except EpochalError as error:
                raise Breach("I4", f"{where}: a session can't go on: {error}") from error
            _judge_epochs(trial, epochs, where)
            if not countdown.has_fired:
                break


def _session_that_dies(
    trial: Trial,
    log: EpochLog,
    calls: Callable[[Tick], AbstractContextManager[object]],
    countdown: Countdown,
) -> None:
    """The log is counted too, and so is out of reach of a session that has died."""
    countdown.is_armed = False
    counted = cast("EpochLog", _Counted(log, _LOG_VERBS, countdown))
    with suppress(Crash), calls(countdown), _session(trial, counted) as session:
        epoch = session.next_epoch
        session.begin(epoch)
        session.write(trial.batch(epoch))
        countdown.is_armed = True
        session.commit()
        countdown.is_armed = False


def _session_to(trial: Trial, log: EpochLog, goal: int) -> None:
    with _session(trial, log) as session:
        while session.next_epoch < goal:
            epoch = session.next_epoch
            session.begin(epoch)
            session.write(trial.batch(epoch))
            session.commit()


def _session(trial: Trial, log: EpochLog) -> Session:
    return Session(
        trial.identity().pipeline,
        sinks=[trial.sink],
        log=log,
        schema=trial.target.schema,
        limits=trial.target.limits,
        environment=Environment(parallel=one_after_the_other),
    )


def _kill_sessions(trial: Trial, log: str, kills: int) -> None:
    """
    Kills come within the time that an undisturbed commit takes. The first session is slower than
    those that follow, as it imports what they find loaded: the second one is measured.
    """
    batches = [trial.batch(epoch) for epoch in range(kills + 2)]
    with OtherProcess(trial.job("run_sessions", batches=batches, log=log)) as process:
        _asked(process, "1")
        took_s = float(_asked(process, "2"))
        for epochs in range(3, kills + 3):
            _asked(process, f"{epochs} {random.uniform(0, took_s)}")
            _asked(process, f"{epochs}")
            _judge_epochs(trial, epochs, f"a process was killed inside the commit of {epochs - 1}")


def _asked(process: OtherProcess, line: str) -> str:
    reply = process.ask(line)
    if reply in ("", "failed"):
        raise Breach("I4", f"a session can't go on after a crash: {process.errors()}")
    return reply


def _judge_epochs(trial: Trial, epochs: int, moment: str) -> None:
    wanted, seen = Counter(range(epochs)), Counter(trial.ids())
    if lost := wanted - seen:
        raise Breach("I4", f"{moment}: lost {_some(lost)}")
    if more := seen - wanted:
        raise Breach("I1", f"{moment}: too many {_some(more)}")
    if left := trial.target.leftovers():
        raise Breach("I5", f"{moment}: left behind {_some(left)}")


_STATEMENTS = frozenset({"execute", "executemany", "commit", "rollback"})


@contextmanager
def statements(module: Any, tick: Tick) -> Iterator[None]:
    """
    `Target.calls` for a DB-API module: `calls=partial(statements, sqlite3)`.

    Every statement, commit and rollback of connections that are opened by `module.connect` goes
    through the tick. In the end cursors and connections are closed, in this order: a cursor that is
    left, in a traceback say, keeps the locks of a closed connection.
    """
    connect, opened = module.connect, _Opened()
    module.connect = lambda *args, **named: _CountedConnection(
        tick(opened.note, connect, *args, **named), tick, opened
    )
    try:
        yield
    finally:
        module.connect = connect
        opened.close()


class _Opened:
    """What a process has opened, and what its end closes."""

    def __init__(self) -> None:
        self._closables: list[Any] = []

    def note(self, perform: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = perform(*args, **named)
        if hasattr(result, "close"):
            self._closables.append(result)
        return result

    def close(self) -> None:
        for closable in reversed(self._closables):
            # A cursor of a connection that the sink has closed.
            with suppress(Exception):
                closable.close()


class _CountedConnection:
    """A connection or a cursor, and the same for the cursors it gives."""

    def __init__(self, real: Any, tick: Tick, opened: _Opened) -> None:
        self._real = real
        self._tick = tick
        self._opened = opened

    def cursor(self, *args: Any, **named: Any) -> _CountedConnection:
        cursor = self._opened.note(self._real.cursor, *args, **named)
        return _CountedConnection(cursor, self._tick, self._opened)

    def close(self) -> None:
        self._tick(self._real.close)

    def __enter__(self) -> _CountedConnection:
        self._real.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.commit() if kind is None else self.rollback()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        return partial(self._tick, self._opened.note, found) if name in _STATEMENTS else found
