"""
The peer of [kafka_append_flink]: runs in an environment of its own that has PyFlink and nothing of
ours. Reads a job a line (JSON) from stdin, writes how long it ran (JSON) to stdout.

    python kafka_flink_job.py <connector's jar> <bootstrap> <parallelism>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Of that environment.
from pyflink.common import (  # type: ignore[import-not-found]
    Configuration,
    Types,
    WatermarkStrategy,
)
from pyflink.datastream import StreamExecutionEnvironment  # type: ignore[import-not-found]
from pyflink.datastream.connectors.number_seq import (  # type: ignore[import-not-found]
    NumberSequenceSource,
)
from pyflink.table import StreamTableEnvironment  # type: ignore[import-not-found]

_SETTINGS = {
    "execution.checkpointing.interval": "1 s",
    "execution.checkpointing.mode": "EXACTLY_ONCE",
}
_SINK = "CREATE TABLE {name} (k STRING, v STRING) WITH ({options})"
_ROWS = (
    "INSERT INTO {name} SELECT CAST(f0 AS STRING),"
    " LPAD(CAST(f0 AS STRING), {value_bytes}, '{filler}') FROM {source}"
)


def main() -> None:
    jar, bootstrap, parallelism = sys.argv[1:]
    settings = Configuration()
    for name, value in {
        **_SETTINGS,
        "pipeline.jars": Path(jar).as_uri(),
        "parallelism.default": parallelism,
    }.items():
        settings.set_string(name, value)
    for number, line in enumerate(sys.stdin):
        streams = StreamExecutionEnvironment.get_execution_environment(settings)
        seconds = _run(streams, number, bootstrap, json.loads(line))
        print(json.dumps({"seconds": seconds}), flush=True)


def _run(streams: Any, number: int, bootstrap: str, job: dict[str, Any]) -> float:
    """How long the job ran once it was planned and its cluster was up. No row is seen by Python."""
    name, source = f"topic_{number}", f"numbers_{number}"
    tables = StreamTableEnvironment.create(streams)
    numbers = streams.from_source(
        NumberSequenceSource(0, job["rows"] - 1),
        WatermarkStrategy.no_watermarks(),
        source,
        Types.LONG(),
    )
    tables.create_temporary_view(source, numbers)
    options = {
        "connector": "kafka",
        "topic": job["topic"],
        "properties.bootstrap.servers": bootstrap,
        # Flink's own default is above what brokers allow by theirs.
        "properties.transaction.timeout.ms": "600000",
        "key.format": "raw",
        "key.fields": "k",
        "value.format": "raw",
        "value.fields-include": "EXCEPT_KEY",
        "sink.delivery-guarantee": "exactly-once",
        "sink.transactional-id-prefix": job["topic"],
        **{f"properties.{key}": value for key, value in job["producer"].items()},
    }
    tables.execute_sql(_SINK.format(name=name, options=_options_sql(options)))
    insert = _ROWS.format(
        name=name, source=source, value_bytes=job["value_bytes"], filler=job["filler"]
    )
    client = tables.execute_sql(insert).get_job_client()
    return float(client.get_job_execution_result().result().get_net_runtime()) / 1000


def _options_sql(options: dict[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in options.items())


if __name__ == "__main__":
    main()
