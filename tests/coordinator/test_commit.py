"""A decision is committed again and again until it is done, by proof (I4, I9)."""

import os
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from epochal.coordinator import Environment
from epochal.coordinator.commit import Commit
from epochal.coordinator.retry import backoff, in_threads
from epochal.coordinator.targets import Targets
from epochal.errors import (
    Fenced,
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    TaskFailed,
    TryAgain,
    Unsettled,
)
from epochal.terms import (
    EpochNumber,
    Fingerprint,
    Generation,
    Identity,
    Limits,
    Proof,
    Receipt,
    SinkName,
    Uid,
)
from epochal.testing.driver import one_after_the_other
from proof.behaviour import OwnClock

X, Y = SinkName("x"), SinkName("y")
LIMITS = Limits(commit_retry_max_s=10.0, retry_backoff_ms=(100, 500, 2000))


def receipt(sink, partition=0):
    identity = Identity(pipeline="p", uid=Uid("a" * 12), sink=sink, generation=Generation(1))
    handle = identity.handle(EpochNumber(3), partition=partition, attempt=partition)
    return Receipt(handle=handle, fingerprint=Fingerprint(1, 1))


@dataclass
class Scripted:
    """Commits by script: an error to raise, or None for done; the last one repeats."""

    script: list
    proofs: list = field(default_factory=list)
    commits: int = 0

    def commit(self, epoch, receipts):
        error = self.script[min(self.commits, len(self.script) - 1)]
        self.commits += 1
        if error is not None:
            raise error

    def outcome(self, epoch, receipt):
        return self.proofs.pop(0)


@pytest.fixture
def clock():
    return OwnClock()


@pytest.fixture
def noted():
    return []


@pytest.fixture
def carry(clock, noted):
    def carried(pending=None, limits=LIMITS, **committers):
        environment = Environment(clock=clock, random=lambda: 1.0, parallel=one_after_the_other)
        targets = Targets({}, limits=limits, environment=environment)
        targets.committers = {SinkName(name): some for name, some in committers.items()}
        commit = Commit(
            epoch=EpochNumber(3),
            targets=targets,
            limits=limits,
            environment=environment,
            note_done=noted.append,
        )
        return commit.carry_out(
            pending or {SinkName(name): (receipt(SinkName(name)),) for name in committers}
        )

    return carried


def test_all_done_at_once_writes_nothing_to_the_log(carry, noted, clock):
    assert carry(x=Scripted([None]), y=Scripted([None])) == {}
    assert noted == []
    assert clock.monotonic() == 0


def test_retries_wait_longer_each_time_and_then_steadily(carry, clock):
    slow = Scripted([TryAgain("busy")] * 4 + [None])
    carry(x=slow)
    assert slow.commits == 5
    assert clock.monotonic() == pytest.approx(0.1 + 0.5 + 2.0 + 2.0)


def test_half_of_each_wait_is_random():
    assert next(backoff((100,), lambda: 0.0)) == pytest.approx(0.05)
    assert next(backoff((100,), lambda: 1.0)) == pytest.approx(0.1)


def test_a_sink_that_is_done_just_before_another_needs_no_record_of_its_own(carry, noted):
    carry(x=Scripted([None]), y=Scripted([TryAgain("busy"), TryAgain("busy"), None]))
    assert noted == []


def test_once_a_sink_has_failed_for_good_the_others_are_not_retried(carry, clock, noted):
    other = Scripted([TryAgain("busy")])
    with pytest.raises(Unsettled, match="password"):
        carry(x=Scripted([Misconfigured("wrong password")]), y=other)
    assert (other.commits, clock.monotonic()) == (1, 0)


def test_a_broken_invariant_is_not_hidden_by_the_error_of_another_sink(carry):
    with pytest.raises(Unsettled, match="sink 'y' could not be committed: a row is there twice"):
        carry(
            x=Scripted([Misconfigured("wrong password")]),
            y=Scripted([InvariantBroken("a row is there twice")]),
        )


def test_a_sink_that_is_done_is_not_committed_again_by_a_retry(carry):
    done = Scripted([None])
    carry(x=done, y=Scripted([OSError("reset"), None]))
    assert done.commits == 1


def test_what_can_not_be_carried_out_in_time_stays_decided(carry, clock, noted):
    with pytest.raises(Unsettled, match=r"epoch 3 is decided, and sink 'x'.*busy") as caught:
        carry(x=Scripted([TryAgain("busy")]), y=Scripted([None]))
    assert "epochal resolve give-up PIPELINE --sink x" in caught.value.hint
    assert clock.monotonic() <= LIMITS.commit_retry_max_s
    assert noted == [{Y}]


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_end_by_their_number_before_their_time(carry, clock, retries):
    busy = Scripted([TryAgain("busy")])
    with pytest.raises(Unsettled, match="busy"):
        carry(x=busy, limits=replace(LIMITS, commit_retries_max=retries))
    assert busy.commits == retries + 1
    assert clock.monotonic() < LIMITS.commit_retry_max_s


