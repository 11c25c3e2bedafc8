"""A target that does not answer: it is given up on, and left alone from then on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from epochal.contract import Task
from epochal.coordinator import Coordinator, Environment, commit, read_state
from epochal.coordinator.retry import IDLE, Result, StillRunning, in_threads
from epochal.errors import OutcomeUnknown, TryAgain, Unsettled
from epochal.logs import MemoryLog
from epochal.protocol.admission import Start
from epochal.protocol.machine import Phase
from epochal.sinks.memory import Memory
from epochal.sinks.memory.sink import MemoryCommitter
from epochal.terms import EpochNumber, Identity, InDoubt, Limits, Receipt

ZERO = EpochNumber(0)
SCHEMA = pa.schema([("id", pa.int64())])
HANGS = threading.Event()
"""A target does not answer."""


@pytest.fixture(autouse=True)
def none_hangs_yet() -> None:
    HANGS.clear()


class TimeIsOver(BaseException):
    """Ends the wait for a target that hangs."""


def until_one_hangs(
    jobs: Sequence[Callable[[], None]], *, late_s: Any, give_up_s: float, on_end: Any, on_late: Any
) -> Sequence[Result]:
    """
    As a driver calls its targets, but for the time: it is over once one of them hangs and all
    others have answered, however long that takes on a busy machine.
    """
    results: list[Result] = [StillRunning(f"no answer within {give_up_s:.0f} s") for _ in jobs]
    waiting = set(range(len(jobs)))

    def ended(at: int, result: Result) -> None:
        waiting.remove(at)
        results[at] = result
        on_end(at, result)

    def look(_after_s: float) -> None:
        if HANGS.is_set() and len(waiting) == 1:
            raise TimeIsOver

    looks_s = [number / 100 for number in range(1, 6000)]
    try:
        in_threads(jobs, late_s=looks_s, give_up_s=60.0, on_end=ended, on_late=look)
    except TimeIsOver:
        for at in waiting:
            on_end(at, results[at])
    return tuple(results)


IMPATIENT = Environment(parallel=until_one_hangs)
OFTEN = Limits(sweep_every_s=0.0)


class Hanging(MemoryCommitter):
    """Hangs in `rehearse`, and notes what it is asked meanwhile."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)
        self.is_released = threading.Event()
        self.asked_meanwhile: list[str] = []
        self._is_hanging = False

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._is_hanging = True
        HANGS.set()
        self.is_released.wait(60)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._note("abort")

    def in_doubt(self) -> Sequence[InDoubt]:
        self._note("in_doubt")
        return super().in_doubt()

    def close(self) -> None:
        self._note("close")

    def _note(self, verb: str) -> None:
        if self._is_hanging:
            self.asked_meanwhile.append(verb)


class HangingSink(Memory):
    def committer(self, identity: Identity, limits: Limits) -> Hanging:
        made = Hanging(identity, self._reference.store(), replaces=False)
        object.__setattr__(self, "made", made)
        return made


def begun(
    sink: Memory, limits: Limits = OFTEN, environment: Environment = IMPATIENT
) -> Coordinator:
    coordinator = Coordinator(log=MemoryLog(), sinks=[sink], limits=limits, environment=environment)
    coordinator.start(Start(pipeline="p", location="/c", sinks={sink.name: sink.describe()}))
    coordinator.begin(ZERO)
    coordinator.preparing()
    return coordinator


def test_a_committer_that_hangs_is_not_called_again():
    sink = HangingSink()
    coordinator = begun(sink)
    with pytest.raises(StillRunning, match="no answer"):
        coordinator.conclude({sink.name: ()})
    coordinator.stop()
    assert sink.made.asked_meanwhile == []
    sink.made.is_released.set()


def interrupted_once_asked(jobs: Sequence[Callable[[], None]], **how: Any) -> Sequence[Result]:
    """Ctrl-C while the driver waits for its targets."""
    results = until_one_hangs(jobs, **how)
    if any(isinstance(result, StillRunning) for result in results):
        raise KeyboardInterrupt
    return results


def test_a_committer_that_is_at_work_when_ctrl_c_comes_is_not_called_again():
    sink = HangingSink()
    coordinator = begun(sink, environment=Environment(parallel=interrupted_once_asked))
    with pytest.raises(KeyboardInterrupt):
        coordinator.conclude({sink.name: ()})
    coordinator.stop()
    assert sink.made.asked_meanwhile == []
    assert not coordinator.state.is_stopped
    sink.made.is_released.set()


