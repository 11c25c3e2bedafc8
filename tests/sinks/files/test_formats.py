"""Values go out and come back the same, in every format, to pyarrow and to Spark."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from epochal.errors import Misconfigured, RowRejected
from epochal.kit import json_lines
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.files.local import folder_beside

NOON = dt.datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=dt.UTC)
TEXTS = [
    "plain",
    "",
    None,
    'quo"te',
    "back\\slash",
    "new\nline",
    "tab\t\x01",
    "ümläut 雪 😀",
    "a,b",
]
FLAT = pa.table(
    {
        "n": pa.array(range(9), pa.int64()),
        "text": pa.array(TEXTS),
        "small": pa.array([1, -1, None, 127, -128, 0, 1, 1, 1], pa.int8()),
        "big": pa.array([2**63 - 1, -(2**63), None, 0, 1, 2**53 + 1, 1, 1, 1], pa.int64()),
        "real": pa.array([0.1, math.nan, math.inf, -math.inf, None, 1e300, 1e-300, -0.0, 5e-324]),
        "money": pa.array([Decimal("12345678901234567890.123456789012345678")] * 8 + [None]),
        "flag": pa.array([True, False, None] * 3),
        "day": pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31), None] * 3),
        "at": pa.array(
            [NOON, None, NOON - dt.timedelta(days=40000)] * 3, pa.timestamp("us", "UTC")
        ),
        "wall": pa.array([NOON.replace(tzinfo=None), None, None] * 3, pa.timestamp("us")),
    }
)
NESTED = pa.table(
    {
        "raw": pa.array([b"\x00\xff", b"", None] * 3),
        "list": pa.array([[1, None, 3], [], None] * 3),
        "map": pa.array(
            [[("a", 1.5), ("b", None)], [], None] * 3, pa.map_(pa.string(), pa.float64())
        ),
        "deep": pa.array(
            [{"x": 1, "y": [{"at": NOON, "z": "q"}]}, {"x": None, "y": []}, None] * 3,
            pa.struct(
                [
                    ("x", pa.int32()),
                    (
                        "y",
                        pa.list_(
                            pa.struct([("at", pa.timestamp("us", "UTC")), ("z", pa.string())])
                        ),
                    ),
                ]
            ),
        ),
    }
)
WIDE = pa.table([*FLAT.columns, *NESTED.columns], names=[*FLAT.column_names, *NESTED.column_names])
CASES = [
    ("parquet", None, WIDE),
    ("parquet", "zstd", WIDE),
    ("jsonl", None, WIDE),
    ("jsonl", "gzip", WIDE),
    ("csv", None, FLAT),
    ("csv", "gzip", FLAT),
]


def rows_of(table: pa.Table) -> list[str]:
    """In an order of their own, and with NaN equal to itself."""
    return [repr(row) for row in sorted(table.to_pylist(), key=lambda row: row["n"])]


@pytest.mark.parametrize(("form", "compression", "rows"), CASES)
def test_values_come_back_as_they_were(drive, tmp_path, form, compression, rows):
    driver = drive(Files(str(tmp_path), format=form, compression=compression))
    driver.committer.check(rows.schema)
    driver.write(rows, 0)
    back = read_epochs(str(tmp_path)).to_table()
    assert back.schema == rows.schema
    assert rows_of(back) == rows_of(rows)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4]])
def test_spark_gets_the_same_values(drive, tmp_path, spark, case):
    form, compression, rows = case
    drive(Files(str(tmp_path), format=form, compression=compression)).write(rows, 0)
    back = read_epochs(str(tmp_path), spark=spark).toArrow().cast(rows.schema)
    assert rows_of(back) == rows_of(rows)


def test_a_plain_reader_of_spark_finds_what_is_no_number_in_csv(drive, tmp_path, spark):
    rows = FLAT.select(["n", "real"])
    driver = drive(Files(str(tmp_path), format="csv"))
    driver.write(rows.slice(5), 0)
    driver.write(rows.slice(0, 5), 1)
    back = spark.read.csv(str(tmp_path), schema="n long, real double", header=True).toArrow()
    assert rows_of(back.cast(rows.schema)) == rows_of(rows)


def test_spark_reads_instants_and_days_in_every_format(drive, tmp_path, spark):
    rows = pa.table(
        {
            "n": [1],
            "day": pa.array([dt.date(2026, 1, 31)]),
            "at": pa.array([NOON], pa.timestamp("us", "UTC")),
            "wall": pa.array([NOON.replace(tzinfo=None)], pa.timestamp("us")),
        }
    )
    for form in ("parquet", "jsonl", "csv"):
        root = tmp_path / form
        drive(Files(str(root), format=form)).write(rows, 0)
        back = read_epochs(str(root), spark=spark)
        (row,) = back.selectExpr(
            "unix_micros(at) u", "cast(day as string) d", "cast(wall as string) w"
        ).collect()
        assert (row.u, row.d) == (int(NOON.timestamp() * 1e6), "2026-01-31"), form
        assert row.w == "2026-01-31 12:00:00.123456", form


ODD = [
    "a/b",
    "a=b",
    "100%",
    "x y",
    "ü雪",
    "q\"'",
    "c:\\d",
    "[{^}]*?#",
    "\x01\x1f\x7f",
    "007",
    "..",
]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_odd_partition_values_come_back(drive, tmp_path, form):
    values = [*ODD, None]
    rows = pa.table(
        {
            "p": pa.array(values),
            "n": pa.array(range(len(values)), pa.int64()),
            "odd=col": pa.array([1, None] * 6, pa.int32()),
            "day": pa.array([dt.date(2026, 1, 31)] * len(values)),
            "flag": pa.array([True] * len(values)),
        }
    )
    # In CSV a null in the only column of a file would be an empty line.
    rows = rows.set_column(1, pa.field("n", pa.int64(), nullable=False), rows["n"])
    parts = ["p", "odd=col", "day", "flag"]
    driver = drive(Files(str(tmp_path), format=form, partition_by=parts))
    driver.committer.check(rows.schema)
    driver.write(rows, 0)
    back = read_epochs(str(tmp_path)).to_table()
    assert back.schema == rows.schema
    assert sorted(back.to_pylist(), key=lambda row: row["n"]) == rows.to_pylist()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "which would come back as null"),
        ("__HIVE_DEFAULT_PARTITION__", "which would come back as null"),
        ("a\0b", "with the character NUL"),
        ("x" * 254, "of more than 255 bytes"),
        ("/" * 85, "of more than 255 bytes"),
    ],
)
def test_a_partition_value_that_names_no_folder_is_refused(drive, tmp_path, value, why):
    driver = drive(Files(str(tmp_path), partition_by=["p"]))
    with pytest.raises(RowRejected, match=f"partition column 'p' has .*{why}"):
        driver.prepare(pa.table({"p": ["a", value], "n": [1, 2]}), 0)
    driver.write(pa.table({"p": ["x" * 253, "/" * 84], "n": [1, 2]}), 0)


def test_spark_reads_odd_partition_values_back(drive, tmp_path, spark):
    rows = pa.table({"p": pa.array([*ODD, None]), "n": pa.array(range(len(ODD) + 1), pa.int64())})
    drive(Files(str(tmp_path), partition_by=["p"])).write(rows, 0)
    expected = {(row["p"], row["n"]) for row in rows.to_pylist()}
    by_spark = spark.read.schema("n bigint, p string").parquet(str(tmp_path))
    assert {(row.p, row.n) for row in by_spark.collect()} == expected
    assert {(row.p, row.n) for row in read_epochs(str(tmp_path), spark=spark).collect()} == expected


def test_spark_reads_epochs_of_a_folder_whose_name_looks_like_a_glob(drive, tmp_path, spark):
    root = tmp_path / "[a] {b,c} *?#%20"
    rows = pa.table({"p": ["x", "y"], "n": [1, 2]})
    drive(Files(root, partition_by=["p"])).write(rows, 0)
    found = read_epochs(root, spark=spark).collect()
    assert {(row.p, row.n) for row in found} == {("x", 1), ("y", 2)}


def test_folders_are_named_as_spark_names_them(drive, tmp_path, spark):
    rows = [(n, value) for n, value in enumerate([*ODD, None])]
    frame = spark.createDataFrame(rows, "n bigint, p string")
    frame.write.partitionBy("p").parquet(str(tmp_path / "spark"))
    ours = Files(str(tmp_path / "ours"), partition_by=["p"])
    drive(ours).write(pa.table({"n": [n for n, _ in rows], "p": [value for _, value in rows]}), 0)
    named = {
        place: {path.name for path in (tmp_path / place).iterdir() if path.name.startswith("p=")}
        for place in ("spark", "ours")
    }
    assert named["ours"] == named["spark"]


def test_epochs_can_be_chosen_and_a_later_column_is_null_before_it_came(drive, numbers, tmp_path):
    driver = drive(Files(str(tmp_path)))
    driver.write(numbers(1), 0)
    driver.write(pa.table({"n": [2], "extra": ["x"]}), 1)
    driver.another(pipeline="other", uid="zzzzzzzz2222").write(numbers(9), 0)
    chosen = read_epochs(str(tmp_path), epochs={0}, pipeline="orders").to_table()
    assert chosen["n"].to_pylist() == [1]
    both = read_epochs(str(tmp_path), epochs=range(2), pipeline="orders").to_table()
    assert both.sort_by("n").to_pylist() == [{"n": 1, "extra": None}, {"n": 2, "extra": "x"}]


def test_files_of_a_cut_commit_are_not_read(drive, numbers, tmp_path):
    driver = drive(Files(str(tmp_path)))
    driver.write(numbers(1), 0)
    receipt = driver.prepare(numbers(2), 1)
    name = receipt.token["files"][0]["path"]
    (folder_beside(tmp_path) / str(receipt.handle) / name).rename(tmp_path / name)
    assert sorted(ds.dataset(tmp_path).to_table()["n"].to_pylist()) == [1, 2]
    assert read_epochs(str(tmp_path)).to_table()["n"].to_pylist() == [1]


def test_columns_that_do_not_fit_together_are_reported(drive, numbers, tmp_path):
    driver = drive(Files(str(tmp_path)))
    driver.write(numbers(1), 0)
    driver.write(pa.table({"n": pa.array([[1]])}), 1)
    with pytest.raises(Misconfigured, match="don't fit together"):
        read_epochs(str(tmp_path))


def test_nothing_reads_as_no_rows(tmp_path, spark):
    assert read_epochs(str(tmp_path)).to_table().num_rows == 0
    assert read_epochs(str(tmp_path), spark=spark).count() == 0


def test_json_lines_are_json_whatever_the_slice():
    batch = WIDE.combine_chunks().to_batches()[0]
    everything = [json.loads(line) for line in bytes(json_lines.lines(batch)).splitlines()]
    assert len(everything) == 9
    for start in range(9):
        part = bytes(json_lines.lines(batch.slice(start, 2))).splitlines()
        assert [json.loads(line) for line in part] == everything[start : start + 2]
    assert everything[1]["real"] == "NaN"
    assert everything[0]["at"] == "2026-01-31T12:00:00.123456Z"
    assert everything[0]["raw"] == "AP8="
    assert bytes(json_lines.lines(batch.slice(0, 0))) == b""


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_times_of_a_day_come_back(drive, tmp_path, form):
    times = [dt.time(23, 59, 59, 999999), None, dt.time(0)]
    rows = pa.table({"n": [1, 2, 3], "t": pa.array(times, pa.time64("us"))})
    drive(Files(tmp_path, format=form)).write(rows, 0)
    assert read_epochs(tmp_path).to_table().sort_by("n").to_pylist() == rows.to_pylist()


def test_a_large_value_passes_through(drive, tmp_path):
    rows = pa.table({"n": [1], "text": ["x" * 10_000_000]})
    for form in ("parquet", "jsonl", "csv"):
        driver = drive(Files(str(tmp_path / form), format=form))
        driver.write(rows, 0)
        back = read_epochs(str(tmp_path / form)).to_table()
        assert len(back["text"][0].as_py()) == 10_000_000
