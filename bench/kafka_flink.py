"""
[kafka_append_flink] Rows from Spark to Kafka exactly once, against PyFlink's Kafka sink, exactly
once with checkpoints of a second; beside it the same with a tuned producer.

Flink is brought here, into an environment of its own under build/, at the first run. It counts its
numbers itself, where ours reads them from files, and its figure is the run time of the job alone:
neither planning nor the start of its cluster is in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka

from bench.broker import TESTS, apache
from bench.harness import Comparison, say, stopwatch
from bench.kafka import PARTITIONS, new_topic
from epochal.sinks.kafka import Kafka
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline

ROWS = 3_000_000
FILES = 4
ROUNDS = 3
THREADS = 2
VALUE_BYTES = 100
FILLER = "abcdefghij"
ROOT = Path(__file__).resolve().parent.parent
_HOME = ROOT / "build" / "flink"
_PACKAGE = "apache-flink==2.2.1"
_PYTHON = "3.11"
_CONNECTOR = "org.apache.flink:flink-sql-connector-kafka:5.0.0-2.2"
_TUNED = {"batch.size": str(512 * 1024), "linger.ms": "20"}


def append_flink() -> Comparison:
    comparison = Comparison(
        name="kafka_append_flink",
        peer_name="PyFlink 2.2.1, exactly once, checkpoints of 1 s",
        unit="rows/s",
        is_rate=True,
    )
    spark = local_builder("bench", threads=THREADS).config("spark.driver.memory", "2g")
    with apache() as bootstrap, tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "numbers"
        _write_source(source)
        session = spark.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        try:
            with _flink(bootstrap) as flink:
                comparison.run(
                    lambda: _ours_per_s(session, source, bootstrap),
                    lambda: flink({}),
                    rounds=ROUNDS,
                )
                comparison.beside = {"flink_tuned": round(max(flink(_TUNED) for _ in range(2)))}
        finally:
            session.stop()
    return comparison


def _write_source(folder: Path) -> None:
    folder.mkdir()
    for part in range(FILES):
        numbers = range(part * ROWS // FILES, (part + 1) * ROWS // FILES)
        (folder / f"{part}.csv").write_text("".join(f"{number}\n" for number in numbers))


def _ours_per_s(spark: Any, source: Path, bootstrap: str) -> float:
    topic = new_topic(bootstrap)
    value = f"lpad(cast(id AS string), {VALUE_BYTES}, '{FILLER}')"
    sink = Kafka(bootstrap, topic=topic, key="cast(id AS string)", value=value)
    # A pipeline may still write while its folder is being removed.
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as checkpoint, stopwatch() as seconds:
        stream = spark.readStream.schema("id BIGINT").csv(str(source))
        query = Pipeline("bench", [sink]).start(stream, checkpoint=checkpoint, availableNow=True)
        query.awaitTermination()
        elapsed_s = seconds()
    _require_all(bootstrap, topic)
    return ROWS / elapsed_s


@contextmanager
def _flink(bootstrap: str) -> Iterator[Callable[[Mapping[str, str]], float]]:
    """Runs a job with these producer settings and gives its rows a second. One JVM for all."""
    python, jar = _brought()
    script = Path(__file__).with_name("kafka_flink_job.py")
    command = [python, script, jar, bootstrap, str(THREADS)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("PyFlink has no pipes")
        jobs, answers = process.stdin, process.stdout

        def run(producer: Mapping[str, str]) -> float:
            topic = new_topic(bootstrap)
            job = {"topic": topic, "producer": dict(producer), "rows": ROWS}
            values = {"value_bytes": VALUE_BYTES, "filler": FILLER}
            jobs.write(json.dumps({**job, **values}) + "\n")
            jobs.flush()
            answer = answers.readline()
            if not answer:
                errors.seek(0)
                raise RuntimeError(f"PyFlink gave up: {errors.read()[-4000:]}")
            _require_all(bootstrap, topic)
            return ROWS / float(json.loads(answer)["seconds"])

        try:
            yield run
        finally:
            jobs.close()


def _brought() -> tuple[Path, Path]:
    """A Python that has PyFlink, and the jar of its Kafka connector."""
    for folder in (ROOT / "tools", TESTS):
        sys.path.insert(0, str(folder))
    from servers.maven import dependencies  # noqa: PLC0415  the same

    import setup  # type: ignore[import-not-found]  # noqa: PLC0415  found by the lines above

    python = _HOME / "bin" / "python"
    if not (_HOME / "complete").exists():
        say(f"bringing {_PACKAGE} into {_HOME.relative_to(ROOT)}")
        uv, env = setup.uv_command(), setup.uv_environment()
        venv = ("venv", "--quiet", "--clear", "--python", _PYTHON, _HOME)
        setup.run("make an environment for Flink", uv, *venv, env=env)
        install = ("pip", "install", "--quiet", "--python", python, _PACKAGE)
        setup.run("install Flink", uv, *install, env=env)
        (_HOME / "complete").touch()
    (jar,) = dependencies("flink-kafka", _CONNECTOR, alone=True).glob("*.jar")
    return python, jar


def _require_all(bootstrap: str, topic: str) -> None:
    """All rows can be read; markers of transactions have offsets, too."""
    reader = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench",
            "isolation.level": "read_committed",
        }
    )
    parts = [confluent_kafka.TopicPartition(topic, index) for index in range(PARTITIONS)]
    ends = [reader.get_watermark_offsets(part, timeout=20)[1] for part in parts]
    reader.close()
    assert sum(ends) > ROWS, f"{topic} ends at {ends}"


RUNS: Mapping[str, Callable[[], Comparison]] = {"kafka_append_flink": append_flink}