class HangingAtCommit(Hanging):
    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Passes."""

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        super().rehearse(epoch, receipts)


class HangingAtCommitSink(Memory):
    def committer(self, identity: Identity, limits: Limits) -> HangingAtCommit:
        made = HangingAtCommit(identity, self._reference.store(), replaces=False)
        object.__setattr__(self, "made", made)
        return made


def two_begun(
    log: MemoryLog,
    hanging: Memory,
    other: Memory,
    limits: Limits = OFTEN,
    environment: Environment = IMPATIENT,
) -> Coordinator:
    coordinator = Coordinator(
        log=log, sinks=[hanging, other], limits=limits, environment=environment
    )
    sinks = {sink.name: sink.describe() for sink in (hanging, other)}
    coordinator.start(Start(pipeline="p", location="/c", sinks=sinks))
    coordinator.begin(ZERO)
    coordinator.preparing()
    return coordinator


def test_what_is_done_beside_a_target_that_hangs_is_noted_and_nothing_more_is_written():
    hanging, other = HangingAtCommitSink(name="hanging"), Memory(name="other")
    log = MemoryLog()
    coordinator = two_begun(log, hanging, other)
    with pytest.raises(Unsettled, match="hanging"):
        coordinator.conclude({"hanging": (), "other": ()})
    with pytest.raises(Unsettled, match="did not answer"):
        coordinator.begin(EpochNumber(1))
    coordinator.stop()
    state = read_state(log)
    assert (state.done, state.is_stopped) == ({"other"}, False)
    assert hanging.made.asked_meanwhile == []
    hanging.made.is_released.set()


class Busy(MemoryCommitter):
    """Is done at the second attempt."""

    attempts = 0

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise TryAgain("busy")
        super().commit(epoch, receipts)


class BusySink(Memory):
    def committer(self, identity: Identity, limits: Limits) -> Busy:
        return Busy(identity, self._reference.store(), replaces=False)


@pytest.mark.parametrize("other", [Memory(name="other"), BusySink(name="other")])
def test_a_sink_is_done_and_on_record_while_another_target_hangs(other, monkeypatch):
    monkeypatch.setattr(commit, "_NOTE_AFTER_S", 0.05)
    hanging, log = HangingAtCommitSink(name="hanging"), MemoryLog()
    limits = Limits(retry_backoff_ms=(1,))
    coordinator = two_begun(log, hanging, other, limits, Environment())
    concluding = threading.Thread(
        target=coordinator.conclude, args=({"hanging": (), "other": ()},), daemon=True
    )
    concluding.start()
    wait_for(lambda: read_state(log).done == {"other"})
    assert concluding.is_alive()
    phases = {name: one.phase for name, one in coordinator.tracker.current().sinks.items()}
    assert phases == {"hanging": Phase.PREPARED, "other": Phase.COMMITTED}
    hanging.made.is_released.set()
    concluding.join(60)
    assert coordinator.phase is Phase.COMMITTED


def wait_for(fact: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class HangingAt(MemoryCommitter):
    """Hangs in one verb, once armed."""

    verb = ""
    is_armed = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.is_released = threading.Event()
        self.aborted: list[Receipt] = []

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).verb and type(self).is_armed:
            type(self).is_armed = False
            return partial(self._hang, name)
        return super().__getattribute__(name)

    def _hang(self, verb: str, *args: Any) -> Any:
        HANGS.set()
        self.is_released.wait(60)
        return super().__getattribute__(verb)(*args)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.aborted += receipts
        super().abort(epoch, receipts)


class HangingAtSink(Memory):
    def committer(self, identity: Identity, limits: Limits) -> HangingAt:
        made = HangingAt(identity, self._reference.store(), replaces=False)
        object.__setattr__(self, "made", made)
        return made


def arm(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(HangingAt, "verb", verb)
    monkeypatch.setattr(HangingAt, "is_armed", True)


@pytest.mark.parametrize("verb", ["check", "newest", "in_doubt"])
def test_a_start_gives_up_a_target_that_hangs_and_names_it(verb, monkeypatch):
    sink = HangingAtSink(name="slow")
    coordinator = Coordinator(log=MemoryLog(), sinks=[sink], environment=IMPATIENT)
    arm(monkeypatch, verb)
    with pytest.raises(StillRunning, match="sink slow: no answer"):
        coordinator.start(Start(pipeline="p", location="/c", sinks={"slow": sink.describe()}))
    coordinator.stop()
    sink.made.is_released.set()


@pytest.mark.parametrize("verb", ["in_doubt", "prune", "begin"])
def test_an_epoch_that_begins_gives_up_a_target_that_hangs_and_names_it(verb, monkeypatch):
    sink = HangingAtSink(name="slow")
    coordinator = begun(sink)
    coordinator.conclude({"slow": ()})
    arm(monkeypatch, verb)
    with pytest.raises(StillRunning, match="sink slow: no answer"):
        coordinator.begin(EpochNumber(1))
    with pytest.raises(Unsettled, match="did not answer"):
        coordinator.begin(EpochNumber(1))
    coordinator.stop()
    sink.made.is_released.set()


def prepared_at(sink: Memory, coordinator: Coordinator, epoch: int, attempt: int = 1) -> Receipt:
    identity = coordinator.identity(sink.name)
    handle = identity.handle(EpochNumber(epoch), partition=0, attempt=attempt)
    return sink.writer(Task(handle=handle, schema=SCHEMA)).prepare()


def test_a_sweep_clears_the_others_while_a_target_hangs(monkeypatch):
    hanging, other = HangingAtSink(name="hanging"), Memory(name="other")
    coordinator = two_begun(MemoryLog(), hanging, other)
    coordinator.conclude({"hanging": (), "other": ()})
    for sink in (hanging, other):
        prepared_at(sink, coordinator, 1)
    listed = coordinator._targets.committers["other"].in_doubt
    assert len(listed()) == 1
    arm(monkeypatch, "in_doubt")
    with pytest.raises(StillRunning, match="sink hanging"):
        coordinator.begin(EpochNumber(1))
    assert listed() == []
    coordinator.stop()
    hanging.made.is_released.set()


class Failing(MemoryCommitter):
    def in_doubt(self) -> Sequence[InDoubt]:
        if HangingAt.verb:
            raise TryAgain("away")
        return super().in_doubt()


class FailingSink(Memory):
    def committer(self, identity: Identity, limits: Limits) -> Failing:
        return Failing(identity, self._reference.store(), replaces=False)


def test_a_target_that_hangs_beside_one_that_fails_is_not_called_again(monkeypatch):
    failing, hanging = FailingSink(name="failing"), HangingAtSink(name="hanging")
    coordinator = two_begun(MemoryLog(), failing, hanging)
    coordinator.conclude({"hanging": (), "failing": ()})
    arm(monkeypatch, "in_doubt")
    with pytest.raises(TryAgain, match="away"):
        coordinator.begin(EpochNumber(1))
    with pytest.raises(Unsettled, match="did not answer"):
        coordinator.begin(EpochNumber(1))
    coordinator.stop()
    hanging.made.is_released.set()


def test_a_listing_that_arrives_after_its_target_was_given_up_aborts_nothing(monkeypatch):
    sink = HangingAtSink(name="slow")
    coordinator = begun(sink)
    coordinator.conclude({"slow": ()})
    prepared_at(sink, coordinator, 1)
    arm(monkeypatch, "in_doubt")
    with pytest.raises(StillRunning):
        coordinator.begin(EpochNumber(1))
    waiting = [one for one in threading.enumerate() if one.name.startswith("epochal-0")]
    sink.made.is_released.set()
    wait_for(lambda: all(one.name == IDLE for one in waiting))
    assert sink.made.aborted == []
    assert len(sink.made.in_doubt()) == 1


def test_it_counts_as_an_outcome_that_nobody_knows():
    assert issubclass(StillRunning, OutcomeUnknown)


class Forgetful(MemoryCommitter):
    def in_doubt(self) -> Sequence[InDoubt]:
        if self.fails:
            raise TryAgain("listing timed out")
        return super().in_doubt()

    fails = False


class ForgetfulSink(Memory):
    def committer(self, identity: Identity, limits: Limits) -> Forgetful:
        made = Forgetful(identity, self._reference.store(), replaces=False)
        object.__setattr__(self, "made", made)
        return made


def test_a_sweep_that_fails_between_epochs_is_made_up_for_later(caplog):
    sink = ForgetfulSink()
    coordinator = begun(sink)
    coordinator.conclude({sink.name: ()})
    sink.made.fails = True
    coordinator.begin(EpochNumber(1))
    assert "listing timed out" in caplog.text
    coordinator.preparing()
    coordinator.conclude({sink.name: ()})
    assert sink.epochs() == [0, 1]
