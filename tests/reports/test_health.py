"""
The health of a pipeline in every situation that a person on call meets: the command, the metrics of
driver and console, and the alerts that Prometheus derives from them say the same.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from reports.conftest import SCHEMA
from servers.postgres import running_server
from servers.programs import fetched, unpack
from typer.testing import CliRunner

from epochal import Limits, Postgres, Session
from epochal.cli import application
from epochal.coordinator import Environment
from epochal.errors import OutcomeUnknown, PreparedLost, TryAgain, Unsettled
from epochal.protocol.state import GivenUp
from epochal.reports import resolve
from epochal.reports.metrics_export import prometheus_text
from epochal.reports.status import status
from epochal.sinks.memory.sink import MemoryCommitter
from epochal.telemetry import exporters
from epochal.telemetry.health import MEANINGS, Health
from epochal.telemetry.prometheus import PrometheusMeters

PATIENT = Limits(commit_retry_max_s=300.0, retry_backoff_ms=(20,))
HASTY = Limits(commit_retry_max_s=0.0, commit_timeout_s=5.0, retry_backoff_ms=(1,))
REFUSED = "connection to 127.0.0.1:5432 failed: connection refused"


@pytest.fixture(autouse=True)
def beating_often(monkeypatch):
    monkeypatch.setattr("epochal.telemetry.history_writer.FLUSH_EVERY_S", 0.1)


@pytest.fixture
def meters(monkeypatch):
    """What Prometheus would scrape from the driver."""
    registry = CollectorRegistry()
    monkeypatch.setattr(exporters, "_meters", [PrometheusMeters(registry)])
    return registry


def health_in(text: bytes) -> dict[str, str]:
    families = text_string_to_metric_families(text.decode())
    return {
        sample.labels["pipeline"]: sample.labels["health"]
        for family in families
        for sample in family.samples
        if sample.name == "epochal_health" and sample.value == 1
    }


def seen(shop, *, until: Health):
    """The status, once it shows this health: a heartbeat may take a moment."""
    deadline_s = time.monotonic() + 60
    while True:
        report = status(str(shop.root))
        (one,) = report.pipelines
        if one.health is until:
            return report, one
        assert time.monotonic() < deadline_s, (one.health, one.because)
        time.sleep(0.05)


def agreed(shop, expected: Health, cause: str):
    """All who report the health of a pipeline agree, and the first line names the cause."""
    report, one = seen(shop, until=expected)
    assert re.search(cause, one.because), one.because
    assert health_in(prometheus_text(report)) == {"shop": expected.value}
    ran = CliRunner().invoke(application(), ["status", str(shop.root)])
    assert ran.exit_code == MEANINGS[expected].exit_code, ran.output
    assert expected.value in ran.stdout
    if ran.exit_code:
        first = ran.stderr.splitlines()[0]
        assert re.search(cause, first), first
        assert one.blocks in ran.stderr
    return one


def breaking(sink, monkeypatch, error):
    """Let every commit of a sink fail while the list holds the error."""
    failing = [error]
    real = MemoryCommitter.commit

    def commit(self, epoch, receipts):
        if failing and self._identity.sink == sink.name:
            raise failing[0]
        real(self, epoch, receipts)

    monkeypatch.setattr(MemoryCommitter, "commit", commit)
    return failing


def test_a_driver_between_two_epochs_is_ok_and_in_one_it_is_working(shop, meters):
    with shop.session() as session:
        shop.epoch(session)
        agreed(shop, Health.OK, "pid")
        assert health_in(generate_latest(meters)) == {"shop": "ok"}
        session.begin(1)
        agreed(shop, Health.WORKING, "epoch 1, preparing")
        assert health_in(generate_latest(meters)) == {"shop": "working"}
        session.abort()
    agreed(shop, Health.STOPPED, "stopped cleanly")


def test_a_target_that_goes_away_after_the_decision_is_retried_then_in_doubt(
    shop, meters, monkeypatch
):
    failing = breaking(shop.orders, monkeypatch, TryAgain(REFUSED, "start the server"))
    session = shop.session(limits=replace(PATIENT, commit_retry_max_s=60.0))
    ended = threading.Thread(target=lambda: shop.epoch(session), daemon=True)
    ended.start()
    one = agreed(shop, Health.RETRYING, f"sink orders: {REFUSED} .try-again.; epoch 0 is decided")
    (retry,) = one.retrying
    assert (retry.sink, retry.code, retry.hint) == ("orders", "try-again", "start the server")
    assert 0 < retry.gives_up_at - time.time() <= 60
    assert health_in(generate_latest(meters)) == {"shop": "retrying"}
    failing.clear()
    ended.join(60)
    agreed(shop, Health.OK, "pid")
    failing.append(TryAgain(REFUSED))
    session._coordinator._limits = HASTY  # or the test would wait until the driver gives up
    with pytest.raises(Unsettled, match="refused"):
        shop.epoch(session)
    agreed(shop, Health.IN_DOUBT, REFUSED)
    assert health_in(generate_latest(meters)) == {"shop": "in doubt"}
    session.close()
    agreed(shop, Health.IN_DOUBT, REFUSED)


def test_a_database_that_dies_after_the_decision_is_named_with_its_answer(tmp_path):
    def die(step, _epoch):
        if step == "decided":
            server.kill()

    with running_server() as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE TABLE t (id bigint)")
        sink = Postgres(server.url(), table="t", name="orders", connect_timeout_s=60)
        session = Session(
            "shop",
            sinks=[sink],
            schema=SCHEMA,
            log=tmp_path / "log",
            limits=PATIENT,
            environment=Environment(on_step=die),
        )
        with session:
            session.begin(0)
            session.write([{"id": 1}])
            committing = threading.Thread(target=session.commit, daemon=True)
            committing.start()
            shop = SimpleNamespace(root=tmp_path)
            # Long before the driver would have waited for a connection in vain.
            agreed(shop, Health.RETRYING, f"sink orders: .*{server.port}.* refused")
            server.start()
            committing.join(120)
            with psycopg.connect(server.url()) as connection:
                assert connection.execute("SELECT id FROM t").fetchall() == [(1,)]
            agreed(shop, Health.OK, "pid")


def test_a_target_that_never_answers_is_retrying_after_half_a_minute(shop, monkeypatch):
    hung = threading.Event()
    monkeypatch.setattr("epochal.telemetry.health.ANSWER_MAX_S", 0.3)
    monkeypatch.setattr(
        "epochal.sinks.memory.sink.MemoryCommitter.commit", lambda *_: hung.wait(60)
    )
    session = shop.session()
    ended = threading.Thread(target=lambda: shop.epoch(session), daemon=True)
    ended.start()
    agreed(shop, Health.RETRYING, "not committed on orders, audit: no answer for")
    hung.set()
    ended.join(60)
    session.close()


def test_a_target_that_is_down_before_the_decision_ends_the_driver_with_its_answer(
    shop, monkeypatch
):
    def refuse(*_):
        raise TryAgain(REFUSED, "start the server")

    session = shop.session()
    monkeypatch.setattr("epochal.sinks.memory.sink.MemoryCommitter.begin", refuse)
    with session, pytest.raises(TryAgain):
        shop.epoch(session)
    one = agreed(shop, Health.GONE, REFUSED)
    assert one.trouble["hint"] == "start the server"


def test_a_driver_killed_while_idle_is_gone_and_one_killed_at_work_leaves_doubt(shop):
    idle = shop.session(driver=shop.dead)
    shop.epoch(idle)
    deadline_s = time.monotonic() + 60
    while status(str(shop.root)).pipelines[0].phase != "committed":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    agreed(shop, Health.GONE, "no such process")
    busy = shop.die("decided")
    agreed(shop, Health.IN_DOUBT, "epoch 1 is decided and not committed on orders, audit")
    assert busy is not None


def test_rows_that_a_target_threw_away_are_lost_until_they_are_written_again(shop, monkeypatch):
    def lose(_self, _epoch, receipts):
        raise PreparedLost("thrown away", handles=tuple(str(one.handle) for one in receipts))

    with monkeypatch.context() as broken:
        broken.setattr("epochal.sinks.memory.sink.MemoryCommitter.commit", lose)
        session = shop.session(limits=HASTY)
        with session, pytest.raises(Unsettled):
            shop.epoch(session)
    agreed(shop, Health.LOST, "epoch 0 is decided, and orders, audit threw its prepared rows away")


def test_what_a_person_settled_is_no_longer_shown_as_doubt(shop, monkeypatch):
    breaking(shop.orders, monkeypatch, OutcomeUnknown(REFUSED))
    session = shop.session(limits=HASTY)
    with session, pytest.raises(Unsettled):
        shop.epoch(session)
    agreed(shop, Health.IN_DOUBT, REFUSED)
    given_up = GivenUp(epoch=0, sink="orders", kept_at="backup", by="me", because="burned down")
    resolve.give_up(shop.log_alone, given_up, dry_run=False)
    assert seen(shop, until=Health.GONE)


def test_a_copied_checkpoint_is_shown_as_a_copy_of_its_original(shop):
    shop.run(epochs=1)
    # A log that is bound to its checkpoint lies beside Spark's own files.
    (shop.root / "chk" / "metadata").write_text("{}")
    shutil.copytree(shop.root / "chk", shop.root / "copied")
    shutil.rmtree(shop.root / "chk")
    agreed(shop, Health.COPY, f"bound to {shop.root}/chk")


def test_a_log_that_cannot_be_read_is_an_error_with_its_reason(shop):
    shop.run(epochs=1)
    newest = max((shop.root / "chk" / "epochal" / "log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:40])
    report = status(str(shop.root))
    text = prometheus_text(report).decode()
    assert f'epochal_unreadable_logs{{location="{shop.log_path}"}} 1.0' in text
    ran = CliRunner().invoke(application(), ["status", str(shop.root)])
    assert ran.exit_code == MEANINGS[Health.UNREADABLE].exit_code
    assert "corrupt-record" in ran.stderr


# The alerts, by Prometheus itself


def promtool() -> str:
    """Of Debian's package, which is not installed: an installation would start a server."""
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    home = fetched(
        "prometheus", lambda home: unpack("prometheus", suite, home / "root"), lock="prometheus"
    )
    return str(home / "root" / "usr" / "bin" / "promtool")