def test_a_fatal_error_stops_at_once_and_the_epoch_stays_decided(carry, clock):
    with pytest.raises(Unsettled, match="password"):
        carry(x=Scripted([Misconfigured("wrong password")]))
    assert clock.monotonic() == 0


def test_a_fenced_commit_is_reported_as_fenced(carry):
    with pytest.raises(Fenced):
        carry(x=Scripted([Fenced("newer")]))


def test_a_lost_answer_with_proof_is_done(carry):
    proven = Scripted([OutcomeUnknown("?")], [Proof.COMMITTED])
    assert carry(x=proven) == {}
    assert proven.commits == 1


def test_a_lost_answer_without_proof_is_neither_done_nor_failed(carry):
    asked = Scripted([OutcomeUnknown("?"), None], [Proof.UNKNOWN])
    assert carry(x=asked) == {}
    assert asked.commits == 2


def test_a_lost_answer_about_an_empty_epoch_is_asked_again(carry):
    empty = Scripted([OutcomeUnknown("?"), None])
    carry(pending={X: ()}, x=empty)
    assert empty.commits == 2


def test_rows_that_the_target_proves_thrown_away_must_be_written_again(carry, noted):
    pending = {X: (receipt(X, 0), receipt(X, 1)), Y: (receipt(Y),)}
    gone = Scripted([OutcomeUnknown("?")], [Proof.COMMITTED, Proof.ABORTED])
    assert carry(pending=pending, x=gone, y=Scripted([None])) == {X: (str(receipt(X, 1).handle),)}
    assert noted == [{Y}]


def test_where_no_row_is_visible_without_the_lost_ones_all_must_be_written_again(carry):
    pending = {X: (receipt(X, 0), receipt(X, 1)), Y: (receipt(Y),)}
    both = tuple(str(one.handle) for one in pending[X])
    lost = PreparedLost("gone", handles=both[1:], shows_none=True)
    assert carry(pending=pending, x=Scripted([lost]), y=Scripted([None])) == {X: both}


def test_a_lost_sink_does_not_keep_another_from_being_retried(carry):
    lost = PreparedLost("gone", handles=("h",))
    other = Scripted([TryAgain("busy"), None])
    assert carry(x=Scripted([lost]), y=other) == {X: ("h",)}
    assert other.commits == 2


def run_threads(jobs, *, give_up_s, late_s=(), on_end=lambda at, result: None):
    late = []
    return in_threads(jobs, late_s=late_s, give_up_s=give_up_s, on_end=on_end, on_late=late.append)


def test_each_job_is_reported_as_it_ends_and_not_with_the_last_one():
    ended, is_first_known = [], threading.Event()

    def on_end(at, result):
        ended.append(at)
        is_first_known.set()

    run_threads([lambda: is_first_known.wait(10), lambda: None], give_up_s=10.0, on_end=on_end)
    assert ended == [1, 0]


def test_sys_exit_in_a_sink_ends_its_call_and_is_reported():
    (result,) = run_threads([lambda: sys.exit(3)], give_up_s=10.0)
    assert isinstance(result, TaskFailed)
    assert "SystemExit: 3" in str(result)


def test_threads_give_each_job_its_own_result_and_leave_one_that_hangs(monkeypatch):
    forever, ended = threading.Event(), []

    def fails():
        raise TryAgain("busy")

    # The time is over once two have answered, however long that takes on a busy machine.
    clock = SimpleNamespace(monotonic=lambda: 0.0 if len(ended) < 2 else 100.0)
    monkeypatch.setattr("epochal.coordinator.retry.time", clock)
    results = run_threads(
        [lambda: None, fails, forever.wait],
        give_up_s=60.0,
        on_end=lambda at, _result: ended.append(at),
    )
    forever.set()
    assert results[0] is None
    assert isinstance(results[1], TryAgain)
    assert isinstance(results[2], OutcomeUnknown)


def test_jobs_that_hang_share_one_deadline():
    forever = threading.Event()
    began_s = time.monotonic()
    results = run_threads([forever.wait] * 100, give_up_s=0.2)
    spent_s = time.monotonic() - began_s
    forever.set()
    assert all(isinstance(result, OutcomeUnknown) for result in results)
    assert spent_s < 100 * 0.2, "each had a deadline of its own"


def test_a_thread_that_is_done_takes_the_next_job_and_one_that_hangs_does_not():
    has_begun, is_released, threads = threading.Event(), threading.Event(), []

    def noted():
        threads.append(threading.current_thread())

    def hanging():
        noted()
        has_begun.set()
        is_released.wait(60)

    for _ in range(20):
        run_threads([noted], give_up_s=10.0)
    assert len(set(threads)) < len(threads)
    run_threads([hanging], give_up_s=0.01)
    assert has_begun.wait(60)
    stuck = threads[-1]
    for _ in range(20):
        run_threads([noted], give_up_s=10.0)
    is_released.set()
    assert stuck not in threads[21:]


def test_a_forked_process_waits_for_no_thread_of_its_parent():
    run_threads([lambda: None], give_up_s=10.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if run_threads([lambda: None], give_up_s=60.0) == (None,) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
