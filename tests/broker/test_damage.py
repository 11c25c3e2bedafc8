"""Flipped bits on disk: found by a checksum, reported, never served; nothing is cut in silence."""

from __future__ import annotations

import random

import pytest
from conftest_tools import PROOF_KILLS
from history import SETTINGS
from memory_disk import MemoryDisk
from table import Table
from test_storage import fetching, write

from epochal.errors import CorruptRecord
from epochal.kafka import batch_reader
from epochal.kafka.codes import Code
from epochal.kafka.messages import create_topics

LIMITS = {"tail_bytes_max": 600, "journal_bytes_max": 5_000, "journal_entries_max": 1_000}
FLIPS = 250


def filled(*, is_synced: bool) -> Table:
    """Rows in every place: sealed segments, those of ticks since the snapshot, and the journal."""
    table = Table(is_synced=is_synced, settings=SETTINGS, **LIMITS)
    config = create_topics.CreatableTopicConfig(name="segment.bytes", value="1500")
    wanted = create_topics.CreatableTopic(
        name="t", num_partitions=1, replication_factor=1, configs=[config]
    )
    table.ask(create_topics.CreateTopicsRequest(topics=[wanted]))
    while table.store._journal is not None and table.store._journal.number < 3:
        write(table, *(b"%d " % number + b"." * 60 for number in range(3)))
    for number in range(11):
        write(table, b"%d " % number + b"-" * 80)
    return table


def rows(table: Table) -> tuple[dict[int, bytes], set[int]]:
    """Offset → value, and the offsets that were refused as damaged."""
    found: dict[int, bytes] = {}
    refused: set[int] = set()
    offset = 0
    while True:
        (answer,) = table.ask(fetching(offset)).responses[0].partitions
        if answer.error_code == Code.CORRUPT_MESSAGE:
            refused.add(offset)
            offset += 1
            continue
        if answer.error_code == Code.OFFSET_OUT_OF_RANGE:
            return found, refused
        assert answer.error_code == 0, answer
        batches = list(batch_reader.read(answer.records or b""))
        if not batches:
            return found, refused
        for batch in batches:
            columns = batch.columns()
            found |= dict(
                zip(columns["offset"].to_pylist(), columns["value"].to_pylist(), strict=True)
            )
        offset = batches[-1].last_offset + 1


def flips(disk: MemoryDisk, count: int) -> list[tuple[str, int]]:
    every = [(path, bit) for path, data in disk.files.items() for bit in range(8 * len(data))]
    return random.Random(count).sample(every, count)


def judge(table: Table, places: list[tuple[str, int]], *, is_synced: bool) -> dict[str, int]:
    """How often each answer was given to damage."""
    expected, _ = rows(table)
    seen = dict.fromkeys(("refused to start", "refused to read", "reported", "no matter"), 0)
    for number, (path, bit) in enumerate(places):
        where = (path, bit)
        assert sum(seen.values()) == number, "a refusal does not name the file"
        lines: list[str] = []
        try:
            again = Table(
                table.disk.with_flipped_bit(path, bit),
                is_synced=is_synced,
                settings=SETTINGS,
                **LIMITS,
            )
        except CorruptRecord as error:
            seen["refused to start"] += path in str(error)
            continue
        again.broker.report = lines.append
        found, refused = rows(again)
        assert all(expected.get(offset) == value for offset, value in found.items()), where
        missing = set(expected) - set(found)
        assert missing <= refused or again.store.notes, (where, missing)
        assert bool(refused) == bool(lines), where
        assert path.endswith((".segment", ".index")), where
        if is_synced:
            assert not again.store.notes, (where, again.store.notes)
        kind = "refused to read" if refused else "reported" if missing else "no matter"
        assert path.endswith(".index") or kind != "no matter", where
        seen[kind] += 1
    return seen


@pytest.mark.parametrize("is_synced", [True, False], ids=["fsync", "no-fsync"])
def test_a_flipped_bit_is_found_and_what_it_hit_is_never_served(is_synced: bool) -> None:
    table = filled(is_synced=is_synced)
    seen = judge(table, flips(table.disk, FLIPS), is_synced=is_synced)
    assert seen["refused to start"] > 20, seen
    assert seen["refused to read"] > 20, seen


@pytest.mark.proof
@pytest.mark.parametrize("is_synced", [True, False], ids=["fsync", "no-fsync"])
def test_thousands_of_flipped_bits_are_found(is_synced: bool) -> None:
    table = filled(is_synced=is_synced)
    judge(table, flips(table.disk, 40 * PROOF_KILLS), is_synced=is_synced)


def test_the_judge_sees_a_journal_that_is_cut_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epochal.broker.storage.journal._check_end", lambda *_: None)
    table = filled(is_synced=True)
    with pytest.raises(AssertionError):
        judge(table, flips(table.disk, FLIPS), is_synced=True)


def test_a_reader_within_the_damaged_last_batch_of_a_segment_is_not_led_to_the_next() -> None:
    table = filled(is_synced=True)
    path = min(path for path in table.disk.files if path.endswith(".segment"))
    data, at, last = bytes(table.disk.files[path]), 0, 0
    while at < len(data):
        last, at = at, at + 12 + int.from_bytes(data[at + 8 : at + 12], "big")
    assert data[last + 23 : last + 27] == b"\0\0\0\2"  # three rows
    flipped = 8 * (last + 26) + 1
    assert judge(table, [(path, flipped)], is_synced=True)["refused to read"] == 1


def test_rows_behind_a_damaged_batch_are_still_served() -> None:
    table = filled(is_synced=True)
    expected, _ = rows(table)
    first = min(path for path in table.disk.files if path.endswith(".segment"))
    again = Table(table.disk.with_flipped_bit(first, 8 * 100), is_synced=True, **LIMITS)
    found, refused = rows(again)
    assert refused == {0, 1, 2}
    assert found == {offset: row for offset, row in expected.items() if offset > 2}
