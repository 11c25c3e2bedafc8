"""A target that does not answer: it is given up on, and left alone from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from epochal.coordinator import Coordinator, Environment, read_state
from epochal.coordinator.retry import StillRunning, in_threads
from epochal.errors import OutcomeUnknown, TryAgain, Unsettled
from epochal.logs import MemoryLog
from epochal.protocol.admission import Start
from epochal.sinks.memory import Memory
from epochal.sinks.memory.sink import MemoryCommitter
from epochal.terms import EpochNumber, Identity, InDoubt, Limits, Receipt

ZERO = EpochNumber(0)


class Hanging(MemoryCommitter):
    """Hangs in `rehearse`, and notes what it is asked meanwhile."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)
        self.is_released = threading.Event()
        self.asked_meanwhile: list[str] = []
        self._is_hanging = False

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._is_hanging = True
        self.is_released.wait(10)

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


def begun(sink: Memory, limits: Limits, **more: Any) -> Coordinator:
    coordinator = Coordinator(log=MemoryLog(), sinks=[sink], limits=limits, **more)
    coordinator.start(Start(pipeline="p", location="/c", sinks={sink.name: sink.describe()}))
    coordinator.begin(ZERO)
    coordinator.preparing()
    return coordinator


def test_a_committer_that_hangs_is_not_called_again():
    sink = HangingSink()
    coordinator = begun(sink, Limits(commit_timeout_s=0.05, commit_retry_max_s=0.0))
    with pytest.raises(StillRunning, match="no answer"):
        coordinator.conclude({sink.name: ()})
    coordinator.stop()
    assert sink.made.asked_meanwhile == []
    sink.made.is_released.set()


def interrupted_once_asked(
    jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
) -> Sequence[BaseException | None]:
    """Ctrl-C while the driver waits for its targets."""
    in_threads(jobs, slow_s=slow_s, give_up_s=0.05)
    raise KeyboardInterrupt


def test_a_committer_that_is_at_work_when_ctrl_c_comes_is_not_called_again():
    sink = HangingSink()
    coordinator = begun(sink, Limits(), environment=Environment(parallel=interrupted_once_asked))
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


def test_what_is_done_beside_a_target_that_hangs_is_noted_and_no_more_is_said():
    hanging, other = HangingAtCommitSink(name="hanging"), Memory(name="other")
    log = MemoryLog()
    coordinator = Coordinator(
        log=log,
        sinks=[hanging, other],
        limits=Limits(commit_timeout_s=0.05, commit_retry_max_s=0.0),
    )
    sinks = {sink.name: sink.describe() for sink in (hanging, other)}
    coordinator.start(Start(pipeline="p", location="/c", sinks=sinks))
    coordinator.begin(ZERO)
    coordinator.preparing()
    with pytest.raises(Unsettled, match="hanging"):
        coordinator.conclude({"hanging": (), "other": ()})
    with pytest.raises(Unsettled, match="did not answer"):
        coordinator.begin(EpochNumber(1))
    coordinator.stop()
    state = read_state(log)
    assert (state.done, state.is_stopped) == ({"other"}, False)
    assert hanging.made.asked_meanwhile == []
    hanging.made.is_released.set()


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
    coordinator = begun(sink, Limits(sweep_every_s=0.0))
    coordinator.conclude({sink.name: ()})
    sink.made.fails = True
    coordinator.begin(EpochNumber(1))
    assert "listing timed out" in caplog.text
    coordinator.preparing()
    coordinator.conclude({sink.name: ()})
    assert sink.epochs() == [0, 1]
