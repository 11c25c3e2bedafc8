"""
The health of a pipeline in every situation that a person on call meets: the command, the console,
the metrics of driver and console, and the alerts that Prometheus derives from them say the same.
"""

from __future__ import annotations

import errno
import html
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
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
from starlette.testclient import TestClient
from typer.testing import CliRunner

from epochal import Limits, Memory, Postgres, Session
from epochal.cli import application
from epochal.console.app import console
from epochal.coordinator import Environment
from epochal.coordinator.targets import identity_of
from epochal.errors import (
    EpochalError,
    Fenced,
    GateRefused,
    OutcomeUnknown,
    PreparedLost,
    RowRejected,
    TryAgain,
    Unsettled,
    WentBack,
)
from epochal.protocol.state import GivenUp
from epochal.reports import resolve
from epochal.reports.doctor import diagnose
from epochal.reports.metrics_export import prometheus_text
from epochal.reports.status import require_record, status
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


def seen(shop, *, until: Health, cause: str = ""):
    """The status, once it shows this health and its cause: a heartbeat may take a moment."""
    deadline_s = time.monotonic() + 60
    while True:
        (one,) = status(str(shop.root)).pipelines
        if one.health is until and re.search(cause, one.because):
            return one
        assert time.monotonic() < deadline_s, (one.health, one.because)
        time.sleep(0.05)


def agreed(shop, expected: Health, cause: str, driver: CollectorRegistry | None = None):
    """
    All who report the health of a pipeline agree, the first line names the cause, and of all alerts
    only the one for it fires, within a minute. `driver`: what the driver itself exports.
    """
    one = seen(shop, until=expected, cause=cause)
    ran = CliRunner().invoke(application(), ["status", str(shop.root)])
    assert ran.exit_code == MEANINGS[expected].exit_code, ran.output
    assert expected.value in ran.stdout
    if ran.exit_code:
        first = ran.stderr.splitlines()[0]
        assert re.search(cause, first), first
        assert one.blocks in ran.stderr
    page, scraped = on_console(shop)
    assert re.search(rf"<h1>shop\s.*{expected.value}", page)
    assert re.search(cause, page)
    for text in [scraped] if driver is None else [scraped, generate_latest(driver)]:
        assert health_in(text) == {"shop": expected.value}
        assert_fires(MEANINGS[expected].alert, {"pipeline": "shop"}, text)
    return one


def on_console(shop) -> tuple[str, bytes]:
    """The page of the pipeline, and what Prometheus scrapes there."""
    with TestClient(console(str(shop.root), hosts=("testserver",))) as browser:
        (key,) = re.findall(r'href="/pipelines/(\w+)"', browser.get("/").text)
        page = html.unescape(browser.get(f"/pipelines/{key}").text)
        return page, browser.get("/metrics").content


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
        agreed(shop, Health.OK, "pid", meters)
        session.begin(1)
        agreed(shop, Health.WORKING, "epoch 1, preparing", meters)
        session.abort()
    agreed(shop, Health.STOPPED, "stopped cleanly")


def test_a_target_that_goes_away_after_the_decision_is_retried_then_in_doubt(
    shop, meters, monkeypatch
):
    failing = breaking(shop.orders, monkeypatch, TryAgain(REFUSED, "start the server"))
    session = shop.session(limits=replace(PATIENT, commit_retry_max_s=60.0))
    ended = threading.Thread(target=lambda: shop.epoch(session), daemon=True)
    ended.start()
    cause = f"sink orders: {REFUSED} .try-again.; epoch 0 is decided"
    one = agreed(shop, Health.RETRYING, cause, meters)
    (retry,) = one.retrying
    assert (retry.sink, retry.code, retry.hint) == ("orders", "try-again", "start the server")
    assert 0 < retry.gives_up_at - time.time() <= 60
    failing.clear()
    ended.join(60)
    agreed(shop, Health.OK, "pid", meters)
    failing.append(TryAgain(REFUSED))
    session._coordinator._limits = HASTY  # or the test would wait until the driver gives up
    with pytest.raises(Unsettled, match="refused"):
        shop.epoch(session)
    agreed(shop, Health.IN_DOUBT, REFUSED, meters)
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


