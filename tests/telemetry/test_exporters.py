"""Metrics under stable names, scraped and by OTLP; the dashboard and the alerts use only these."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from epochal import Memory, Misconfigured, Pipeline, Session
from epochal.reports.metrics_export import prometheus_text
from epochal.reports.status import status
from epochal.telemetry import exporters, push_otlp, serve_metrics
from epochal.telemetry.health import MEANINGS
from epochal.telemetry.instruments import INSTRUMENTS, Kind

SCHEMA = pa.schema([("id", pa.int64())])
NAMED = re.compile(r"\bepochal_\w+")


@pytest.fixture(autouse=True)
def switched_off_again(monkeypatch):
    monkeypatch.setattr(exporters, "_meters", [])
    monkeypatch.setattr(exporters, "_tracing", [])


def scraped(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value_of(found, name, **labels):
    return found.get((name, tuple(sorted(labels.items()))))


def session(tmp_path, name, **more):
    return Session(
        name,
        sinks=[Memory(name="orders")],
        schema=SCHEMA,
        log=str(tmp_path / name),
        **more,
    )


def epoch(session, rows=3):
    session.begin(session.next_epoch)
    session.write([{"id": n} for n in range(rows)])
    session.commit()


def test_a_driver_is_scraped_under_the_fixed_names(tmp_path):
    port = serve_metrics(0)
    with session(tmp_path, "scraped") as running:
        epoch(running)
        running.begin(1)
        found = scraped(port)
        assert value_of(found, "epochal_generation", pipeline="scraped") == 1
        assert value_of(found, "epochal_decided_unsettled", pipeline="scraped") == 0
        assert value_of(found, "epochal_last_epoch", pipeline="scraped") == 1
        assert value_of(found, "epochal_in_doubt", pipeline="scraped", sink="orders") == 0
        running.abort()
    found = scraped(port)
    counted = {
        outcome: value_of(found, "epochal_epochs_total", pipeline="scraped", outcome=outcome)
        for outcome in ("committed", "aborted", "failed")
    }
    assert counted == {"committed": 1, "aborted": 1, "failed": 0}
    assert value_of(found, "epochal_rows_total", pipeline="scraped", sink="orders") == 3
    committing = {"pipeline": "scraped", "sink": "orders", "phase": "committing"}
    assert value_of(found, "epochal_phase_seconds_count", **committing) == 1
    assert value_of(found, "epochal_generation", pipeline="scraped") is None


def test_a_load_beside_a_driver_of_the_same_name_leaves_its_gauges(tmp_path):
    port = serve_metrics(0)
    with session(tmp_path, "beside") as running:
        epoch(running)
        again = session(tmp_path / "load", "beside")
        again.close()
        found = scraped(port)
        assert value_of(found, "epochal_last_epoch", pipeline="beside") == 0
        assert value_of(found, "epochal_health", pipeline="beside", health="ok") == 1
    assert value_of(scraped(port), "epochal_last_epoch", pipeline="beside") is None


def test_no_label_holds_an_epoch():
    assert not [name for name, one in INSTRUMENTS.items() if "epoch" in one.labels]


def test_errors_are_counted_by_their_code(tmp_path):
    port = serve_metrics(0)
    running = session(tmp_path, "refused", gates=[lambda _: "not today"])
    with running, pytest.raises(Misconfigured, match="not today"):
        epoch(running)
    found = scraped(port)
    assert value_of(found, "epochal_errors_total", pipeline="refused", code="gate-refused") == 1


def test_a_port_that_is_taken_is_refused_with_a_hint():
    taken = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    with pytest.raises(Misconfigured, match="can't be served") as caught:
        serve_metrics(taken.server_port)
    taken.server_close()
    assert "give each driver its own" in caught.value.hint


def test_a_pipeline_takes_the_port_as_an_option():
    assert Pipeline("p", sinks=[Memory()], metrics_port=0)._metrics_port == 0


class Collector(ThreadingHTTPServer):
    """The requests that an OpenTelemetry collector receives over HTTP."""

    def __init__(self):
        self.taken: dict[str, list[bytes]] = {}
        super().__init__(("127.0.0.1", 0), _Taking)

    def metrics(self) -> set[str]:
        return {
            metric.name
            for body in self.taken.get("/v1/metrics", [])
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def services(self) -> set[str]:
        return {
            attribute.value.string_value
            for path, kind in (
                ("/v1/metrics", ExportMetricsServiceRequest),
                ("/v1/traces", ExportTraceServiceRequest),
            )
            for body in self.taken[path]
            for resource in getattr(
                kind.FromString(body),
                f"resource_{path.rpartition('/')[2].replace('traces', 'spans')}",
            )
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }

    def spans(self) -> list:
        return [
            span
            for body in self.taken.get("/v1/traces", [])
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self):
        import gzip

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.taken.setdefault(self.path, []).append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Silent."""