def health_series(present: str) -> list[dict]:
    return [
        {"series": f'epochal_health{{pipeline="p",health="{one.value}"}}', "values": value}
        for one in Health
        for value in ["1x40" if one.value == present else "0x40"]
    ]


def expected_alert(rules: dict, name: str, labels: dict) -> dict:
    rule = rules[name]

    def filled(text: str) -> str:
        return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)

    return {
        "exp_labels": {**rule["labels"], **labels},
        "exp_annotations": {key: filled(text) for key, text in rule["annotations"].items()},
    }


def test_each_health_fires_its_alert_within_a_minute_and_no_other(tmp_path):
    shipped = files("epochal.telemetry").joinpath("alerts.yaml").read_text(encoding="utf-8")
    rules = {one["alert"]: one for one in yaml.safe_load(shipped)["groups"][0]["rules"]}
    scenes = []
    for health, meaning in MEANINGS.items():
        if health is Health.UNREADABLE:
            series = [{"series": 'epochal_unreadable_logs{location="/chk"}', "values": "1x40"}]
            labels = {"location": "/chk"}
        else:
            series, labels = health_series(health.value), {"pipeline": "p"}
        scenes.append(
            {
                "interval": "15s",
                "input_series": series,
                "alert_rule_test": [
                    {
                        "eval_time": "1m",
                        "alertname": name,
                        "exp_alerts": [expected_alert(rules, name, labels)]
                        if name == meaning.alert
                        else [],
                    }
                    for name in rules
                ],
            }
        )
    counted = {
        "EpochalFenced": 'epochal_errors_total{pipeline="p",code="fenced"}',
        "EpochalGateRefused": 'epochal_errors_total{pipeline="p",code="gate-refused"}',
        "EpochalBackpressure": 'epochal_errors_total{pipeline="p",code="backpressure"}',
        "EpochalRowsRejected": 'epochal_rejected_rows_total{pipeline="p",sink="s"}',
    }
    for alert, counter in counted.items():
        labels = {"pipeline": "p", "sink": "s"} if "sink" in counter else {"pipeline": "p"}
        scenes.append(
            {
                "interval": "15s",
                "input_series": [{"series": counter, "values": "0 0 1 1 1 1"}],
                "alert_rule_test": [
                    {
                        "eval_time": "1m",
                        "alertname": name,
                        "exp_alerts": [expected_alert(rules, name, labels)]
                        if name == alert
                        else [],
                    }
                    for name in rules
                ],
            }
        )
    for staged, is_nearly_full in ((80, False), (81, True)):
        labels = {"pipeline": "p", "sink": "s"}
        name = "EpochalStagingNearlyFull"
        scenes.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": f'{metric}{{pipeline="p",sink="s"}}', "values": f"{value}x40"}
                    for metric, value in {
                        "epochal_staging_bytes": staged,
                        "epochal_staging_bytes_max": 100,
                    }.items()
                ],
                "alert_rule_test": [
                    {
                        "eval_time": "11m",
                        "alertname": name,
                        "exp_alerts": [expected_alert(rules, name, labels)]
                        if is_nearly_full
                        else [],
                    }
                ],
            }
        )
    (tmp_path / "alerts.yaml").write_text(shipped)
    test_file = {"rule_files": ["alerts.yaml"], "evaluation_interval": "15s", "tests": scenes}
    (tmp_path / "scenes.yaml").write_text(yaml.safe_dump(test_file))
    ran = run_promtool(tmp_path, "scenes.yaml")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # Negative control: without the rule for lost rows, the scene of lost rows fails.
    (tmp_path / "alerts.yaml").write_text(shipped.replace('health="lost"', 'health="nothing"'))
    assert run_promtool(tmp_path, "scenes.yaml").returncode != 0


def run_promtool(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    command = [promtool(), "test", "rules", name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
