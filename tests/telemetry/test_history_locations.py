"""Where a history is read from: beside the log, by any driver that wrote it."""

from __future__ import annotations

import pyarrow as pa

from epochal import Memory, Session
from epochal.logs import open_log
from epochal.protocol.machine import Phase
from epochal.reports.epochs import epochs

SCHEMA = pa.schema([("id", pa.int64())])


def test_what_spark_wrote_through_hadoop_is_read_from_the_disk(spark, tmp_path):
    log = open_log(f"hadoop+file://{tmp_path}/chk/epochal/log", spark=spark)
    with Session("shop", sinks=[Memory()], schema=SCHEMA, log=log) as session:
        for _ in range(2):
            session.begin(session.next_epoch)
            session.write([{"id": 1}])
            session.commit()
    report = epochs(open_log(tmp_path / "chk" / "epochal" / "log"))
    assert [(one.epoch, one.read_from) for one in report.epochs] == [(1, "history"), (0, "history")]


def test_a_session_records_how_long_each_sink_took_to_prepare_and_to_commit(tmp_path):
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
