"""The rules of the sequence: list after put, nonces, no gap is an end, nothing is overwritten."""

from dataclasses import replace

import pytest

from epochal.coordinator import Environment
from epochal.coordinator.journal import Journal, newest_record
from epochal.errors import (
    CorruptRecord,
    Fenced,
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    TryAgain,
)
from epochal.logs import MemoryLog
from epochal.protocol.state import (
    Pause,
    RecordKind,
    State,
    claimed,
    decided,
    settled,
    sinks_done,
    stopped,
)
from epochal.terms import (
    UNCLAIMED,
    Claim,
    Decision,
    EpochNumber,
    Fingerprint,
    Identity,
    Limits,
    Offsets,
    Receipt,
    SinkName,
    Uid,
)
from proof.behaviour import OwnClock

LIMITS = Limits(decide_retry_max_s=5.0, log_records_kept=2, receipts_inline_bytes=0)
X = SinkName("x")


class FlakyLog(MemoryLog):
    """Raises what it is told to, before or after the effect of a verb."""

    def __init__(self):
        super().__init__()
        self.before, self.after, self.calls = {}, {}, []

    def _around(self, verb, perform):
        self.calls.append(verb)
        if self.before.get(verb):
            raise self.before[verb].pop(0)
        answer = perform()
        if self.after.get(verb):
            raise self.after[verb].pop(0)
        return answer

    def put_if_absent(self, number, record):
        return self._around("put", lambda: MemoryLog.put_if_absent(self, number, record))

    def numbers(self):
        return self._around("numbers", lambda: MemoryLog.numbers(self))

    def read(self, number):
        return self._around("read", lambda: MemoryLog.read(self, number))

    def put_list(self, name, content):
        return self._around("put_list", lambda: MemoryLog.put_list(self, name, content))

    def list_names(self):
        return self._around("list_names", lambda: MemoryLog.list_names(self))


@pytest.fixture
def log():
    return FlakyLog()


@pytest.fixture
def clock():
    return OwnClock()


def journal(log, clock, name="a"):
    spent = iter(range(10**6))
    environment = Environment(clock=clock, random=lambda: 0.0, nonce=lambda: f"{name}{next(spent)}")
    return Journal(log, limits=LIMITS, environment=environment)


def follow(before):
    base = before or State(uid=Uid("a" * 12), pipeline="p", location="/chk")
    return claimed(base, claim=UNCLAIMED, driver="", sinks={}, query_id=None, run=None)


def test_claims_share_the_sequence_with_everything_else(log, clock):
    first, second = journal(log, clock), journal(log, clock, "b")
    state = first.claim(follow)
    first.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert second.claim(follow).generation == 2
    assert list(log.numbers()) == [1, 2, 3]


def test_a_superseded_driver_can_not_append(log, clock):
    old, new = journal(log, clock), journal(log, clock, "b")
    state = old.claim(follow)
    new.claim(follow)
    with pytest.raises(Fenced, match="record 2 was written by another driver"):
        old.append(RecordKind.STOP, stopped(state, is_clear=True))


def test_a_process_that_was_handed_over_to_claims_above_the_token_once(log, clock):
    client, worker, zombie = (journal(log, clock, name) for name in "abc")
    client.claim(follow)
    token = client.token
    assert worker.claim(follow, above=token).generation == 2
    with pytest.raises(Fenced, match="record 2 was written by another driver"):
        zombie.claim(follow, above=token)
    assert not zombie.has_claimed
    assert list(log.numbers()) == [1, 2]


def test_a_token_is_void_once_another_start_has_claimed_or_its_record_is_gone(log, clock):
    first, second, worker = (journal(log, clock, name) for name in "abc")
    first.claim(follow)
    state = second.claim(follow)
    with pytest.raises(Fenced, match="record 2 was written by another driver"):
        worker.claim(follow, above=first.token)
    second.append(RecordKind.STOP, stopped(state, is_clear=True))
    log.delete([1])
    with pytest.raises(Fenced, match="record 1 is not the one of this start"):
        worker.claim(follow, above=first.token)
    assert worker.claim(follow, above=second.token).generation == 3


