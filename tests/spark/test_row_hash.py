"""Equal rows have equal hashes and other rows have others; Spark and Python agree on them."""

from __future__ import annotations

import decimal
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from spark_stage import Killer, Source

from epochal import Memory, Pipeline
from epochal.row_hash import row_hashes
from epochal.spark.row_hash import fingerprint_of, row_hash, with_row_hash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INT, TEXT = pa.int64(), pa.string()
PAIR = pa.struct([("a", INT), ("b", TEXT)])
KINDS: dict[str, pa.DataType] = {
    "flag": pa.bool_(),
    "byte": pa.int8(),
    "int": pa.int32(),
    "long": INT,
    "single": pa.float32(),
    "double": pa.float64(),
    "short_decimal": pa.decimal128(9, 2),
    "long_decimal": pa.decimal128(30, 4),
    "text": TEXT,
    "bytes": pa.binary(),
    "day": pa.date32(),
    "time": pa.timestamp("us", tz="UTC"),
    "local_time": pa.timestamp("us"),
    "numbers": pa.list_(INT),
    "texts": pa.list_(TEXT),
    "lists": pa.list_(pa.list_(INT)),
    "pair": PAIR,
    "nested": pa.struct([("x", PAIR), ("y", pa.list_(TEXT)), ("z", pa.struct([("n", INT)]))]),
    "pairs": pa.list_(PAIR),
    "map": pa.map_(TEXT, INT),
    "map_of_lists": pa.map_(INT, pa.list_(PAIR)),
    "maps": pa.list_(pa.map_(TEXT, pa.map_(TEXT, pa.float64()))),
}


