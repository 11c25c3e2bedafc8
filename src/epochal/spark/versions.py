"""The releases, kinds, workers and settings of Spark: what is supported, refused, or advised."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from epochal.errors import Misconfigured, not_installed

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

OLDEST = (3, 5)
NEWEST = (4, 3)
JAVA_OLDEST = 17
"""Of PySpark 4; 3.5 runs on older ones."""
UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"
"""From Spark 4.1 on: without it rows cross to Python by TCP, which waits for acknowledgements."""

_CONNECT_ADVICE = (
    "Spark Connect: all rows are handed to tasks in Python, column by column; in Spark's classic "
    "mode some sinks are given rows as bytes, few rows are written by the driver, and Spark's own "
    "writer writes files",
)
_ADVICE_OF_3_5 = (
    "Spark 4.0 or newer: there the driver writes few rows itself, and Spark's own writer writes "
    "files; on 3.5 tasks in Python write both",
)
_REMOTE = "SPARK_REMOTE"
"""By this variable PySpark makes every session one of Spark Connect."""
_asked: WeakSet[SparkContext] = WeakSet()
"""The applications whose workers were asked what they run."""


def require_supported(release: str | None = None) -> None:
    """Refuse a PySpark that is not tested. The installed one, if none is given."""
    if release is None:
        release = _installed()
    found = re.match(r"(\d+)\.(\d+)", release)
    minor = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if OLDEST <= minor <= NEWEST:
        return
    raise Misconfigured(
        f"PySpark {release} is not supported here: {_text(OLDEST)} to {_text(NEWEST)} are",
        f'pip install "pyspark>={_text(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}"',
    )


def require_startable() -> None:
    """Refuse an environment in which Spark would not start, or would not be known here."""
    require_supported()
    if _REMOTE in os.environ:
        raise Misconfigured(
            f"{_REMOTE} is set, and this starts a Spark of its own, in classic mode",
            f"unset {_REMOTE}; a pipeline on Spark Connect is started in Python: pipeline.start(…)",
        )
    _require_java()


def _require_java() -> None:
    """Refuse a machine on which Spark would end with "Java gateway process exited"."""
    home = os.environ.get("JAVA_HOME")
    way_out = (
        "install a Java, 17 or newer (Debian: `apt-get install default-jre-headless`, macOS: "
        "`brew install openjdk@17`), and set JAVA_HOME to its folder if `java` is not on the PATH"
    )
    java = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    if java is None and home:
        raise Misconfigured(f"JAVA_HOME is {home}, and there is no bin/java in it", way_out)
    if java is None:
        raise Misconfigured("no Java was found, and Spark runs on one", way_out)
    major = _java_major(Path(java))
    if major is not None and major < JAVA_OLDEST and not _installed().startswith("3."):
        raise Misconfigured(
            f"{java} is Java {major}, and PySpark {_installed()} needs {JAVA_OLDEST} or newer",
            way_out,
        )


def _java_major(java: Path) -> int | None:
    """Of the file beside it that names its release; a JVM takes too long to be asked."""
    try:
        text = java.resolve().parents[1].joinpath("release").read_text()
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.MULTILINE)
    return None if found is None else int(found[1])


def is_connect(spark: SparkSession) -> bool:
    """Whether a session is one of Spark Connect: its JVM is out of this process's reach."""
    return getattr(spark, "_jsparkSession", None) is None


def require_classic(spark: SparkSession, what: str) -> None:
    """Refuse Spark Connect for what needs Spark's JVM."""
    if is_connect(spark):
        raise Misconfigured(
            f"{what} needs Spark's JVM, and this is a Spark Connect session",
            "run it in Spark's classic mode: unset SPARK_REMOTE, no .remote(…)",
        )


def require_workers(spark: SparkSession) -> None:
    """
    Let workers run a Python that has this package; refuse those that don't.

    A driver that is started as `venv/bin/python job.py` has it, while workers take the first
    `python3` on the path unless PYSPARK_PYTHON is set. In local mode they run on this machine and
    get the driver's own Python. On a cluster, and where a Python was named, one task asks what
    they have, once per Spark application.
    """
    context = spark.sparkContext
    is_local = (context.master or "").startswith("local")
    if context in _asked or (is_local and _is_this_python(context.pythonExec)):
        return
    is_named = "PYSPARK_PYTHON" in os.environ or context.getConf().contains("spark.pyspark.python")
    if is_local and not is_named:
        context.pythonExec = sys.executable
        return
    from epochal import __version__ as here  # noqa: PLC0415  the root imports this module

    try:
        (found,) = context.parallelize([0], 1).map(_describing_worker()).collect()
    except Exception as error:
        cause = re.search(r"^.*PYTHON_VERSION_MISMATCH.*$", str(error), re.MULTILINE)
        if cause is None:
            raise
        raise _wrong_workers(cause[0].strip()) from None
    if found["epochal"] != here:
        has = f"epochal {found['epochal']}" if found["epochal"] else "no epochal"
        raise _wrong_workers(
            f"Spark's workers run {found['python']}, which has {has}; the driver runs "
            f"{sys.executable} with epochal {here}"
        )
    _asked.add(context)


def _is_this_python(command: str) -> bool:
    found = shutil.which(command)
    # Not resolved further: the python of a virtual environment is a link to that of the machine.
    return found is not None and Path(found).parent.samefile(Path(sys.executable).parent)


def _describing_worker() -> Callable[[int], dict[str, str]]:
    # A function inside of a function is sent as code; of any other the worker imports the module.
    def describe(_: int) -> dict[str, str]:
        import sys  # noqa: PLC0415  runs on a worker

        try:
            import epochal  # noqa: PLC0415  the same
        except ImportError:
            return {"python": sys.executable, "epochal": ""}
        return {"python": sys.executable, "epochal": epochal.__version__}

    return describe


def _wrong_workers(fact: str) -> Misconfigured:
    return Misconfigured(
        fact,
        "before the session is made: set the environment variable PYSPARK_PYTHON to the Python "
        f"that has this package (here: PYSPARK_PYTHON={sys.executable}); on a cluster, install "
        "epochal on every node or ship an environment with spark.archives",
    )


def require_streaming(frame: DataFrame) -> None:
    if not frame.isStreaming:
        raise Misconfigured(
            "this DataFrame is not a stream: it comes from spark.read, not from spark.readStream",
            'for a once-only load of a batch: pipeline.write(df, run="…", checkpoint=…)',
        )


def faster_settings(spark: SparkSession) -> tuple[str, ...]:
    """What would make epochs faster, and is not set in this session."""
    if is_connect(spark):
        return _CONNECT_ADVICE
    if spark.version.startswith("3."):
        return _ADVICE_OF_3_5
    is_set = spark.sparkContext.getConf().get(UNIX_SOCKETS, "false").lower() == "true"
    if is_set or spark.version.startswith("4.0."):
        return ()
    return (f"{UNIX_SOCKETS}=true, when Spark is started, takes a third off a small epoch",)


def _installed() -> str:
    try:
        import pyspark  # noqa: PLC0415  this package is importable without it
    except ImportError:
        raise not_installed("a pipeline on Spark", "pyspark", "spark") from None
    return pyspark.__version__


def _text(minor: tuple[int, int]) -> str:
    return f"{minor[0]}.{minor[1]}"
