"""The promises of `EpochLog`, judged the same way in every storage."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest

from epochal.contract import EpochLog
from epochal.logs.memory import MemoryLog

RACERS = 6
SLOTS = 8


def race(open_one: Callable[[], EpochLog], slots: Sequence[int]) -> dict[int, list[bytes]]:
    """Let threads, each with a log of its own, race for each slot; who was told that it won?"""
    wins: dict[int, list[bytes]] = {slot: [] for slot in slots}
    start = threading.Barrier(RACERS)

    def run(racer: int) -> None:
        log = open_one()
        for slot in slots:
            start.wait()
            record = b"racer %d in slot %d" % (racer, slot)
            if log.put_if_absent(slot, record):
                wins[slot].append(record)

    threads = [threading.Thread(target=run, args=(racer,)) for racer in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wins


def judge_race(wins: dict[int, list[bytes]], log: EpochLog) -> None:
    for slot, winners in wins.items():
        assert len(winners) == 1, f"slot {slot} was won by {winners}"
        assert log.read(slot) == winners[0]
    assert list(log.numbers()) == sorted(wins)


class LastOneWins(MemoryLog):
    """What a storage does that overwrites: the judge must object to it."""

    def put_if_absent(self, number: int, record: bytes) -> bool:
        self._records[number] = record
        return True


def test_a_log_that_was_never_written_is_empty(log: EpochLog) -> None:
    assert list(log.numbers()) == []
    assert log.read(0) is None
    log.delete([0, 1])
    assert list(log.numbers()) == []


def test_a_slot_is_filled_once_and_keeps_its_first_record(log: EpochLog) -> None:
    assert log.put_if_absent(7, b"first") is True
    assert log.put_if_absent(7, b"second") is False
    assert log.read(7) == b"first"
    assert list(log.numbers()) == [7]


def test_a_put_is_listed_and_read_by_others_at_once(reopen: Callable[[], EpochLog]) -> None:
    writer, reader = reopen(), reopen()
    for number in range(5):
        writer.put_if_absent(number, b"record %d" % number)
        assert list(reader.numbers()) == list(range(number + 1))
        assert reader.read(number) == b"record %d" % number


def test_numbers_rise_whatever_the_order_of_the_puts(log: EpochLog) -> None:
    numbers = [0, 1, 9, 10, 99, 1_000, 10**12, 2**63 - 1]
    for number in random.Random(1).sample(numbers, k=len(numbers)):
        assert log.put_if_absent(number, b"x")
    assert list(log.numbers()) == numbers


def test_a_deleted_slot_is_empty_and_others_stay(log: EpochLog) -> None:
    for number in range(4):
        log.put_if_absent(number, b"record %d" % number)
    log.delete([0, 2])
    log.delete([0, 2, 17])
    assert list(log.numbers()) == [1, 3]
    assert log.read(0) is None
    assert log.read(1) == b"record 1"


def test_a_deleted_slot_can_be_filled_again(log: EpochLog) -> None:
    log.put_if_absent(1, b"before")
    log.delete([1])
    assert log.put_if_absent(1, b"after") is True
    assert log.read(1) == b"after"


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 3 * 1024 * 1024])
def test_a_record_of_any_size_comes_back_byte_for_byte(log: EpochLog, size: int) -> None:
    record = random.Random(size).randbytes(size)
    log.put_if_absent(3, record)
    assert log.read(3) == record


def test_a_log_outlives_the_object_that_wrote_it(reopen: Callable[[], EpochLog]) -> None:
    first = reopen()
    first.put_if_absent(1, b"kept")
    first.close()
    again = reopen()
    assert again.read(1) == b"kept"
    assert again.put_if_absent(1, b"other") is False
    assert again.put_if_absent(2, b"next") is True


def test_of_many_racers_for_a_slot_exactly_one_wins(reopen: Callable[[], EpochLog]) -> None:
    judge_race(race(reopen, range(SLOTS)), reopen())


def test_the_judge_of_races_objects_to_a_log_that_overwrites() -> None:
    log = LastOneWins()
    wins = race(lambda: log, range(SLOTS))
    with pytest.raises(AssertionError, match="was won by"):
        judge_race(wins, log)


def test_the_judge_of_races_objects_to_a_winner_whose_record_is_not_there() -> None:
    log = MemoryLog()
    wins = race(lambda: log, range(SLOTS))
    log.delete([3])
    log.put_if_absent(3, b"somebody else's")
    with pytest.raises(AssertionError):
        judge_race(wins, log)


def test_a_place_is_told_and_says_where(log: EpochLog, storage: str) -> None:
    assert log.place
    assert "hunter2" not in log.place
