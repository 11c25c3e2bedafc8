"""Java virtual machines that start quickly: options for servers of tests, and Spark's classes.

Half of the time of a Spark that is started for one test goes into loading and checking classes. An
archive of them, which the first test run of an installation makes, saves that (JEP 350).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Few threads, and no compilation that would pay off only after minutes."""
_SILENT = "-Xlog:disable"
"""An archive that does not fit is not used, and not reported: stdout belongs to the tests."""
_MADE_WITHIN_S = 300


def speed_up_spark() -> None:
    """For this process and its children: every Spark's launcher and driver gets these options."""
    os.environ["SPARK_LAUNCHER_OPTS"] = " ".join(QUICK)
    os.environ["SPARK_SUBMIT_OPTS"] = _options(f"-XX:SharedArchiveFile={_archive()}")


def make_archive() -> None:
    """Run a small Spark that writes its classes into the archive, unless there is one."""
    archive = _archive()
    if archive.exists():
        return
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder) / archive.name
        env = {**os.environ, "SPARK_SUBMIT_OPTS": _options(f"-XX:ArchiveClassesAtExit={made}")}
        subprocess.run(
            [sys.executable, __file__],
            cwd=folder,
            env=env,
            capture_output=True,
            check=False,
            timeout=_MADE_WITHIN_S,
        )
        # An empty one says that this Java makes none: it is not tried at every run.
        made.touch()
        made.replace(archive)


def _options(*more: str) -> str:
    return " ".join([*QUICK, _SILENT, *more])


def _archive() -> Path:
    """It belongs to one installation of PySpark and to one Java."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else Path(shutil.which("java") or "java")
    built = java.resolve().stat().st_mtime_ns if java.exists() else 0
    return Path(sys.prefix) / f"spark-{version('pyspark')}-{built}.jsa"


def _main() -> None:
    """Use what the tests use, so that its classes are loaded: a query, a stream, its state."""
    from epochal.spark.local_session import local_session

    spark = local_session("archive", threads=2)
    spark.range(10).selectExpr("id", "'x' v").write.json("in")
    read = spark.readStream.schema("id bigint, v string").json("in")
    timed = read.selectExpr("*", "now() at").withWatermark("at", "1 second")
    counted = timed.groupBy("v", "at").count().where("v IS NOT NULL")
    for name, stream in (("read", read), ("counted", counted)):
        writer = stream.writeStream.outputMode("update").trigger(availableNow=True)
        writer.foreachBatch(_through_python)
        writer.option("checkpointLocation", f"chk-{name}").start().awaitTermination()
    spark.stop()


def _through_python(batch: DataFrame, _: int) -> None:
    batch.mapInArrow(lambda rows: rows, batch.schema).collect()


if __name__ == "__main__":
    _main()
