"""The status from the log and its history, without a target."""

from __future__ import annotations

import json
import time

import pytest

from epochal.coordinator import read_state
from epochal.errors import CorruptRecord, Refused
from epochal.reports import VERSION, to_json
from epochal.reports.epochs import epoch_receipts, epochs, export
from epochal.reports.recover import recover
from epochal.reports.status import pipeline_status, status
from epochal.telemetry.health import Health, Liveness
from epochal.telemetry.history import Live, history_of, live_bytes
from epochal.terms import Generation, Limits


def put_heartbeat(shop, *, age_s=0.0, every_s=5.0, generation=1, **more):
    live = Live(
        at=time.time() - age_s,
        every_s=every_s,
        generation=Generation(generation),
        driver=shop.elsewhere,
        **more,
    )
    history_of(shop.log).store.put("live.json", live_bytes(live))


def test_a_stopped_pipeline_is_reported_with_its_last_epoch_and_totals(shop):
    shop.run(epochs=3, rows=2)
    report = pipeline_status(shop.log)
    assert (report.pipeline, report.last_epoch, report.phase) == ("shop", 2, "committed")
    assert (report.health, report.driver.liveness) == (Health.STOPPED, Liveness.STOPPED)
    assert report.unsettled is None
    assert {sink.name: (sink.rows, sink.last_rows) for sink in report.sinks} == {
        "orders": (6, 2),
        "audit": (6, 2),
    }


def test_a_running_driver_is_reported_with_its_phase_and_rates(shop, monkeypatch):
    monkeypatch.setattr("epochal.telemetry.history_writer.FLUSH_EVERY_S", 0.1)
    with shop.session() as session:
        shop.epoch(session)
        session.begin(session.next_epoch)
        deadline_s = time.monotonic() + 120
        while (report := pipeline_status(shop.log)).phase != "preparing":
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert (report.epoch, report.driver.liveness) == (1, Liveness.ALIVE)
        assert report.rows_per_s > 0


def test_a_heartbeat_from_before_the_last_decision_does_not_name_the_epoch(shop):
    shop.run(epochs=3)
    put_heartbeat(shop, epoch=1, phase="preparing", seconds={"preparing": 1.0})
    report = pipeline_status(shop.log)
    assert (report.epoch, report.phase, report.phase_seconds) == (2, "committed", {})
    put_heartbeat(shop, epoch=3, phase="preparing", seconds={"preparing": 1.0})
    report = pipeline_status(shop.log)
    assert (report.epoch, report.phase, report.phase_seconds) == (3, "preparing", {"preparing": 1})


def test_a_decided_epoch_without_a_driver_is_in_doubt_with_its_age(shop):
    driver = shop.die("decided")
    report = pipeline_status(shop.log)
    assert (report.health, report.driver.liveness) == (Health.IN_DOUBT, Liveness.GONE)
    assert report.unsettled.epoch == 0
    assert 0 <= report.unsettled.age_s < 60
    assert [(one.sink, one.rows, one.is_done) for one in report.unsettled.sinks] == [
        ("orders", 2, False),
        ("audit", 2, False),
    ]
    assert driver is not None


@pytest.mark.parametrize(
    ("age_s", "every_s", "expected"),
    [
        (1.0, 5.0, Liveness.ALIVE),
        (29.0, 5.0, Liveness.ALIVE),
        (300.0, 5.0, Liveness.SILENT),
        (1.0, 0.0, Liveness.GONE),
    ],
)
def test_a_driver_on_another_machine_is_judged_by_its_heartbeat(shop, age_s, every_s, expected):
    driver = shop.die("decided", driver=shop.elsewhere)
    assert pipeline_status(shop.log).driver.liveness is Liveness.UNKNOWN
    put_heartbeat(shop, age_s=age_s, every_s=every_s)
    assert pipeline_status(shop.log).driver.liveness is expected
    assert driver is not None


def test_the_heartbeat_of_an_earlier_generation_is_ignored(shop):
    driver = shop.die("decided", driver=shop.elsewhere)
    put_heartbeat(shop, generation=0, every_s=0.0)
    assert pipeline_status(shop.log).driver.liveness is Liveness.UNKNOWN
    history_of(shop.log).store.put("live.json", b"{torn")
    assert pipeline_status(shop.log).driver.liveness is Liveness.UNKNOWN
    assert driver is not None


def test_all_pipelines_below_a_root_are_found_and_a_corrupt_one_hides_none(shop):
    shop.run(epochs=1)
    broken = shop.root / "other" / "epochal" / "log"
    broken.mkdir(parents=True)
    (broken / "00000000000000000001.json").write_bytes(b"not a record")
    (shop.root / "chk" / "offsets").mkdir()
    report = status(str(shop.root))
    assert [one.pipeline for one in report.pipelines] == ["shop"]
    assert [(one.location, one.code) for one in report.unreadable] == [
        (str(broken), CorruptRecord.code)
    ]
    assert "nothing was overwritten" in report.unreadable[0].hint


def test_a_folder_without_a_log_is_refused_with_a_hint(tmp_path):
    with pytest.raises(Refused, match="holds no epoch log") as caught:
        status(str(tmp_path))
    assert "started with epochal before" in caught.value.hint


def test_a_report_as_json_has_its_name_and_version(shop):
    shop.run(epochs=1)
    report = json.loads(json.dumps(to_json(status(str(shop.root)))))
    assert (report["report"], report["version"]) == ("status", VERSION)
    assert report["pipelines"][0]["driver"]["liveness"] == "stopped"


def test_a_thousand_pipelines_are_reported_within_seconds(shop):
    shop.run(epochs=1)
    record = next((shop.root / "chk" / "epochal" / "log").glob("*.json")).read_bytes()
    many = shop.root / "many"
    for at in range(1000):
        folder = many / f"p{at:04d}" / "epochal" / "log"
        folder.mkdir(parents=True)
        (folder / "00000000000000000001.json").write_bytes(record)
    began_s = time.process_time()
    assert len(status(str(many)).pipelines) == 1000
    assert time.process_time() - began_s < 5


def test_receipts_beside_the_log_are_reported_as_those_inside_it(shop):
    shop.limits = Limits(receipts_inline_bytes=0)
    driver = shop.die("decided")
    assert len(shop.log.list_names()) == 2
    waiting = pipeline_status(shop.log).unsettled.sinks
    assert [(one.sink, one.receipts, one.rows) for one in waiting] == [
        ("orders", 1, 2),
        ("audit", 1, 2),
    ]
    newest = export(shop.log).records[-1]["state"]["unsettled"]["receipts"]
    assert [len(some) for some in newest.values()] == [1, 1]
    assert epoch_receipts(shop.log, 0).keys() == {"orders", "audit"}
    recover(shop.opened)
    assert shop.orders.rows().num_rows == 2
    assert read_state(shop.log).unsettled is None
    assert shop.log.list_names() == []
    assert [one.rows for one in epochs(shop.log).epochs] == [4]
    assert epoch_receipts(shop.log, 0) == {}
    assert driver is not None


def test_the_status_reads_no_list(shop, monkeypatch):
    shop.limits = Limits(receipts_inline_bytes=0)
    driver = shop.die("decided")
    monkeypatch.setattr("epochal.logs.StoredLog.read_list", lambda *_: pytest.fail("a list"))
    assert pipeline_status(shop.log).unsettled.epoch == 0
    assert driver is not None
