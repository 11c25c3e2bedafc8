"""`epochal run`: metrics, errors and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from epochal import Memory
from epochal.cli import run
from epochal.config.file import GatePart, MetricsPart, SourcePart
from epochal.config.pipeline import file_at, gates_of, pipeline_of, stream_of
from epochal.errors import Misconfigured
from epochal.logs import open_log
from epochal.spark.projection import empty_like, project
from epochal.storage.leases import FileLease

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


def test_metrics_are_served_at_the_address_in_the_file(tmp_path):
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


def test_nothing_is_pushed_by_default(monkeypatch):
    monkeypatch.setattr(run, "push_otlp", lambda: pytest.fail("was switched on"))
    with run._pushing(MetricsPart()):
        pass


@pytest.mark.parametrize(
    ("before", "is_stopped"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)]
)
def test_sigint_stops_a_run_unless_the_caller_ignores_it(before, is_stopped):
    own = signal.signal(signal.SIGINT, before)
    try:
        signals = run._StopSignals()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a SparkContext does
        with signals:
            signal.raise_signal(signal.SIGINT)
        assert signals.requested.is_set() is is_stopped
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, own)


@pytest.fixture
def declared(tmp_path):
    file = tmp_path / "orders.yaml"
    file.write_text(FILE)
    return file_at(file)


def test_a_source_that_spark_does_not_know_is_reported_in_one_line(spark, declared):
    unknown = replace(declared, source=SourcePart(format="rat"))
    with pytest.raises(Misconfigured) as caught:
        stream_of(unknown, spark)
    assert caught.value.message.startswith("source 'source': [DATA_SOURCE_NOT_FOUND]")
    assert "\n" not in caught.value.message


def test_the_package_of_a_source_that_spark_lacks_is_named_with_its_version(spark, declared):
    with pytest.raises(Misconfigured) as caught:
        stream_of(replace(declared, source=SourcePart(format="kafka")), spark)
    package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{spark.version}"
    assert caught.value.hint == f"spark: {{packages: [{package}]}}"


@pytest.mark.parametrize(
    ("query", "code"),
    [("SELEC 1", "PARSE_SYNTAX_ERROR"), ("SELECT amount > 0 FROM batch", "UNRESOLVED_COLUMN")],
)
def test_the_query_of_a_gate_is_tried_before_the_first_row(spark, declared, query, code):
    stream = stream_of(declared, spark)
    with pytest.raises(Misconfigured, match=rf"gates\[1\]: \[{code}"):
        gates_of([GatePart(sql="SELECT count(*) >= 0 FROM batch"), GatePart(sql=query)], stream)


@pytest.mark.parametrize("option", [{"where": "amount >"}, {"select": ["amount"]}])
def test_a_selection_that_spark_refuses_is_reported_with_its_sink(spark, declared, option):
    batch = empty_like(stream_of(declared, spark))
    with pytest.raises(Misconfigured, match=rf"^sink 'some': {next(iter(option))}="):
        project(Memory(name="some", **option), batch)


def test_a_refused_epoch_ends_in_one_message_without_the_stacks_of_spark(tmp_path):
    refusing = FILE.replace("/chk", "chk").replace("metrics", "gates: {sql: SELECT false}\n#")
    (tmp_path / "orders.yaml").write_text(refusing)
    command = [sys.executable, "-m", "epochal.cli", "run", "orders.yaml", "--available-now", "-q"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: epoch 0: gate 'SELECT false' refused" in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "org.apache.spark" not in done.stderr


def test_a_column_that_is_not_there_ends_in_one_message_without_the_stacks_of_spark(tmp_path):
    """PySpark logs such an error itself, with Java's stack trace in one line."""
    (tmp_path / "orders.yaml").write_text(
        "pipeline: orders\ncheckpoint: chk\nsource: {format: rate}\n"
        "sinks: [{kind: files, path: out, select: [valeu]}]\n"
    )
    command = [sys.executable, "-m", "epochal.cli", "run", "orders.yaml", "--available-now", "-q"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
    )
    assert "there is no column `valeu`" in done.stderr
    assert "hint: the columns here are timestamp, value" in done.stderr
    assert "org.apache.spark" not in done.stderr


SLOW = """\
pipeline: orders
checkpoint: chk
source: {format: rate-micro-batch, options: {rowsPerBatch: 10}}
sinks:
  - {kind: files, name: a, path: out/a}
  - kind: files
    name: b
    path: out/b
    select: [value, "java_method('java.lang.Thread', 'sleep', 60000L) AS slept"]
"""


def test_a_signal_to_the_whole_process_group_stops_a_run_without_stack_traces(tmp_path):
    (tmp_path / "orders.yaml").write_text(SLOW)
    command = [sys.executable, "-m", "epochal.cli", "run", "orders.yaml"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "chk" / "offsets" / "0").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # As systemd does: Spark's JVM gets the signal as well.
        os.killpg(run.pid, signal.SIGTERM)
        _, stderr = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert "\tat " not in stderr, stderr
    assert "Exception" not in stderr


def test_ctrl_c_while_it_starts_ends_a_run_without_stack_traces(tmp_path):
    (tmp_path / "orders.yaml").write_text(SLOW)
    # As a slow source or target would keep it: PySpark's own handler is in place by then.
    (tmp_path / "sitecustomize.py").write_text(
        "import epochal.config.pipeline as pipeline, pathlib\n"
        "plain = pipeline.stream_of\n"
        "def slow(file, spark):\n"
        "    pathlib.Path('starting').touch()\n"
        "    spark._jvm.java.lang.Thread.sleep(3000)\n"
        "    return plain(file, spark)\n"
        "pipeline.stream_of = slow\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "epochal.cli", "run", "orders.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "starting").exists():
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGINT)
        _, stderr = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, stderr
    assert "Traceback" not in stderr, stderr
    assert not (tmp_path / "chk" / "offsets").exists()


def test_a_standby_says_when_it_waits_and_works_and_a_signal_ends_it_cleanly(tmp_path):
    (tmp_path / "orders.yaml").write_text(SLOW.partition("  - kind: files\n")[0])
    log = tmp_path / "chk" / "epochal" / "log"
    other = FileLease(log / ".lease")
    assert other.acquire("another driver") is True
    command = [sys.executable, "-m", "epochal.cli", "run", "orders.yaml", "--standby"]
    with (tmp_path / "said.txt").open("wb") as output:
        run = subprocess.Popen(command, cwd=tmp_path, stderr=output, start_new_session=True)

    def await_line(text):
        deadline = time.monotonic() + 300
        while text not in (said := (tmp_path / "said.txt").read_text()):
            assert time.monotonic() < deadline, said
            assert run.poll() is None, said
            time.sleep(0.1)

    try:
        await_line("orders: standby: waiting")
        assert open_log(log).numbers() == []
        other.release()
        await_line("orders: standby: working")
        await_line("orders: epoch 0 committed")
        run.terminate()
        assert run.wait(300) == 0, (tmp_path / "said.txt").read_text()
    finally:
        run.kill()
    said = (tmp_path / "said.txt").read_text()
    # PySpark's own: a worker that is ended while it connects reports a broken pipe.
    assert [line for line in said.splitlines() if "File" in line and "/epochal/" in line] == []
    assert other.acquire("another driver") is True
    other.close()