def few(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type or null: mostly of a few, so that many are equal, or nearly."""
    return st.none() | _present(kind)


def _present(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    if pa.types.is_map(kind):
        entries = st.dictionaries(_present(kind.key_type), values(kind.item_type), max_size=3)
        return entries.flatmap(lambda made: st.permutations(list(made.items())))
    if pa.types.is_list(kind):
        return st.lists(values(kind.value_type), max_size=3)
    return _FLAT[kind]


def _decimals(kind: pa.DataType) -> st.SearchStrategy[decimal.Decimal]:
    largest = 10**kind.precision - 1
    unscaled = few(0, 1, -1, 127, 128, -128, -129, largest, -largest)
    drawn = unscaled | st.integers(-largest, largest)
    context = decimal.Context(prec=50)
    return drawn.map(lambda number: context.scaleb(decimal.Decimal(number), -kind.scale))


_FLOATS = few(0.0, -0.0, 1.0, math.nan, -math.nan, math.inf, -math.inf)
_MICROSECONDS = st.integers(-(2**51), 2**51)
_FLAT: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): few(0, 1, -1) | st.integers(-128, 127),
    pa.int32(): few(0, 1, -1) | st.integers(-(2**31), 2**31 - 1),
    INT: few(0, 1, 2, -1) | st.integers(-(2**63), 2**63 - 1),
    pa.float32(): _FLOATS | st.floats(width=32),
    pa.float64(): _FLOATS | st.floats(),
    pa.decimal128(9, 2): _decimals(pa.decimal128(9, 2)),
    pa.decimal128(30, 4): _decimals(pa.decimal128(30, 4)),
    TEXT: few("", "a", "b", "ab", "null", "NULL", "é", "x" * 40) | st.text(max_size=90),
    pa.binary(): few(b"", b"\0", b"\0\0", b"a") | st.binary(max_size=90),
    pa.date32(): st.dates(),
    pa.timestamp("us", tz="UTC"): _MICROSECONDS,
    pa.timestamp("us"): _MICROSECONDS,
}


def canonical(value: Any, kind: pa.DataType) -> Any:
    """The value such that equal ones have the same text."""
    if value is None:
        return None
    if pa.types.is_floating(kind):
        return "NaN" if math.isnan(value) else value + 0.0
    if pa.types.is_struct(kind):
        return tuple(canonical(value[field.name], field.type) for field in kind)
    if pa.types.is_map(kind):
        return sorted(repr((key, canonical(item, kind.item_type))) for key, item in value)
    if pa.types.is_list(kind):
        return [canonical(item, kind.value_type) for item in value]
    return value


def hashes(column: pa.Array) -> list[int]:
    batch = pa.RecordBatch.from_arrays([column], names=["c"])
    return [int(one) for one in row_hashes(batch).view(np.int64)]


def random_columns() -> dict[str, pa.Array]:
    """Some hundred values of every kind, as chance and Hypothesis choose them."""
    found: dict[str, list[Any]] = defaultdict(list)

    @settings(
        max_examples=250,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(st.data())
    def draw(data: Any) -> None:
        for name in data.draw(st.sets(few(*KINDS), min_size=4, max_size=4)):
            found[name] += data.draw(st.lists(values(KINDS[name]), min_size=3, max_size=12))

    draw()
    return {name: pa.array(found[name], kind) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def columns() -> dict[str, pa.Array]:
    return random_columns()


def test_thousands_of_random_values_have_equal_hashes_where_they_are_equal_and_only_there(
    columns: dict[str, pa.Array],
) -> None:
    assert sum(map(len, columns.values())) > 3_000
    for name, column in columns.items():
        by_value: dict[str, set[int]] = defaultdict(set)
        by_hash: dict[int, set[str]] = defaultdict(set)
        for value, hashed in zip(column.to_pylist(), hashes(column), strict=True):
            text = repr(canonical(value, KINDS[name]))
            by_value[text].add(hashed)
            by_hash[hashed].add(text)
        assert all(len(some) == 1 for some in by_value.values()), name
        assert all(len(some) == 1 for some in by_hash.values()), name


@pytest.mark.compat
def test_spark_hashes_the_same_thousands_of_values_to_the_same_numbers(
    spark: SparkSession, columns: dict[str, pa.Array], tmp_path: Path
) -> None:
    rows = max(map(len, columns.values()))
    table = pa.table(
        {
            name: pa.concat_arrays([column, pa.nulls(rows - len(column), column.type)])
            for name, column in columns.items()
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    reader = spark.read.option("datetimeRebaseMode", "CORRECTED")
    frame = reader.parquet(str(tmp_path / "rows.parquet")).coalesce(1)
    whole = row_hash(frame)
    each = [row_hash(frame.select(name)) for name in columns]
    assert whole is not None
    collected = frame.select(whole, *(one for one in each if one is not None)).collect()
    found = list(zip(*collected, strict=True))
    assert len(found) == len(columns) + 1
    (batch,) = table.combine_chunks().to_batches()
    assert list(found[0]) == [int(one) for one in row_hashes(batch).view(np.int64)]
    for place, name in enumerate(columns, start=1):
        assert list(found[place]) == hashes(batch.column(name)), name


def in_spark(frame: DataFrame) -> list[int]:
    hashed = with_row_hash(frame)
    assert hashed is not None
    return [row[-1] for row in hashed.collect()]


def in_tasks(frame: DataFrame) -> list[int]:
    """The hashes of the Arrow rows that Spark hands to tasks."""

    def hashed(batches: Any) -> Any:
        for batch in batches:
            numbers = pa.array(row_hashes(batch).view(np.int64))
            yield pa.RecordBatch.from_arrays([numbers], names=["hash"])

    return [row[0] for row in frame.mapInArrow(hashed, "hash long").collect()]


ODD = {
    "names that differ by case alone": "SELECT 1 AS a, NULL AS A UNION ALL SELECT NULL, 1",
    "fields that SQL can't name": r"""
        SELECT named_struct('a b', 1, 'c`d', id, "e'\\f", 2, 'x', array(named_struct('.', id))) AS s
        FROM range(3)
    """,
    "fields that differ by case alone": """
        SELECT named_struct('a', 1, 'A', CAST(NULL AS INT)) AS s
        UNION ALL SELECT named_struct('a', CAST(NULL AS INT), 'A', 1)
    """,
    "text that is equal by its collation": """
        SELECT 'A' COLLATE UTF8_LCASE AS t, array('A' COLLATE UTF8_LCASE) AS a
        UNION ALL SELECT 'a' COLLATE UTF8_LCASE, array('a' COLLATE UTF8_LCASE)
    """,
    "more columns than null bits": f"""
        SELECT {", ".join(f"IF(id % 131 = {at}, NULL, 1) AS c{at}" for at in range(131))}
        FROM range(131)
    """,
    "intervals": "SELECT make_dt_interval(1) AS i, NULL AS n UNION ALL SELECT NULL, NULL",
    "variants": """
        SELECT parse_json('{"a": 1}') AS v, 1 AS n UNION ALL SELECT parse_json('{"a": "1"}'), 1
        UNION ALL SELECT parse_json('null'), 1 UNION ALL SELECT NULL, 1
    """,
}


@pytest.mark.parametrize("query", ODD.values(), ids=ODD)
def test_rows_of_any_type_have_the_hashes_of_their_arrow_form_in_spark(
    spark: SparkSession, query: str
) -> None:
    frame = spark.sql(query)
    found = in_spark(frame)
    assert len(set(found)) == len(found) > 1
    plain = frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))
    assert found == in_tasks(plain)


def test_a_field_of_a_struct_is_not_taken_for_a_column_of_a_table_of_that_name(
    spark: SparkSession,
) -> None:
    frame = spark.range(3).selectExpr("id", "named_struct('id', id + 7) AS o").alias("o")
    assert in_spark(frame) == in_tasks(frame)


def test_vectors_of_machine_learning_are_hashed_by_what_is_in_them(spark: SparkSession) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([1.0, 2.0]),), (Vectors.dense([2.0, 1.0]),), (None,)]
    found = in_spark(spark.createDataFrame(rows, ["v"]))
    assert len(set(found)) == 3


def test_rows_that_can_not_be_hashed_are_counted_and_the_reason_is_logged(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    frame = spark.sql("SELECT array(parse_json('1')) AS vs")
    found = fingerprint_of(frame)
    assert (found.rows, found.hash_sum) == (1, None)
    assert "not fingerprinted: values of type variant within others" in caplog.text


NONE = "CAST(NULL AS BIGINT)"
MOVED: dict[str, tuple[list[str], list[str]]] = {
    "columns": ([f"{NONE} AS a", "id AS b"], ["id AS a", f"{NONE} AS b"]),
    "elements": ([f"array(id, {NONE}, 2L) AS a"], ["array(id, 2L) AS a"]),
}


@pytest.mark.parametrize(("decided", "again"), MOVED.values(), ids=MOVED)
def test_a_replay_whose_rows_differ_in_the_place_of_nulls_is_refused(
    source: Source, checkpoint: Path, killer: Killer, decided: list[str], again: list[str]
) -> None:
    source.add_numbers(epochs=1)
    sink = Memory()
    pipeline = Pipeline("moved", [sink], watch=killer.watch)
    killer.at = ("decided", 0)
    assert killer.run(pipeline, source.stream.selectExpr(*decided), checkpoint)
    sink._reference.store()._prepared.clear()
    with pytest.raises(StreamingQueryException, match="can't be written again"):
        killer.run(pipeline, source.stream.selectExpr(*again), checkpoint)
    assert sink.rows().num_rows == 0
    assert not killer.run(pipeline, source.stream.selectExpr(*decided), checkpoint)
    assert sink.rows().num_rows == 10
