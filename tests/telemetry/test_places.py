"""Where a history lies: pieces that are replaced as a whole, wherever the log is."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from epochal import Memory, Session
from epochal.logs import open_log
from epochal.logs.hadoop import HadoopLog
from epochal.protocol.machine import Phase
from epochal.reports.epochs import epochs
from epochal.telemetry.places import HistoryFolder, history_place

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture(params=["folder", "hadoop", "hadoop, at close"])
def place(request, tmp_path):
    if request.param == "folder":
        return HistoryFolder(tmp_path / "history")
    log = HadoopLog(request.getfixturevalue("spark"), f"file://{tmp_path}/log")
    is_store = request.param == "hadoop, at close"
    return replace(history_place(log), publishes_at_close=is_store)


def test_pieces_are_replaced_listed_and_forgotten(place):
    assert (list(place.names()), place.read("a")) == ([], None)
    for content in (b"1", b"22", b"3"):
        place.put("b", content)
    place.put("a", b"")
    assert list(place.names()) == ["a", "b"]
    assert (place.read("a"), place.read("b")) == (b"", b"3")
    place.delete(["a", "never"])
    assert list(place.names()) == ["b"]


def test_nothing_hidden_is_left_behind(place, tmp_path):
    for content in (b"1", b"2"):
        place.put("b", content)
    found = [file.name for file in tmp_path.rglob("*") if file.is_file()]
    assert found == ["b"]


def test_what_spark_wrote_through_hadoop_is_read_from_the_disk(spark, tmp_path):
    log = HadoopLog(spark, f"file://{tmp_path}/chk/epochal/log")
    with Session("shop", sinks=[Memory()], schema=SCHEMA, log=log) as session:
        for _ in range(2):
            session.begin(session.next_epoch)
            session.write([{"id": 1}])
            session.commit()
    report = epochs(open_log(tmp_path / "chk" / "epochal" / "log"))
    assert [(one.epoch, one.read_from) for one in report.epochs] == [(1, "history"), (0, "history")]


def test_a_session_tells_how_long_each_sink_took_to_prepare_and_to_commit(tmp_path):
    sinks = [Memory(name="orders"), Memory(name="audit")]
    with Session("shop", sinks=sinks, schema=SCHEMA, log=tmp_path) as session:
        session.begin(0)
        session.write([{"id": 1}])
        session.commit()
    (one,) = epochs(open_log(tmp_path)).epochs
    for sink in ("orders", "audit"):
        spent = one.sinks[sink]["seconds"]
        assert spent.keys() == {Phase.PREPARING.value, Phase.COMMITTING.value}
        assert all(0 <= s < one.finished_at - one.opened_at + 1 for s in spent.values())
