"""Record batches: against themselves, against Kafka's own code, and against garbage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochal.kafka import batch_reader, batches, varints
from epochal.kafka.batches import Columns, Marker, Producer
from epochal.kafka.compression import Compression, compress, decompress
from epochal.kafka.primitives import Malformed
from epochal.kafka.record_headers import HEADERS

Row = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
Java = Callable[[str, list[str]], list[str]]
FEW = settings(max_examples=60, deadline=None, database=None, derandomize=True)
PRODUCER = Producer(producer_id=77, producer_epoch=3, base_sequence=12, is_transactional=True)

times = st.integers(0, 2**45)
blobs = st.none() | st.binary(max_size=12) | st.binary(min_size=60, max_size=200)
headers = st.lists(st.tuples(st.text(max_size=6), st.none() | st.binary(max_size=9)), max_size=3)
rows_of_any_kind = st.lists(st.tuples(times, blobs, blobs, headers), min_size=1, max_size=40)


def columns(rows: list[Row]) -> Columns:
    return Columns(
        timestamp_ms=pa.array([row[0] for row in rows], pa.int64()),
        key=pa.array([row[1] for row in rows], pa.binary()),
        value=pa.array([row[2] for row in rows], pa.binary()),
        headers=pa.array(
            [[{"key": k, "value": v} for k, v in row[3]] for row in rows], type=HEADERS
        ),
    )


def encoded(rows: Columns, **options: Any) -> bytes:
    return b"".join(batches.encode(rows, default_timestamp_ms=1_000, **options))


def decoded(data: bytes) -> list[Row]:
    found: list[Row] = []
    for batch in batch_reader.read(data):
        for row in batch.columns().to_pylist():
            pairs = [(pair["key"], pair["value"]) for pair in row["headers"]]
            found.append((row["timestamp_ms"], row["key"], row["value"], pairs))
    return found


def in_java_words(rows: list[Row]) -> str:
    def side(value: bytes | None) -> str:
        return "-" if value is None else value.hex()

    words = []
    for time, key, value, pairs in rows:
        result = ";".join(f"{name.encode().hex()}={side(held)}" for name, held in pairs)
        words.append(f"{time}:{side(key)}:{side(value)}:{result}")
    return " ".join(words)


def random_rows(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)

    def blob() -> bytes | None:
        return None if rng.random() < 0.2 else rng.randbytes(rng.choice((0, 3, 63, 64, 300)))

    def pairs() -> list[tuple[str, bytes | None]]:
        return [(rng.choice(("h", "é", "long-name")), blob()) for _ in range(rng.choice((0, 0, 2)))]

    return [
        (1_700_000_000_000 + rng.randrange(9_999), blob(), blob(), pairs()) for _ in range(count)
    ]


@FEW
@given(rows=rows_of_any_kind, kind=st.sampled_from(Compression))
def test_rows_come_back_as_they_went(rows: list[Row], kind: Compression) -> None:
    data = encoded(columns(rows), compression=kind, producer=PRODUCER)
    assert decoded(data) == rows
    (batch,) = batch_reader.read(data)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (77, 3, 12)
    assert (batch.count, batch.last_offset_delta) == (len(rows), len(rows) - 1)
    assert batch.is_transactional
    assert not batch.is_control
    assert batch.max_timestamp_ms == max(row[0] for row in rows)


def test_uncompressed_batches_are_byte_for_byte_those_of_the_java_client(java: Java) -> None:
    samples = [random_rows(seed, count) for seed, count in enumerate((1, 2, 5, 70, 300))]
    lines = [f"encode none 77 3 12 true {in_java_words(rows)}" for rows in samples]
    for rows, made in zip(samples, java("Batches.java", lines), strict=True):
        assert encoded(columns(rows), producer=PRODUCER).hex() == made


def by_hand(keys: list[bytes | None], values: list[bytes | None]) -> bytes:
    """The records section of rows of one time, a record after the other."""

    def sized(blob: bytes | None) -> bytes:
        return varints.one(-1) if blob is None else varints.one(len(blob)) + blob

    records = (
        b"\x00\x00" + varints.one(at) + sized(key) + sized(value) + b"\x00"
        for at, (key, value) in enumerate(zip(keys, values, strict=True))
    )
    return b"".join(varints.one(len(record)) + record for record in records)


@pytest.mark.parametrize("beyond", [-2, -1, 0, 1], ids=lambda beyond: f"{beyond:+}")
def test_numbers_are_the_same_on_both_sides_of_where_they_are_looked_up(beyond: int) -> None:
    count = varints.TABLED_BELOW + beyond
    keys = [None if at % 3 else b"k" * (at % 70) for at in range(count)]
    values = [None if at % 5 == 1 else b"v" * (at % 9) for at in range(count)]
    values[7] = b"w" * count
    rows = Columns(value=pa.array(values, pa.binary()), key=pa.array(keys, pa.binary()))
    assert encoded(rows)[batches.HEADER_BYTES :] == by_hand(keys, values)
    keyless = encoded(Columns(value=rows.value))[batches.HEADER_BYTES :]
    assert keyless == by_hand([None] * count, values)


def test_what_the_java_client_compresses_is_read(java: Java) -> None:
    rows = random_rows(9, 400)
    lines = [
        f"encode {kind.name.lower()} 77 3 12 false {in_java_words(rows)}" for kind in Compression
    ]
    for kind, made in zip(Compression, java("Batches.java", lines), strict=True):
        (batch,) = batch_reader.read(bytes.fromhex(made))
        assert batch.compression is kind
        assert decoded(bytes.fromhex(made)) == rows


def test_the_java_client_reads_what_is_compressed_here(java: Java) -> None:
    samples = [random_rows(10, 400), [(5, b"k", b"same " * 50_000, [])]]
    data = [encoded(columns(rows), compression=kind) for rows in samples for kind in Compression]
    marker = batches.encode_marker(
        Marker.COMMIT, producer=PRODUCER, coordinator_epoch=4, timestamp_ms=8
    )
    result = java("Batches.java", [f"decode {d.hex()}" for d in (*data, b"".join(marker))])
    for index, rows in enumerate(samples):
        for kind in Compression:
            assert result[index * len(Compression) + kind] == in_java_words(rows), kind.name
    assert result[-1] == "COMMIT"


def test_columns_may_be_text_dictionaries_large_sliced_or_missing() -> None:
    texts = ["a", None, "ccc", "a"]
    wanted = [b"a", None, b"ccc", b"a"]
    kinds = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary_view()]
    arrays = [pa.array(texts, pa.string()).cast(kind) for kind in kinds]
    arrays.append(pa.array(texts, pa.string()).dictionary_encode())
    arrays.append(pa.array(["x", *texts, "y"]).slice(1, 4))
    for array in arrays:
        both = Columns(value=array, key=array, headers=pa.nulls(4))
        assert decoded(encoded(both)) == [(1_000, item, item, []) for item in wanted]
    assert (
        decoded(encoded(Columns(value=pa.nulls(2, pa.binary())))) == [(1_000, None, None, [])] * 2
    )


def test_time_stamps_may_be_arrow_ones_and_null() -> None:
    stamps = pa.array([5_000_001, None, 2_000], pa.timestamp("us", tz="UTC"))
    rows = Columns(value=pa.array([b"a", b"b", b"c"]), timestamp_ms=stamps)
    assert [row[0] for row in decoded(encoded(rows))] == [5_000, 1_000, 2]


def test_headers_may_be_a_map() -> None:
    maps = pa.array([[("a", b"1"), ("b", None)], None, []], pa.map_(pa.string(), pa.binary()))
    for skipped in (0, 1):
        rows = Columns(value=pa.array([b"x", b"y", b"z"]), headers=maps).slice(skipped, 3 - skipped)
        wanted = [[("a", b"1"), ("b", None)], [], []][skipped:]
        assert [row[3] for row in decoded(encoded(rows))] == wanted


@FEW
@given(rows=rows_of_any_kind, limit=st.integers(100, 2_000))
def test_split_keeps_every_row_in_order_and_batches_within_the_limit(
    rows: list[Row], limit: int
) -> None:
    parts = list(batches.split(columns(rows), limit))
    data = [encoded(part) for part in parts]
    assert [row for piece in data for row in decoded(piece)] == rows
    assert all(
        len(piece) <= limit or len(part) == 1 for piece, part in zip(data, parts, strict=True)
    )


@FEW
@given(
    pieces=st.lists(st.lists(st.integers(1, 90), max_size=20), max_size=8),
    limit=st.integers(61, 300),
)
def test_portions_of_pieces_are_full_within_the_limit_and_leave_no_row_out(
    pieces: list[list[int]], limit: int
) -> None:
    found = list(batches.portions([np.array(piece, dtype=np.int64) for piece in pieces], limit))
    taken = [[(at, n) for at, a, b in portion for n in range(a, b)] for portion in found]
    wanted = [(at, n) for at, piece in enumerate(pieces) for n in range(len(piece))]
    assert [row for portion in taken for row in portion] == wanted
    room = limit - batches.HEADER_BYTES
    sums = [sum(pieces[at][n] for at, n in portion) for portion in taken]
    assert all(
        spent <= room or len(portion) == 1 for spent, portion in zip(sums, taken, strict=True)
    )
    for spent, (at, n), *_ in zip(sums, [portion[0] for portion in taken[1:]], strict=False):
        assert spent + pieces[at][n] > room


def test_a_batch_that_was_cut_short_is_left_out() -> None:
    whole = encoded(columns(random_rows(1, 3)))
    for cut in (1, 40, len(whole) - 1):
        assert len(list(batch_reader.read(whole + whole[:cut]))) == 1


def test_a_flipped_bit_is_found_by_the_checksum() -> None:
    data = bytearray(encoded(columns(random_rows(2, 3))))
    for place in (22, 50, len(data) - 1):
        data[place] ^= 1
        with pytest.raises(Malformed, match="checksum"):
            list(batch_reader.read(bytes(data)))
        data[place] ^= 1


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(rng=st.randoms(use_true_random=False), kind=st.sampled_from(Compression))
def test_garbage_behind_a_valid_checksum_is_malformed_and_nothing_else(
    rng: random.Random, kind: Compression
) -> None:
    data = bytearray(encoded(columns(random_rows(rng.randrange(99), 6)), compression=kind))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(17, len(data))] = rng.randrange(256)
    try:
        for batch in batch_reader.read(bytes(data), verify=False):
            batch.columns()
            batch.marker()
    except Malformed:
        pass


def test_a_claim_of_many_records_allocates_nothing() -> None:
    data = bytearray(encoded(columns(random_rows(3, 1))))
    data[57:61] = (2**31 - 1).to_bytes(4, "big")
    (batch,) = batch_reader.read(bytes(data), verify=False)
    with pytest.raises(Malformed, match="2147483647 records are claimed"):
        batch.columns()


@pytest.mark.parametrize("kind", [kind for kind in Compression if kind])
def test_a_bomb_is_refused_at_the_limit(kind: Compression) -> None:
    bomb = compress(kind, bytes(1 << 20))
    assert decompress(kind, bomb, 1 << 20) == bytes(1 << 20)
    with pytest.raises(Malformed):
        decompress(kind, bomb, (1 << 20) - 1)


@pytest.mark.parametrize("kind", [kind for kind in Compression if kind])
def test_truncated_and_foreign_bytes_are_refused(kind: Compression) -> None:
    whole = compress(kind, bytes(range(256)) * 1_000)
    for bad in (whole[: len(whole) // 2], whole[:-3], b"neither", b"\x82SNAPPY\x00 and more"):
        with pytest.raises(Malformed):
            decompress(kind, bad)


def test_a_raw_snappy_block_without_framing_is_read() -> None:
    raw = pa.Codec("snappy").compress(b"plain " * 100, asbytes=True)
    assert decompress(Compression.SNAPPY, raw) == b"plain " * 100


@pytest.mark.parametrize("marker", Marker)
def test_markers_come_back_as_they_went(marker: Marker) -> None:
    made = batches.encode_marker(marker, producer=PRODUCER, coordinator_epoch=1, timestamp_ms=5)
    (batch,) = batch_reader.read(b"".join(made))
    assert batch.is_control
    assert batch.marker() is marker
    (rows,) = batch_reader.read(encoded(columns(random_rows(4, 1))))
    assert rows.marker() is None


def test_sequences_start_again_at_zero() -> None:
    assert batches.next_sequence(5, 3) == 8
    assert batches.next_sequence(2**31 - 1, 1) == 0
    assert batches.next_sequence(2**31 - 2, 4) == 2


def test_a_transactional_batch_of_nobody_can_not_be_made() -> None:
    with pytest.raises(ValueError, match="needs a producer id"):
        Producer(is_transactional=True)