def test_a_target_that_went_back_in_time_is_lost_until_somebody_accepts_it(shop):
    shop.run(epochs=3)
    state = require_record(shop.log).record.state
    shop.orders._reference.store().forget(identity_of(state, shop.orders.name))
    with pytest.raises(WentBack):
        shop.session()
    agreed(shop, Health.LOST, "'orders' proves no epoch, and epoch 2 was committed there")
    (problem,) = diagnose(shop.opened).problems
    assert problem.startswith("orders: the target went back in time; missing there: epochs 0 to 2")
    resolve.accept(shop.opened, sink="orders", by="me", because="a test system", dry_run=False)
    assert seen(shop, until=Health.STOPPED)
    with shop.session() as session:
        agreed(shop, Health.OK, "pid")
        shop.epoch(session)
    assert shop.orders.rows().num_rows == 8


def test_a_fenced_driver_is_an_alert_and_the_newer_one_is_well(shop, meters, monkeypatch):
    old = shop.session()
    shop.epoch(old)
    before = generate_latest(meters)
    monkeypatch.setattr(exporters, "_meters", [])  # those of a process of its own
    with shop.session() as new:
        shop.epoch(new)
        with pytest.raises(Fenced):
            shop.epoch(old)
        fenced = {"EpochalFenced": {"pipeline": "shop"}}
        assert_fire(fenced, before, generate_latest(meters))
        old.close()
        agreed(shop, Health.OK, "pid")
        shop.epoch(new)
    assert shop.orders.rows().num_rows == 6


@pytest.fixture
def colours(shop, postgres):
    """A table that takes no row with an odd number, in the place of a sink."""
    with postgres.connect() as connection:
        connection.execute("DROP TABLE IF EXISTS colours")
        connection.execute("CREATE TABLE colours (id bigint CHECK (id % 2 = 0))")
    options = {"table": "colours", "name": "orders", "meta_schema": f"m{shop.root.name}"[:30]}
    return lambda **more: Postgres(postgres.url, **options, **more)


def test_rows_that_a_target_rejects_end_the_driver_with_the_row(shop, meters, colours):
    shop.orders = colours()
    with shop.session() as session, pytest.raises(RowRejected):
        shop.epoch(session)
    agreed(shop, Health.GONE, r"colours_id_check.*row-rejected")


def test_rows_that_a_target_rejects_and_another_takes_are_an_alert(shop, meters, colours):
    bad = Memory(name="bad")
    shop.orders = colours(on_reject=bad)
    with shop.session() as session:
        before = generate_latest(meters)
        shop.epoch(session)
        agreed(shop, Health.OK, "pid", meters)
        rejected = {"EpochalRowsRejected": {"pipeline": "shop", "sink": "bad"}}
        assert_fire(rejected, before, generate_latest(meters))
    assert bad.rows().num_rows == 1


def test_an_epoch_that_a_gate_refuses_is_an_alert_with_its_reason(shop, meters):
    session = shop.session(gates=[lambda _: "fewer rows than yesterday"])
    before = generate_latest(meters)
    with session, pytest.raises(GateRefused):
        shop.epoch(session)
    refused = {"EpochalGateRefused": {"pipeline": "shop"}}
    assert_fire(refused, before, generate_latest(meters))
    agreed(shop, Health.GONE, "fewer rows than yesterday .gate-refused.")


def test_a_full_disk_under_the_log_ends_the_driver_with_its_name(shop, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_):
        raise full

    session = shop.session(limits=Limits(decide_retry_max_s=0.1, retry_backoff_ms=(1,)))
    with monkeypatch.context() as broken:
        broken.setattr(os, "link", refuse)
        with pytest.raises(EpochalError):
            shop.epoch(session)
    session.close()
    agreed(shop, Health.GONE, "No space left on device")
    assert shop.orders.rows().num_rows == 0


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
    text = prometheus_text(report)
    assert f'epochal_unreadable_logs{{location="{shop.log_path}"}} 1.0' in text.decode()
    assert_fire({"EpochalLogUnreadable": {"location": shop.log_path}}, text)
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


BEFORE_S = 7200
"""How long nothing was scraped before a scene: rules look back up to an hour."""
_EVERY_S = 15


def series_of(rules: str, scrapes: Sequence[bytes]) -> list[dict[str, str]]:
    """What Prometheus has stored after these scrapes, the last of which is repeated."""
    stored: dict[str, list[str]] = {}
    shift_s = BEFORE_S - time.time()
    for number, text in enumerate(scrapes):
        families = text_string_to_metric_families(text.decode())
        for sample in (one for family in families for one in family.samples):
            if re.search(rf"\b{sample.name}\b", rules) is None:
                continue
            labels = ",".join(f"{name}={json.dumps(text)}" for name, text in sample.labels.items())
            is_date = sample.name.endswith("_timestamp_seconds") and sample.value > 0
            values = stored.setdefault(f"{sample.name}{{{labels}}}", ["_"] * len(scrapes))
            values[number] = f"{sample.value + (shift_s if is_date else 0.0):.3f}"
    missing = f"_x{BEFORE_S // _EVERY_S}"
    return [
        {"series": name, "values": f"{missing} {' '.join(values)} {values[-1]}x60"}
        for name, values in stored.items()
    ]


