"""Identity changed by a person, and one driver that works in several processes."""

from __future__ import annotations

import pytest

from epochal.coordinator import Coordinator, by_hand
from epochal.errors import Fenced, Refused
from epochal.logs import MemoryLog
from epochal.protocol.admission import Position, Start, Unfinished
from epochal.protocol.state import GivenUp
from epochal.sinks.memory import Memory
from epochal.terms import EpochNumber

ZERO = EpochNumber(0)


def _start(sink: Memory, *, driver: str = "one", location: str = "/c") -> Start:
    return Start(pipeline="p", location=location, sinks={sink.name: sink.describe()}, driver=driver)


def _run(log: MemoryLog, sink: Memory, epochs: int = 1, *, stops: bool = True) -> Coordinator:
    coordinator = Coordinator(log=log, sinks=[sink])
    coordinator.start(_start(sink))
    for epoch in map(EpochNumber, range(epochs)):
        coordinator.begin(epoch, query_id="q")
        coordinator.preparing()
        coordinator.conclude({sink.name: ()})
    if stops:
        coordinator.stop()
    return coordinator


def test_a_log_without_a_record_has_no_identity_to_change() -> None:
    with pytest.raises(Refused, match="holds no epoch log"):
        by_hand.rename(MemoryLog(), pipeline="other")


def test_a_moved_checkpoint_is_adopted_where_it_is() -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink, epochs=2)
    position = Position(planned=EpochNumber(1), finished=EpochNumber(1))
    state = by_hand.adopt(log, location="/moved", query_id="q", position=position)
    assert (state.location, state.expected) == ("/moved", 2)
    assert state.last is not None


def test_epochs_of_other_code_are_stepped_over_when_adopted() -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink, epochs=2)
    position = Position(planned=EpochNumber(8), finished=EpochNumber(8))
    assert by_hand.adopt(log, location="/c", query_id="q", position=position).expected == 9


def test_an_unsettled_epoch_is_not_stepped_over() -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink, epochs=1, stops=False)
    position = Position(planned=EpochNumber(8), finished=EpochNumber(8))
    with pytest.raises(Refused, match="unsettled"):
        by_hand.adopt(log, location="/c", query_id="q", position=position)


def test_a_fork_has_a_uid_of_its_own_and_fences_who_still_runs() -> None:
    log, sink = MemoryLog(), Memory()
    running = _run(log, sink, stops=False)
    state = by_hand.fork(log, location="/copy", is_original_alive=True)
    assert state.uid != running.state.uid == state.forked_from
    running.begin(EpochNumber(1), query_id="q")
    running.preparing()
    with pytest.raises(Fenced):
        running.conclude({sink.name: ()})


def test_a_fork_of_the_original_itself_is_refused() -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink)
    with pytest.raises(Refused, match="the original, not a copy"):
        by_hand.fork(log, location="/c")


def test_a_fork_does_not_drop_what_is_decided_and_not_carried_out() -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink, stops=False)
    with pytest.raises(Refused, match="epoch 0 is decided and not carried out on memory"):
        by_hand.fork(log, location="/copy")


@pytest.mark.parametrize("planned", [None, EpochNumber(0)])
def test_a_log_never_goes_back_to_an_older_checkpoint(planned: EpochNumber | None) -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink, epochs=4)
    position = Position(planned=planned, finished=planned)
    with pytest.raises(Refused, match="never goes back"):
        by_hand.adopt(log, location="/c", query_id="q", position=position)


UNFINISHED = Position(planned=EpochNumber(6), finished=EpochNumber(5))


def test_a_batch_that_other_code_left_unfinished_is_asked_about_when_adopted() -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink)
    with pytest.raises(Refused, match="batch 6 was planned by code other than epochal"):
        by_hand.adopt(log, location="/c", query_id="q", position=UNFINISHED)


@pytest.mark.parametrize(("word", "expected"), [(Unfinished.SKIP, 7), (Unfinished.REDO, 6)])
def test_an_unfinished_batch_is_skipped_or_redone_as_the_person_says(
    word: Unfinished, expected: int
) -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink)
    state = by_hand.adopt(log, location="/c", query_id="q", position=UNFINISHED, unfinished=word)
    assert state.expected == expected


def test_a_log_without_a_query_is_only_moved() -> None:
    log, sink = MemoryLog(), Memory()
    coordinator = Coordinator(log=log, sinks=[sink])
    coordinator.start(_start(sink))
    for epoch in map(EpochNumber, range(3)):
        coordinator.begin(epoch)
        coordinator.preparing()
        coordinator.conclude({sink.name: ()})
    coordinator.stop()
    state = by_hand.adopt(log, location="/moved", query_id=None, position=Position())
    assert (state.location, state.expected) == ("/moved", 3)


def test_what_a_person_gives_up_is_on_record_and_no_longer_waits() -> None:
    log, sink = MemoryLog(), Memory()
    _run(log, sink, stops=False)
    word = GivenUp(epoch=ZERO, sink="memory", kept_at="/kept", by="ann", because="gone")
    state = by_hand.give_up(log, word)
    assert state.given_up == (word,)
    assert not state.pending
    with pytest.raises(Refused, match="nothing of sink 'memory'"):
        by_hand.give_up(log, word)