def test_a_pause_does_not_void_a_token(log, clock):
    client, person, worker = (journal(log, clock, name) for name in "abc")
    client.claim(follow)
    person.set_pause(Pause(by="a person", because="maintenance", since=1.0), note="")
    person.set_pause(None, note="")
    assert worker.claim(follow, above=client.token).generation == 2


def test_a_token_of_a_log_that_is_elsewhere_names_both_places_of_the_trouble(log, clock):
    client, worker = journal(log, clock), journal(FlakyLog(), clock, "b")
    client.claim(follow)
    with pytest.raises(Misconfigured, match="the two processes see different places"):
        worker.claim(follow, above=client.token)


def test_a_claim_that_comes_between_the_look_and_the_put_wins_over_a_token(log, clock):
    client, other, worker = (journal(log, clock, name) for name in "abc")
    client.claim(follow)

    def follow_late(before):
        if len(log.numbers()) == 1:
            other.claim(follow)
        return follow(before)

    with pytest.raises(Fenced, match="record 2 was written by another driver"):
        worker.claim(follow_late, above=client.token)
    assert not worker.has_claimed


def test_a_slot_whose_record_was_deleted_can_be_filled_and_still_fences(log, clock):
    old, new = journal(log, clock), journal(log, clock, "b")
    state = old.claim(follow)
    new.claim(follow)
    new.append(RecordKind.STOP, state)
    log.delete([1, 2])
    with pytest.raises(Fenced, match="record 3 was written by another driver"):
        old.append(RecordKind.STOP, stopped(state, is_clear=True))


def test_a_claim_put_into_a_deleted_slot_claims_nothing(log, clock):
    """The claimant was suspended between reading the newest record and its put."""
    first, late = journal(log, clock), journal(log, clock, "b")
    state = first.claim(follow)

    def follow_late(before):
        if len(log.numbers()) == 1:
            for _ in range(4):
                first.append(RecordKind.PROGRESS, state)
            log.delete([1, 2, 3])
        return follow(before)

    with pytest.raises(Fenced, match=r"record \d was written by another driver"):
        late.claim(follow_late)
    assert not late.has_claimed
    assert journal(log, clock, "c").peek() == state


@pytest.mark.parametrize("deleted", [[1, 2], [2]], ids=["in order", "only the slot"])
def test_pauses_of_another_driver_are_not_taken_for_ones_own(deleted, log, clock):
    """A newer claim was in the slot; since then it was deleted, and only a pause is above."""
    old, new, person = (journal(log, clock, name) for name in "abc")
    state = old.claim(follow)
    new.claim(follow)
    person.set_pause(Pause(by="a person", because="maintenance", since=1.0), note="")
    log.delete(deleted)
    with pytest.raises(Fenced, match="record 3 is about another driver"):
        old.append(RecordKind.STOP, stopped(state, is_clear=True))


def test_of_two_claims_for_one_slot_the_later_put_claims_nothing_under_a_pause(log, clock):
    """Both have the same generation; the slot of the first was deleted under the second."""
    first, late, person = (journal(log, clock, name) for name in "abc")
    state = journal(log, clock, "d").claim(follow)

    def follow_as(claim):
        return lambda before: replace(follow(before), claims=(Claim(claim), *state.claims))

    def follow_late(before):
        first.claim(follow_as("first"))
        person.set_pause(Pause(by="a person", because="maintenance", since=1.0), note="")
        log.delete([2])
        return follow_as("late")(before)

    with pytest.raises(Fenced, match="record 3 is about another driver"):
        late.claim(follow_late)
    assert not late.has_claimed