@pytest.fixture
def collector():
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_metrics_and_spans_are_pushed_by_otlp(tmp_path, collector):
    push = push_otlp(f"http://127.0.0.1:{collector.server_port}", every_s=600)
    with session(tmp_path, "pushed") as running:
        epoch(running)
        push._meters.force_flush()
    push.close()
    assert {"epochal_epochs_total", "epochal_rows_total", "epochal_generation"} <= (
        collector.metrics()
    )
    spans = {span.name: span for span in collector.spans()}
    whole = spans["epochal epoch"]
    assert {"epochal preparing", "epochal committing"} <= set(spans)
    assert spans["epochal preparing"].parent_span_id == whole.span_id
    assert whole.start_time_unix_nano <= spans["epochal committing"].start_time_unix_nano
    attributes = {one.key: one.value for one in whole.attributes}
    assert attributes["epochal.rows"].int_value == 3
    assert collector.services() == {"epochal"}


def test_a_missing_package_is_reported_with_a_hint(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "epochal.telemetry.prometheus", None)
    monkeypatch.delitem(sys.modules, "epochal.telemetry.prometheus")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(Misconfigured, match="not installed") as caught:
        serve_metrics(0)
    assert caught.value.hint == 'pip install "epochal[metrics]"'


def every_series() -> set[str]:
    """The names of the series in Prometheus."""
    names = set(INSTRUMENTS)
    for name, one in INSTRUMENTS.items():
        if one.kind is Kind.HISTOGRAM:
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return names


def shipped(name: str) -> str:
    return files("epochal.telemetry").joinpath(name).read_text(encoding="utf-8")


def test_the_dashboard_uses_exactly_the_exported_metrics():
    dashboard = json.loads(shipped("grafana.json"))
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    named = set(NAMED.findall(asked))
    assert named <= every_series()
    assert {name.removesuffix("_bucket") for name in named} == set(INSTRUMENTS)


def test_alert_rules_use_only_exported_metrics_and_labels():
    (group,) = yaml.safe_load(shipped("alerts.yaml"))["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"]}
    assert {one.alert for one in MEANINGS.values() if one.alert} <= set(alerts)
    pages = Path(__file__).parents[2] / "docs"
    for rule in alerts.values():
        named = set(NAMED.findall(rule["expr"]))
        assert named
        assert named <= every_series()
        labels = {label for name in named for label in INSTRUMENTS[name].labels}
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= labels
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        text = (pages / page).with_suffix(".md").read_text(encoding="utf-8")
        assert not anchor or f"## {anchor.replace('-', ' ')}\n" in text.lower()


def test_the_console_exports_the_same_names_for_drivers_that_are_gone(tmp_path):
    for key in ("chk/a", "chk/b"):
        with session(tmp_path, key) as running:
            epoch(running)
    families = text_string_to_metric_families(prometheus_text(status(str(tmp_path))).decode())
    found = {family.name for family in families}
    assert {name.removesuffix("_total") for name in found} <= {
        name.removesuffix("_total") for name in INSTRUMENTS
    }
    assert "epochal_decided_unsettled" in found
