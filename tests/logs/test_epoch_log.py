"""The epoch log on a store: numbers in rising order, each filled once, and nothing else's names."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from epochal.coordinator.journal import EpochLog
from epochal.logs import MemoryLog, StoredLog, checkpoint_log, open_log
from epochal.storage.memory import MemoryStore


@pytest.fixture(params=["memory", "folder", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> EpochLog:
    if request.param == "memory":
        return MemoryLog()
    return open_log(
        {"folder": f"{tmp_path}/log", "sqlite": f"sqlite://{tmp_path}/log.db"}[request.param]
    )


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


def test_numbers_rise_whatever_the_order_of_the_puts(log: EpochLog) -> None:
    numbers = [0, 1, 9, 10, 99, 1_000, 10**12, 2**63 - 1]
    for number in random.Random(1).sample(numbers, k=len(numbers)):
        assert log.put_if_absent(number, b"x")
    assert list(log.numbers()) == numbers


def test_a_deleted_slot_is_empty_and_can_be_filled_again(log: EpochLog) -> None:
    for number in range(4):
        log.put_if_absent(number, b"record %d" % number)
    log.delete([0, 2])
    log.delete([0, 2, 17])
    assert list(log.numbers()) == [1, 3]
    assert (log.read(0), log.read(1)) == (None, b"record 1")
    assert log.put_if_absent(0, b"after") is True
    assert log.read(0) == b"after"


def test_a_record_is_a_file_that_a_person_can_find(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    log.put_if_absent(42, b"{}")
    assert [file.name for file in (tmp_path / "log").iterdir()] == ["00000000000000000042.json"]
    assert log.place == str(tmp_path / "log")


def test_names_that_are_not_records_are_ignored_and_left_alone(tmp_path: Path) -> None:
    strangers = ["README", "2.json", f"{2:020d}.json.bak", ".DS_Store", "٣" * 20 + ".json"]
    log = open_log(tmp_path)
    log.put_if_absent(1, b"x")
    for name in strangers:
        (tmp_path / name).write_text("not ours")
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / f"{9:020d}.json").write_text("not a record")
    assert list(log.numbers()) == [1]
    assert {*strangers, "history"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("checkpoint", ["/chk/orders", "/chk/orders/", "file:///chk/orders"])
def test_the_default_log_is_inside_the_checkpoint(checkpoint: str) -> None:
    assert checkpoint_log(checkpoint).place == "/chk/orders/epochal/log"


def test_closing_a_log_closes_its_store() -> None:
    closed = []

    class Closable(MemoryStore):
        def close(self) -> None:
            closed.append(self)

    store = Closable()
    StoredLog(store).close()
    assert closed == [store]
