"""
Run the small `compat` suite on the newest patch of every PySpark that is supported.

Each gets an environment of its own under `.venvs/`; all other packages are those of the lock, so
that a difference can only come from Spark. Where Iceberg has a runtime for a Spark, it is on its
class path, and what reaches a bucket from there. Run it through tools/run.py, which sets JAVA_HOME.

    python tools/compat.py [4.0 …] [arguments of pytest]
    python tools/compat.py connect [4.0 …]    the tests of Spark Connect, from 4.0 on
    python tools/compat.py hudi               those of Hudi, which has a bundle for one Spark only
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import setup

MINORS = ("3.5", "4.0", "4.1", "4.2", "4.3")
ICEBERG_RUNTIMES = {"4.1": "iceberg-spark-runtime-4.1_2.13"}
ICEBERG_RELEASE = "1.12.0"
HADOOP = {"4.1": "3.4.2"}
"""Of the Sparks that Iceberg has a runtime for."""
COMPAT, CONNECT, HUDI = "compat", "connect", "hudi"
SPARKS = {COMPAT: MINORS, CONNECT: ("4.0", "4.1", "4.2", "4.3"), HUDI: ("3.5",)}
EXTRAS = "spark,postgres,delta,iceberg,s3,testing"
CONNECT_EXTRAS = "connect,kafka,demo,metrics"
VENVS = setup.ROOT / ".venvs"
CONSTRAINTS = VENVS / "constraints.txt"
# PySpark 4.0 and 4.1 leave the socket of every collect() to the garbage collector.
LEAKS = ("-W", "ignore:unclosed <socket.socket:ResourceWarning")
# PySpark 4.0 logs by it where a server of Connect is gone.
LOGGER = ("-W", "ignore:The 'warn' method is deprecated:DeprecationWarning")
# PySpark 3.5 uses it, and Python 3.12 has it only where setuptools is installed.
DISTUTILS = (
    *("-W", "ignore:The distutils package:DeprecationWarning"),
    *("-W", "ignore:distutils Version classes:DeprecationWarning"),
)


def write_constraints() -> None:
    """Write the lock without hashes, and without the packages that come with each Spark."""
    pins = [
        line.removesuffix("\\").strip()
        for line in setup.LOCK.read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith((" ", "pyspark=", "py4j="))
    ]
    CONSTRAINTS.write_text("\n".join(pins) + "\n", encoding="utf-8")


def make_environment(uv: Path, minor: str, extras: str) -> Path:
    venv = VENVS / f"pyspark-{minor}"
    python = venv / "bin" / "python"
    env = setup.uv_environment()
    if not python.exists():
        setup.run(
            f"make {venv.name}", uv, "venv", "--quiet", "--python", setup.PYTHON, venv, env=env
        )
    setup.run(
        f"install PySpark {minor}", uv, "pip", "install", "--quiet", "--upgrade-package", "pyspark",
        "--python", python, "--constraints", CONSTRAINTS,
        "--editable", f"{setup.ROOT}[{extras}]", f"pyspark=={minor}.*",
        "pytest-timeout", "pytest-xdist", "psutil", "setuptools", "duckdb", "polars", env=env,
    )  # fmt: skip
    return python


def tests_of(suite: str) -> list[str]:
    """Arguments of pytest. Of `compat` the files alone: others need packages that are not there."""
    tests = setup.ROOT / "tests"
    if suite == CONNECT:
        return [str(tests / "spark" / "test_connect.py")]
    if suite == HUDI:
        return [str(tests / "sinks" / HUDI), "-m", "proof"]
    files = sorted((tests / "spark").glob("test_*.py"))
    marked = [str(one) for one in files if "mark.compat" in one.read_text(encoding="utf-8")]
    return [*marked, "-m", COMPAT]


def iceberg_runtime(minor: str) -> Path | None:
    """Iceberg's jar for a Spark, by Maven, once; None where there is none."""
    name = ICEBERG_RUNTIMES.get(minor)
    if name is None:
        return None
    home = setup.ROOT / ".cache" / f"iceberg-{ICEBERG_RELEASE}"
    jar = home / f"{name}-{ICEBERG_RELEASE}.jar"
    if not jar.exists():
        home.mkdir(parents=True, exist_ok=True)
        artifact = f"-Dartifact=org.apache.iceberg:{name}:{ICEBERG_RELEASE}"
        copy = ("-q", "-B", "dependency:copy", artifact, f"-DoutputDirectory={home}")
        setup.run(f"fetch {name}", shutil.which("mvn") or "mvn", *copy, env=dict(os.environ))
    return jar


def jars(minor: str) -> str:
    """What the class path of a Spark has beside its own; empty where that is nothing."""
    runtime = iceberg_runtime(minor)
    if runtime is None:
        return ""
    sys.path.insert(0, str(setup.ROOT / "tests"))
    from servers import s3a  # type: ignore[import-not-found]  # noqa: PLC0415  by the line above

    return f"{runtime},{s3a.jars(HADOOP[minor])}"


def passes(python: Path, arguments: list[str], *, jars: str = "") -> bool:
    suite = (*arguments, *LEAKS, *LOGGER, *DISTUTILS)
    env = {**os.environ, "PYSPARK_PYTHON": str(python), "VIRTUAL_ENV": str(python.parent.parent)}
    if jars:
        env["PYSPARK_SUBMIT_ARGS"] = f"--jars {jars} pyspark-shell"
    command = [str(python), "-m", "pytest", *suite]
    return subprocess.run(command, check=False, env=env, cwd=setup.ROOT).returncode == 0


def main() -> None:
    arguments = sys.argv[1:]
    suite = arguments.pop(0) if arguments[:1] in ([CONNECT], [HUDI]) else COMPAT
    chosen = [minor for minor in SPARKS[suite] if minor in arguments] or SPARKS[suite]
    arguments = [one for one in arguments if one not in MINORS]
    extras = f"{EXTRAS},{CONNECT_EXTRAS}" if suite == CONNECT else EXTRAS
    VENVS.mkdir(exist_ok=True)
    results = {}
    try:
        write_constraints()
        uv = setup.uv_command()
        for minor in chosen:
            print(f"{suite}: PySpark {minor}", file=sys.stderr, flush=True)
            python = make_environment(uv, minor, extras)
            found = jars(minor) if suite == COMPAT else ""
            results[minor] = passes(python, [*tests_of(suite), *arguments], jars=found)
    except (setup.SetupFailed, OSError) as error:
        setup.give_up(error)
    for minor, passed in results.items():
        print(f"PySpark {minor}: {'passed' if passed else 'FAILED'}")
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
