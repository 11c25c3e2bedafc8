"""Which columns get a dictionary, by what is in them; read from the files themselves."""

from __future__ import annotations

import io
import random
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epochal.kit import parquet

ROWS = 200_000


def with_dictionary(rows: pa.Table) -> set[str]:
    """Write a file as sinks do, see that it reads back, and say which columns have one."""
    file = io.BytesIO()
    encoder = parquet.encoder(parquet.sample(rows), "snappy")(pa.PythonFile(file))
    encoder.write(rows)
    footer = encoder.close()
    assert pq.read_table(io.BytesIO(file.getvalue())).equals(rows)
    columns = [footer.row_group(0).column(at) for at in range(footer.num_columns)]
    return {column.path_in_schema for column in columns if column.has_dictionary_page}


@pytest.mark.parametrize(
    ("values", "has_one"),
    [
        (range(ROWS), False),
        ([f"order {number}" for number in range(ROWS)], False),
        ([number % 997 for number in range(ROWS)], True),
        ([number // 50 for number in range(ROWS)], True),
        ([random.Random(7).random()] * ROWS, True),
        ([None] * (ROWS - 3) + [1, 2, 3], True),
        ([None if number % 2 else number for number in range(ROWS)], False),
    ],
    ids=["distinct", "distinct text", "rounds", "runs", "one", "few", "distinct or null"],
)
def test_a_column_has_a_dictionary_where_its_values_come_again(values, has_one):
    assert with_dictionary(pa.table({"v": values})) == ({"v"} if has_one else set())


def test_every_kind_of_column_is_written_and_read_back():
    some = 1000
    rows = pa.table(
        {
            "struct": [{"x": 1, "y": ["a"]}] * some,
            "map": pa.array([[("k", 1)]] * some, pa.map_(pa.string(), pa.int64())),
            "list": [[{"q": 1}]] * some,
            "fixed list": pa.array([[1, 2]] * some, pa.list_(pa.int32(), 2)),
            "a.dotted `name`": ["a"] * some,
            "uuid": pa.array([b"0123456789abcdef"] * some, pa.uuid()),
            "nothing": pa.nulls(some, pa.int32()),
            "small decimal": pa.array([Decimal(1)] * some, pa.decimal32(9, 0)),
        }
    )
    assert with_dictionary(rows) >= {
        "struct.x",
        "struct.y.list.element",
        "map.key_value.key",
        "map.key_value.value",
        "list.list.element.q",
        "fixed list.list.element",
        "a.dotted `name`",
        "uuid",
    }


def test_few_rows_and_none_are_sampled_whole():
    assert parquet.sample(pa.table({"v": [3, 1, 2]})).to_pydict() == {"v": [3, 1, 2]}
    assert parquet.repeating(pa.table({"v": pa.array([], pa.int64())})) == ["v"]


def test_a_sample_is_small_and_from_all_over():
    sampled = parquet.sample(pa.table({"v": range(ROWS)}))
    assert sampled.num_rows == 10_000
    assert max(sampled["v"].to_pylist()) > ROWS * 0.9
    assert sampled.get_total_buffer_size() < 2 * sampled.nbytes, "it keeps all rows in memory"
