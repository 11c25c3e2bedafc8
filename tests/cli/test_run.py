"""What `epochal run` makes of a file, beyond its stream."""

from __future__ import annotations

import pytest

from epochal.assembly.pipelines import file_at, pipeline_of
from epochal.cli import run
from epochal.config.file import MetricsPart

FILE = """\
pipeline: orders
checkpoint: /chk
source: {format: rate}
sinks: {kind: memory}
metrics: {port: 9464, host: 0.0.0.0}
"""


class Push:
    is_open = True

    def close(self) -> None:
        self.is_open = False


def test_metrics_are_served_where_the_file_says(tmp_path):
    file = tmp_path / "orders.yaml"
    file.write_text(FILE)
    pipeline = pipeline_of(file_at(file))
    assert (pipeline._metrics_port, pipeline._metrics_host) == (9464, "0.0.0.0")


def test_metrics_are_pushed_until_the_run_ends(monkeypatch):
    push = Push()
    monkeypatch.setattr(run, "push_otlp", lambda: push)
    with run._pushing(MetricsPart(otlp=True)):
        assert push.is_open
    assert not push.is_open


def test_nothing_is_pushed_unless_the_file_says_so(monkeypatch):
    monkeypatch.setattr(run, "push_otlp", lambda: pytest.fail("was switched on"))
    with run._pushing(MetricsPart()):
        pass
