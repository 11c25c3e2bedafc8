"""Verification finds surplus and missing rows, and reports what it can't count."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epochal import Files, Memory, Postgres, Session
from epochal.config.resolve_target import OpenedTarget
from epochal.logs import open_log
from epochal.reports.verify import verify


def only(report, sink="orders"):
    return next(one for one in report.sinks if one.sink == sink)


def test_decided_rows_agree_with_visible_rows(shop):
    shop.run(epochs=3, rows=2)
    report = verify(shop.opened)
    assert not report.differs
    assert [(one.verdict, one.decided_rows, one.visible_rows) for one in report.sinks] == [
        ("agrees", 6, 6),
        ("agrees", 6, 6),
    ]
    assert report.up_to == 2
    assert "not compared" in report.source


def visible(shop):
    return shop.orders._reference.store()._visible


def test_missing_rows_are_found(shop):
    shop.run(epochs=2, rows=2)
    del visible(shop)[next(iter(visible(shop)))]
    report = verify(shop.opened)
    assert report.differs
    assert only(report).differences == ["2 rows missing: 4 decided, 2 visible"]
    assert only(report, "audit").verdict == "agrees"


def test_duplicated_rows_are_found(shop):
    shop.run(epochs=2, rows=2)
    for key, rows in visible(shop).items():
        visible(shop)[key] = pa.concat_tables([rows, rows])
    found = only(verify(shop.opened))
    assert found.verdict == "differs"
    assert found.differences == [
        "4 rows too many: 4 decided, 8 visible",
        "epoch 1: 2 decided, 4 visible",
    ]


def test_an_epoch_that_is_not_committed_yet_is_no_difference(shop):
    shop.run(epochs=1, rows=1)
    driver = shop.die("decided")
    report = verify(shop.opened)
    assert [(one.decided_rows, one.visible_rows, one.verdict) for one in report.sinks] == [
        (3, 1, "agrees"),
        (3, 1, "agrees"),
    ]
    assert driver is not None


def test_a_sink_that_can_not_be_recounted_is_reported_with_the_reason(shop, monkeypatch):
    shop.orders = Memory(name="orders", mode="complete")
    shop.run(epochs=2)
    found = only(verify(shop.opened))
    assert found.verdict == "can't be recounted"
    assert "replaces what was visible" in found.because
    monkeypatch.setattr(Memory, "committer", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    assert "could not be queried: no route" in only(verify(shop.opened)).because


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_files_are_counted_in_the_files_and_strays_are_found(shop, form):
    target = shop.root / "out"
    # The only column of a CSV file may hold no null.
    shop.schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    shop.orders = Files(str(target), name="orders", format=form)
    shop.run(epochs=3, rows=2)
    found = only(verify(shop.opened))
    assert (found.verdict, found.visible_rows, found.epochs_compared) == ("agrees", 6, 3)
    lost = min(target.glob("epochal-*"))
    stray = lost.with_name(lost.name.replace("-e0-", "-e7-"))
    lost.rename(stray)
    report = only(verify(shop.opened))
    assert report.verdict == "differs"
    assert any("is named by the manifest and is not there" in one for one in report.differences)
    assert any("no manifest names it" in one for one in report.differences)


def test_a_file_that_was_changed_after_its_commit_is_found(shop):
    target = shop.root / "out"
    shop.orders = Files(str(target), name="orders")
    shop.run(epochs=1, rows=2)
    (file,) = Path(target).glob("epochal-*.parquet")
    pq.write_table(pa.concat_tables([pq.read_table(file)] * 2), file)
    assert only(verify(shop.opened)).differences[0] == "2 rows too many: 2 decided, 4 visible"


def test_rows_of_other_programs_in_a_table_can_be_allowed(shop, postgres):
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE audited (id bigint)")
        connection.execute("INSERT INTO audited VALUES (99)")
    shop.orders = Postgres(postgres.url, table="audited", name="orders", meta_schema="audited_meta")
    shop.run(epochs=2, rows=2)
    found = only(verify(shop.opened))
    assert (found.verdict, found.visible_rows) == ("differs", 5)
    assert "--shared" in found.differences[0]
    assert only(verify(shop.opened, shared=["orders"])).verdict == "agrees"
    with postgres.connect() as connection:
        connection.execute("DELETE FROM audited")
    missing = only(verify(shop.opened, shared=["orders"])).differences
    assert missing == ["4 rows missing: 4 decided, 0 visible"]


def test_rows_that_a_table_refused_are_at_another_sink_and_not_missing(shop, postgres):
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE picky (id bigint CHECK (id <> 1))")
        shop.orders = Postgres(
            postgres.url,
            table="picky",
            name="orders",
            meta_schema="picky_meta",
            on_reject=Memory(name="refused"),
        )
        shop.run(epochs=2, rows=3)
        report = verify(shop.opened)
        assert {one.sink: (one.verdict, one.visible_rows) for one in report.sinks} == {
            "orders": ("agrees", 4),
            "audit": ("agrees", 6),
            "refused": ("agrees", 2),
        }
        connection.execute("DELETE FROM picky WHERE id = 2")
        missing = ["2 rows missing: 4 decided, 2 visible"]
        assert only(verify(shop.opened)).differences == missing
        connection.execute("INSERT INTO picky VALUES (2), (2), (2)")
        assert only(verify(shop.opened)).verdict == "differs"


NESTED = pa.schema(
    [
        ("a", pa.int64()),
        ("b", pa.int64()),
        ("many", pa.list_(pa.int64())),
        ("pair", pa.struct([("x", pa.int64()), ("y", pa.int64())])),
        ("map", pa.map_(pa.string(), pa.float64())),
        ("text", pa.string()),
        ("price", pa.decimal128(30, 2)),
        ("at", pa.timestamp("ms", tz="UTC")),
        ("bytes", pa.binary()),
        ("flag", pa.bool_()),
    ]
)
ROW = {"a": 5, "b": None, "many": [1, None, 2], "pair": {"x": 1, "y": None}, "map": {}, "text": ""}
ROWS = [ROW, {"many": [], "map": {"k": None, "l": -0.0}, "price": 7, "at": 1, "bytes": b"\0"}, {}]
MOVED = [
    {"a": None, "b": 5},
    {"many": [1, 2, None]},
    {"map": None},
]


def test_a_target_whose_nulls_moved_differs_from_what_a_session_decided(tmp_path, spark):
    sinks = [Files(str(tmp_path / form), name=form, format=form) for form in ("parquet", "jsonl")]
    log = str(tmp_path / "log")
    with Session("nulls", sinks=sinks, schema=NESTED, log=log) as session:
        session.begin(0)
        session.write(ROWS)
        session.commit()
    opened = OpenedTarget(target="x", log=open_log(log), pipeline="nulls", sinks=sinks)
    for found in verify(opened, spark=spark).sinks:
        assert (found.verdict, found.visible_hash) == ("agrees", found.decided_hash)
        assert found.decided_hash is not None
        assert "not compared" not in found.because
    (file,) = (tmp_path / "parquet").glob("epochal-*.parquet")
    for moved in MOVED:
        changed = pa.Table.from_pylist([{**ROW, **moved}, *ROWS[1:]], schema=NESTED)
        pq.write_table(changed, file)
        assert not verify(opened).differs
        found = only(verify(opened, spark=spark), "parquet")
        assert "rows were changed" in found.differences[0], moved


def test_hashes_that_can_not_be_compared_are_reported_with_the_reason(shop, spark):
    shop.orders = Files(str(shop.root / "out"), name="orders")
    with Session(
        "shop",
        sinks=shop.sinks,
        schema=pa.schema([("id", pa.int64())]),
        log=shop.log_path,
        fingerprint=False,
    ) as session:
        shop.epoch(session)
    found = verify(shop.opened, spark=spark)
    assert not found.differs
    assert "hashes are not compared: not all decided rows were hashed" in only(found).because
    assert "not return rows as they were written" in only(found, "audit").because
