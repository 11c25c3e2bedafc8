"""The hash of Arrow rows depends on their values, not on the form that they come in."""

from __future__ import annotations

import pyarrow as pa
import pytest

from epochal.row_hash import fingerprint_of, is_hashable, row_hashes


def hashes(column: pa.Array) -> list[int]:
    return [int(one) for one in row_hashes(pa.RecordBatch.from_arrays([column], names=["c"]))]


TEXTS = ["", "a", None, "null", "x" * 31, "x" * 32, "x" * 33, "é" * 500, "x" * 100_000]
NUMBERS = [0, 1, None, -1, 127]
LISTS = [[], None, [None], [1], [1, None], [None, 1], [1, 1]]


@pytest.mark.parametrize(
    ("plain", "others"),
    [
        (
            pa.array(TEXTS),
            [
                pa.array(TEXTS, pa.large_string()),
                pa.array(TEXTS, pa.string_view()),
                pa.array(TEXTS, pa.binary()),
                pa.array(TEXTS).dictionary_encode(),
            ],
        ),
        (
            pa.array(NUMBERS, pa.int32()),
            [
                pa.array(NUMBERS, pa.int8()),
                pa.array(NUMBERS, pa.int16()),
                pa.array(NUMBERS, pa.int32()).dictionary_encode(),
                pa.array(NUMBERS, pa.date32()),
            ],
        ),
        (pa.array(LISTS), [pa.array(LISTS, pa.large_list(pa.int64()))]),
        (
            pa.array([[1, None], None, [None, 1]], pa.list_(pa.int64())),
            [
                pa.array([[1, None], None, [None, 1]], pa.list_(pa.int64(), 2)),
                pa.array([[1, None], None, [None, 1]], pa.list_view(pa.int64())),
            ],
        ),
        (
            pa.array([5_000_000, None], pa.timestamp("us")),
            [pa.array([5, None], pa.timestamp("s")), pa.array([5_000, None], pa.timestamp("ms"))],
        ),
        (pa.array([0.5, None], pa.float32()), [pa.array([0.5, None], pa.float16())]),
    ],
    ids=["text", "integers", "lists", "lists of one size", "times", "floats"],
)
def test_equal_values_in_another_form_of_arrow_have_equal_hashes(plain, others):
    found = hashes(plain)
    assert len(set(found)) == len(found)
    for other in others:
        assert hashes(other) == found, other.type


def test_a_slice_has_the_hashes_of_its_rows():
    pair = pa.struct([("a", pa.list_(pa.int64())), ("b", pa.map_(pa.string(), pa.int64()))])
    rows = [
        None if at % 7 == 0 else {"a": [at] * (at % 4), "b": [(str(at), None)] * (at % 2)}
        for at in range(100)
    ]
    columns = [
        pa.array(rows, pa.struct([*pair, ("flag", pa.bool_())])),
        pa.array([None if at % 3 == 0 else f"row {at}" for at in range(100)]),
        pa.array([None if at % 5 == 0 else at % 2 == 0 for at in range(100)]),
    ]
    whole = pa.RecordBatch.from_arrays(columns, names=["s", "t", "f"])
    every = row_hashes(whole).tolist()
    assert row_hashes(whole.slice(13, 50)).tolist() == every[13:63]
    assert fingerprint_of([whole.slice(40), whole.slice(0, 40)]) == fingerprint_of([whole])


def test_what_lies_below_a_null_does_not_count():
    """Arrow keeps values where a list, a struct or a text is null."""
    numbers, valid = pa.array([1, 2, 3]), pa.py_buffer(b"\x02")
    ends = pa.py_buffer(pa.array([0, 2, 3], pa.int32()).buffers()[1])
    lists = pa.Array.from_buffers(pa.list_(pa.int64()), 2, [valid, ends], children=[numbers])
    assert lists.to_pylist() == [None, [3]]
    assert hashes(lists) == hashes(pa.array([None, [3]]))
    pairs = pa.StructArray.from_arrays([numbers], names=["a"], mask=pa.array([True, False, False]))
    assert hashes(pairs) == hashes(pa.array([None, {"a": 2}, {"a": 3}]))
    texts = pa.Array.from_buffers(pa.string(), 2, [valid, ends, pa.py_buffer(b"abc")])
    assert hashes(texts) == hashes(pa.array([None, "c"]))


def test_entries_of_a_map_have_no_order_and_elements_of_a_list_have_one():
    kind = pa.map_(pa.string(), pa.int64())
    one, other = hashes(pa.array([[("a", 1), ("b", 2)], [("b", 2), ("a", 1)]], kind))
    assert one == other
    one, other = hashes(pa.array([["a", "b"], ["b", "a"]]))
    assert one != other


def test_rows_of_many_columns_and_no_rows_at_all():
    names = [f"c{at}" for at in range(200)]
    columns = [pa.array([None if row == at else 1 for row in range(200)]) for at in range(200)]
    batch = pa.RecordBatch.from_arrays(columns, names=names)
    assert len(set(row_hashes(batch).tolist())) == 200
    assert row_hashes(batch.slice(0, 0)).tolist() == []


def test_unions_have_no_hash():
    union = pa.dense_union([pa.field("a", pa.int64()), pa.field("b", pa.string())])
    assert not is_hashable(pa.schema([("u", pa.list_(union))]))
    assert is_hashable(pa.schema([("m", pa.map_(pa.string(), pa.list_(pa.int64())))]))
