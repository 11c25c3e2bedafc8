"""`make bench` runs all benchmarks, `ONLY=name` that one, or all whose names contain it."""

from __future__ import annotations

import sys

from bench import (
    broker,
    broker_cluster,
    console_scale,
    coordinator,
    coordinator_scale,
    delta,
    epoch_overhead,
    files_parquet,
    iceberg,
    kafka,
    kafka_flink,
    kafka_spark,
    latency,
    mariadb,
    postgres,
    postgres_spark,
    s3,
    standby,
)
from bench.harness import report, say

BENCHMARKS = {
    "coordinator": coordinator.run,
    **files_parquet.RUNS,
    **broker.RUNS,
    **broker_cluster.RUNS,
    **console_scale.RUNS,
    **coordinator_scale.RUNS,
    **delta.RUNS,
    **epoch_overhead.RUNS,
    **iceberg.RUNS,
    **kafka.RUNS,
    **kafka_flink.RUNS,
    **kafka_spark.RUNS,
    **latency.RUNS,
    **mariadb.RUNS,
    **postgres.RUNS,
    **postgres_spark.RUNS,
    **s3.RUNS,
    **standby.RUNS,
}


def main() -> int:
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    names = [asked] if asked in BENCHMARKS else [name for name in BENCHMARKS if asked in name]
    chosen = [BENCHMARKS[name] for name in names]
    if not chosen:
        say(f"no benchmark is called {asked!r}; there are {', '.join(BENCHMARKS)}")
        return 2
    for run in chosen:
        report(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