def assert_fires(alert: str, labels: Mapping[str, str], *scrapes: bytes) -> None:
    assert_fire({alert: labels} if alert else {}, *scrapes)


def assert_fire(
    alerts: Mapping[str, Mapping[str, str]], *scrapes: bytes, after_s: int = 60
) -> None:
    """A minute after the last of these scrapes these alerts fire, and no other."""
    shipped = files("epochal.telemetry").joinpath("alerts.yaml").read_text(encoding="utf-8")
    rules = {one["alert"]: one for one in yaml.safe_load(shipped)["groups"][0]["rules"]}
    looked_at_s = BEFORE_S + _EVERY_S * len(scrapes) + after_s
    scene = {
        "interval": f"{_EVERY_S}s",
        "input_series": series_of(shipped, scrapes),
        "alert_rule_test": [
            {
                "eval_time": f"{looked_at_s}s",
                "alertname": name,
                "exp_alerts": [expected_alert(rules, name, alerts[name])] if name in alerts else [],
            }
            for name in rules
        ],
    }
    judged(shipped, [scene])


def judged(rules: str, scenes: Sequence[Mapping[str, object]]) -> None:
    with tempfile.TemporaryDirectory(prefix="epochal-alerts-") as folder:
        (Path(folder) / "alerts.yaml").write_text(rules)
        tests = {"rule_files": ["alerts.yaml"], "evaluation_interval": "15s", "tests": [*scenes]}
        (Path(folder) / "scenes.yaml").write_text(yaml.safe_dump(tests))
        ran = subprocess.run(
            [promtool(), "test", "rules", "scenes.yaml"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def expected_alert(rules: dict, name: str, labels: dict) -> dict:
    rule = rules[name]

    def filled(text: str) -> str:
        return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)

    return {
        "exp_labels": {**rule["labels"], **labels},
        "exp_annotations": {key: filled(text) for key, text in rule["annotations"].items()},
    }


def test_an_alert_that_is_missing_is_noticed(shop, monkeypatch):
    text = (
        b'epochal_health{pipeline="p",health="lost"} 1\nepochal_unreadable_logs{location="/c"} 1\n'
    )
    lost = {"EpochalRowsLost": {"pipeline": "p"}, "EpochalLogUnreadable": {"location": "/c"}}
    assert_fire(lost, text)
    with pytest.raises(AssertionError, match="EpochalRowsLost"):
        assert_fire({"EpochalLogUnreadable": {"location": "/c"}}, text)
    with pytest.raises(AssertionError, match="EpochalFenced"):
        assert_fire({**lost, "EpochalFenced": {"pipeline": "p"}}, text)


def test_backpressure_is_an_alert():
    counter = 'epochal_errors_total{{pipeline="p",code="backpressure"}} {}\n'
    scrapes = [counter.format(value).encode() for value in (0, 1)]
    assert_fire({"EpochalBackpressure": {"pipeline": "p"}}, *scrapes)


@pytest.mark.parametrize(("staged", "is_nearly_full"), [(80, False), (81, True)])
def test_staging_tables_that_are_nearly_full_are_an_alert(staged, is_nearly_full):
    sizes = {"epochal_staging_bytes": staged, "epochal_staging_bytes_max": 100}
    text = "".join(f'{name}{{pipeline="p",sink="s"}} {size}\n' for name, size in sizes.items())
    full = {"EpochalStagingNearlyFull": {"pipeline": "p", "sink": "s"}}
    assert_fire(full if is_nearly_full else {}, text.encode(), after_s=660)


def test_every_query_of_the_dashboard_is_one_that_prometheus_takes(tmp_path):
    """As recording rules, which Prometheus parses; Grafana puts in the variables."""
    dashboard = json.loads(
        files("epochal.telemetry").joinpath("grafana.json").read_text(encoding="utf-8")
    )
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries)
    ]
    assert len(rules) > 10
    assert check_rules(tmp_path, rules) == ""
    broken = {"record": "panel:broken", "expr": "sum by pipeline (epochal_health"}
    assert "parse error" in check_rules(tmp_path, [*rules, broken])


def check_rules(folder: Path, rules: Sequence[Mapping[str, str]]) -> str:
    """What promtool objects to."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]}))
    ran = subprocess.run(
        [promtool(), "check", "rules", "rules.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout + ran.stderr if ran.returncode else ""