def test_a_gap_is_never_read_as_the_end(log, clock):
    old, new = journal(log, clock), journal(log, clock, "b")
    state = old.claim(follow)
    latest = new.claim(follow)
    for _ in range(3):
        new.append(RecordKind.PROGRESS, latest)
    log.delete([1, 2, 3, 4])
    with pytest.raises(Fenced):
        old.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert list(log.numbers()) == [2, 5]
    assert journal(log, clock, "c").peek() == latest


def test_a_log_that_was_moved_away_from_a_living_driver_takes_no_word_of_it(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    log.delete([1])
    with pytest.raises(InvariantBroken, match="moved or removed"):
        own.require_newest()
    with pytest.raises(InvariantBroken, match="record 1, which this driver goes on from"):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))


def test_a_put_without_an_answer_that_was_written_is_found_to_be_ones_own(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    log.after["put"] = [OutcomeUnknown("no answer")]
    own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert list(log.numbers()) == [1, 2]


def test_a_put_without_an_answer_that_was_not_written_is_made_again(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    log.before["put"] = [OutcomeUnknown("no answer"), TryAgain("not yet"), OSError("reset")]
    own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert list(log.numbers()) == [1, 2]


def test_somebody_elses_record_in_the_slot_is_not_taken_for_ones_own(log, clock):
    old, new = journal(log, clock), journal(log, clock, "b")
    state = old.claim(follow)
    log.before["put"] = [OutcomeUnknown("no answer")]
    new_state = None

    class Overtaking(OwnClock):
        def sleep(self, seconds):
            nonlocal new_state
            if new_state is None:
                new_state = new.claim(follow)
            super().sleep(seconds)

    old._environment = replace(old._environment, clock=Overtaking())
    with pytest.raises(Fenced):
        old.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert journal(log, clock, "c").peek() == new_state


def test_a_log_that_does_not_answer_in_time_leaves_the_outcome_unknown(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    log.before["put"] = [OSError("down")] * 1000
    with pytest.raises(OutcomeUnknown, match="no answer from the epoch log for 5 s") as caught:
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert "nothing was aborted" in caught.value.hint
    assert clock.monotonic() <= 5.0


def test_a_log_that_refuses_every_attempt_has_written_nothing_and_says_so(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    full = TryAgain("cannot write /log/2: No space left on device", "free some space")
    log.before["put"] = [full] * 1000
    with pytest.raises(TryAgain, match=r"record 2 can't be written.*No space left") as caught:
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert caught.value.hint == "free some space; then start again"
    log.before.clear()
    own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert list(log.numbers()) == [1, 2]


def test_a_wait_for_the_log_is_announced_once_with_its_cause(log, clock, caplog):
    own = journal(log, clock)
    state = own.claim(follow)
    log.before["put"] = [OSError("network is down")] * 2
    own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert not caplog.messages
    log.before["put"] = [OSError("network is down")] * 1000
    with pytest.raises(OutcomeUnknown):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    (said,) = caplog.messages
    assert "can't be written; trying for" in said
    assert said.endswith("network is down")


def test_a_log_that_refuses_after_a_reply_was_lost_leaves_the_outcome_unknown(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    log.before["put"] = [OutcomeUnknown("reply lost"), *[TryAgain("disk full")] * 1000]
    with pytest.raises(OutcomeUnknown, match="disk full"):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert own.is_halted


def test_a_log_that_may_not_be_written_any_more_refuses_at_once(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    log.before["put"] = [Misconfigured("cannot write /log/2: Permission denied")]
    with pytest.raises(Misconfigured, match="Permission denied"):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert not own.is_halted
    log.before["put"] = [OutcomeUnknown("reply lost"), Misconfigured("Permission denied")]
    with pytest.raises(OutcomeUnknown, match="Permission denied"):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert own.is_halted


@pytest.mark.parametrize("verb", ["numbers", "read"])
@pytest.mark.parametrize("error", [TryAgain("down"), Misconfigured("Permission denied")])
def test_a_record_that_may_be_written_is_never_taken_for_refused(log, clock, verb, error):
    own = journal(log, clock)
    state = own.claim(follow)
    log.after["put"] = [OutcomeUnknown("reply lost")]
    log.before[verb] = [error] * 1000
    with pytest.raises(OutcomeUnknown):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert own.is_halted


def test_after_an_unanswered_put_nothing_is_appended_any_more(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    log.before["put"] = [OSError("down")] * 1000
    with pytest.raises(OutcomeUnknown):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    log.before.clear()
    with pytest.raises(InvariantBroken, match="I9"):
        own.append(RecordKind.STOP, stopped(state, is_clear=True))
    assert list(log.numbers()) == [1]


def test_a_claim_that_loses_a_race_claims_above_the_winner(log, clock):
    first, second = journal(log, clock), journal(log, clock, "b")

    def overtaken(before):
        if before is None:
            second.claim(follow)
        return follow(before)

    assert first.claim(overtaken).generation == 2


def test_a_record_gone_between_listing_and_reading_is_looked_for_again(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    log.put_if_absent(2, log.read(1))
    real, listed = log.numbers, iter([[1], [1, 2]])
    log.numbers = lambda: next(listed, None) or real()
    log.delete([1])
    assert own.peek().generation == 1


def test_deleting_old_records_keeps_the_newest_and_never_touches_what_is_above(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    for _ in range(9):
        own.append(RecordKind.PROGRESS, state)
    own.tidy()
    assert list(log.numbers()) == [8, 9, 10]


def test_a_zombie_that_deletes_old_records_removes_nothing_that_is_needed(log, clock):
    old, new = journal(log, clock), journal(log, clock, "b")
    state = old.claim(follow)
    for _ in range(5):
        old.append(RecordKind.PROGRESS, state)
    latest = new.claim(follow)
    old.tidy()
    assert journal(log, clock, "c").peek() == latest


def test_a_failure_to_delete_old_records_costs_nothing(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    log.before["numbers"] = [OSError("down")]
    own.tidy()


def test_a_torn_record_is_refused_by_name_and_stays_as_it_is(log, clock):
    log.put_if_absent(1, b"epochal-log 1 torn")
    with pytest.raises(CorruptRecord, match="memory, record 1"):
        journal(log, clock).claim(follow)
    assert log.read(1) == b"epochal-log 1 torn"
    assert list(log.numbers()) == [1]


# Lists beside the log


def decision(state):
    identity = Identity(pipeline="p", uid=state.uid, sink=X, generation=state.generation)
    epoch = state.expected
    return Decision(
        epoch=epoch,
        generation=state.generation,
        offsets=Offsets(digest=""),
        receipts={
            X: tuple(
                Receipt(
                    handle=identity.handle(epoch, partition=partition, attempt=partition),
                    fingerprint=Fingerprint(1, 1),
                )
                for partition in range(3)
            )
        },
        decided_at=0.0,
    )


def decide(journal):
    journal.append(RecordKind.COMMIT, decided(journal.state, decision(journal.state)))


def settle(journal):
    journal.remember(settled(sinks_done(journal.state, frozenset({X}))))


def test_a_decision_of_many_receipts_is_found_whole_by_the_next_driver(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    decide(own)
    assert len(log.list_names()) == 1
    found = journal(log, clock, "b").claim(follow)
    assert {handle.partition for handle in found.named} == {0, 1, 2}


def test_lists_are_durable_before_the_record_that_names_them(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    log.calls.clear()
    decide(own)
    assert log.calls[:2] == ["put_list", "put"]


def test_a_list_that_can_not_be_written_leaves_the_epoch_undecided_and_may_be_aborted(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    log.before["put_list"] = [OSError("full")] * 1000
    with pytest.raises(TryAgain, match=r"the list \w+ can't be written.*full"):
        decide(own)
    assert list(log.numbers()) == [1]
    assert not own.is_halted


def test_a_list_is_deleted_once_a_record_without_it_is_the_newest(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    decide(own)
    (first,) = log.list_names()
    settle(own)
    own.tidy(with_strays=True)
    assert log.list_names() == [first], "settled in memory only: the newest record names it"
    decide(own)
    own.tidy_if_many()
    (second,) = log.list_names()
    assert first != second
    assert {handle.epoch for handle in journal(log, clock, "b").peek().named} == {EpochNumber(1)}


def test_records_that_carry_a_decision_on_write_no_list_again(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    decide(own)
    log.calls.clear()
    own.append(RecordKind.PROGRESS, own.state)
    successor = journal(log, clock, "b")
    successor.append(RecordKind.PROGRESS, successor.claim(follow))
    assert "put_list" not in log.calls
    assert len(log.list_names()) == 1


def test_a_sweep_finds_lists_that_a_killed_driver_left(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    MemoryLog.put_list(log, "0" * 64, b"put, and the decision never was")
    own.tidy()
    assert log.list_names() == ["0" * 64]
    own.tidy(with_strays=True)
    assert log.list_names() == []


def test_a_superseded_driver_deletes_no_list_of_its_successor(log, clock):
    old, new = journal(log, clock), journal(log, clock, "b")
    old.claim(follow)
    listed = log.list_names

    def overtaken():
        """The newer driver claims and decides just before the old one lists."""
        log.list_names = listed
        new.claim(follow)
        decide(new)
        return listed()

    log.list_names = overtaken
    with pytest.raises(Fenced):
        old.tidy(with_strays=True)
    assert journal(log, clock, "c").peek().named


def test_a_missing_list_is_reported_with_its_record_and_nothing_is_guessed(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    decide(own)
    (name,) = log.list_names()
    log.delete_lists([name])
    found = journal(log, clock, "b").peek()
    with pytest.raises(CorruptRecord, match=f"record 2 names the list {name}"):
        found.named  # noqa: B018  it reads


def test_a_list_deleted_under_a_reader_says_that_the_epoch_is_settled(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    decide(own)
    behind, old = newest_record(log), journal(log, clock, "b").peek()
    settle(own)
    decide(own)
    own.tidy_if_many()
    with pytest.raises(TryAgain, match="settled"):
        list(behind.record.state.pending[X])
    with pytest.raises(Fenced):
        list(old.pending[X])


def test_the_log_is_tidied_by_count_between_sweeps(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    for _ in range(3000):
        own.append(RecordKind.PROGRESS, state)
        own.tidy_if_many()
        assert len(log.numbers()) <= 2 * LIMITS.log_records_kept + 1


def test_records_that_can_not_be_deleted_are_left_to_the_next_sweep(log, clock):
    own = journal(log, clock)
    state = own.claim(follow)
    tries = []

    def refuse(numbers):
        tries.append(numbers)
        raise Misconfigured("may not delete")

    log.delete = refuse
    for _ in range(50):
        own.append(RecordKind.PROGRESS, state)
        own.tidy_if_many()
    assert len(tries) == 1, "an epoch may end 50 times a second"
    own.tidy()
    assert len(tries) == 2
    del log.delete
    own.tidy()
    assert len(log.numbers()) == LIMITS.log_records_kept + 1
    for _ in range(50):
        own.append(RecordKind.PROGRESS, state)
        own.tidy_if_many()
    assert len(log.numbers()) <= 2 * LIMITS.log_records_kept + 1


def test_nothing_is_tidied_while_a_put_is_unanswered(log, clock):
    own = journal(log, clock)
    own.claim(follow)
    log.before["put"] = [OutcomeUnknown("no answer")] * 1000
    with pytest.raises(OutcomeUnknown):
        decide(own)
    own.tidy(with_strays=True)
    assert len(log.list_names()) == 1
