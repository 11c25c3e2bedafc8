"""
Test suites of other people's Kafka clients: each is fetched as a package, run against a broker, and
reports the outcome of every test.

A suite is run as its authors run it, without its tests that need no broker. A test that fails is
run once more, alone: these suites have time-outs that a busy machine misses.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree as ET

from servers.kafka import RELEASE
from servers.programs import CACHE, fetched, program, unpack_source

Outcomes = Mapping[str, str]
"""Test → passed, failed or skipped."""
_RUN_MAX_S = 2_400


class Suite(Protocol):
    name: str
    comes_as: str
    """The package and its version."""
    remarks: str
    why: Mapping[str, str]
    """Tests that pass on Apache Kafka and not here → the reason."""

    def run(self, address: str, folder: Path, only: Sequence[str] = ()) -> Outcomes: ...


def outcomes(suite: Suite, address: str, folder: Path) -> Outcomes:
    found = dict(suite.run(address, folder))
    failed = [name for name, outcome in found.items() if outcome == "failed"]
    for name in failed:
        found |= {name: suite.run(address, folder, [name]).get(name, "failed")}
    return found


def command(words: Sequence[str], folder: Path, *, may_fail: bool = False, **env: str) -> str:
    """What a command prints; it may take as long as a whole suite does."""
    ran = subprocess.run(
        list(words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=_RUN_MAX_S,
        cwd=folder,
        env={**os.environ, **env},
    )
    assert may_fail or ran.returncode == 0, ran.stdout[-5_000:]
    return ran.stdout


class FranzGo:
    name = "franz-go"
    module = "github.com/twmb/franz-go@v1.22.2"
    comes_as = "Go module, v1.22.2"
    remarks = (
        "package `kgo`: producers, consumers, both protocols of groups and of transactions; not "
        "those for share groups, which are not implemented here"
    )
    records = 5_000
    why: Mapping[str, str] = dict.fromkeys(
        ("TestConsumeRegex", "Test848RegexBrokerResolves"),
        "expects a topic `__consumer_offsets`: committed offsets are in the journal here",
    )

    def run(self, address: str, _folder: Path, only: Sequence[str] = ()) -> Outcomes:
        compiled, source = self.compiled()
        words = [str(compiled), "-test.v", "-test.timeout=25m", "-test.skip=Share"]
        if only:
            words.append(f"-test.run=^({'|'.join(only)})$")
        printed = command(
            words,
            source,
            may_fail=True,
            KGO_SEEDS=address,
            KGO_TEST_RF="1",
            KGO_TEST_RECORDS=str(self.records),
        )
        states = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}
        listed = re.findall(r"^--- (PASS|FAIL|SKIP): (\S+)", printed, re.MULTILINE)
        return {test: states[state] for state, test in listed}

    def compiled(self) -> tuple[Path, Path]:
        """The suite as a program, compiled once, and the folder that it runs in."""
        go = program("go", "golang-go")
        folder = CACHE / "franz-go"
        folder.mkdir(parents=True, exist_ok=True)
        found = command([go, "mod", "download", "-json", self.module], folder)
        source = Path(re.search(r'"Dir": "([^"]+)"', found)[1]) / "pkg" / "kgo"
        compiled = folder / f"{self.module.rpartition('@')[2]}.test"
        if not compiled.exists():
            command([go, "test", "-c", "-o", str(compiled), "."], source)
        return compiled, source


class KafkaPython:
    name = "kafka-python"
    release = "3.0.12"
    comes_as = f"sdist of PyPI, {release}"
    remarks = (
        "`test/integration`: admin, consumer and producer; not those for SASL and TLS, which start "
        "servers of their own"
    )
    why: Mapping[str, str] = {}
    files = ("admin", "consumer", "producer")
    _SERVICE = (
        "class ExternalService:\n"
        "    def __init__(self, host, port): pass\n"
        "    def stop(self): pass\n"
        "SpawnedService = None\n"
    )
    """A module that the sdist lacks: it starts servers, and here they are up already."""

    def run(self, address: str, folder: Path, only: Sequence[str] = ()) -> Outcomes:
        home = fetched(f"kafka-python-{self.release}", self._fetch, lock="kafka-python")
        report = folder / "kafka-python.xml"
        paths = [f"test/integration/test_{file}_integration.py" for file in self.files]
        chosen = [f"test/integration/{name}" for name in only] or paths
        report.unlink(missing_ok=True)
        # Its own setting ends the whole run where one test takes too long.
        options = ("-o", "addopts=", "--timeout=120", "--timeout-method=signal")
        python = str(home / "venv/bin/python")
        command(
            [python, "-m", "pytest", *options, *chosen, f"--junitxml={report}"],
            home / "source",
            may_fail=True,
            KAFKA_VERSION=RELEASE,
            KAFKA_URI=f"kafka://{address}",
            KAFKA_ROOT=str(home),
        )
        return dict(_reported(case) for case in ET.parse(report).iter("testcase"))

    def _fetch(self, home: Path) -> None:
        command([sys.executable, "-m", "venv", "venv"], home)
        pip = [str(home / "venv/bin/python"), "-m", "pip"]
        packages = ("pytest", "pytest-mock", "pytest-timeout", "py", "lz4", "zstandard", "crc32c")
        command([*pip, "install", "-q", *packages, "setuptools", "python-snappy"], home)
        sdist = ("--no-deps", "--no-binary=:all:", f"kafka-python=={self.release}")
        command([*pip, "download", "-q", *sdist], home)
        (archive,) = home.glob("kafka_python-*.tar.gz")
        (home / "source").mkdir()
        command(["tar", "-xf", str(archive), "-C", "source", "--strip-components=1"], home)
        tests = home / "source/test"
        (tests / "__init__.py").touch()  # else Python's own package `test` is found
        (tests / "service.py").write_text(self._SERVICE)


def _reported(case: ET.Element) -> tuple[str, str]:
    file = case.get("classname", "").rpartition(".")[2]
    states = {child.tag for child in case}
    outcome = "failed" if states & {"failure", "error"} else "passed"
    return f"{file}.py::{case.get('name')}", "skipped" if "skipped" in states else outcome


class Librdkafka:
    name = "librdkafka"
    suite = "sid"
    comes_as = f"Debian's source package of the suite {suite}, 2.14.2 when this was written"
    remarks = "its C and C++ tests that need a broker, quick mode (`-L -Q`)"
    why: Mapping[str, str] = {}

    def run(self, address: str, folder: Path, only: Sequence[str] = ()) -> Outcomes:
        home = fetched("librdkafka", self._fetch, lock="librdkafka")
        settings = folder / "librdkafka.conf"
        settings.write_text(f"metadata.broker.list={address}\ntest.topic.random=true\n")
        printed = command(
            ["./test-runner", "-L", "-Q", "-E", "-p5", "-V", RELEASE],
            home / "tests",
            may_fail=True,
            RDKAFKA_TEST_CONF=str(settings),
            LD_LIBRARY_PATH=f"{home / 'src'}:{home / 'src-cpp'}",
            **({"TESTS": ",".join(name[:4] for name in only)} if only else {}),
        )
        _, _, summary = printed.rpartition(" SUMMARY\n")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", summary)
        row = re.compile(r"^\|\s*(\d{4}\w*)\s*\|\s*(PASSED|FAILED|RUNNING|SKIPPED)", re.MULTILINE)
        states = {"PASSED": "passed", "SKIPPED": "skipped"}
        return {test: states.get(state, "failed") for test, state in row.findall(plain)}

    def _fetch(self, home: Path) -> None:
        unpack_source("librdkafka", self.suite, home)
        command(["./configure"], home)
        command(["make", "-j2", "libs"], home)
        command(["make", "-j2", "test-runner"], home / "tests")


SUITES: tuple[Suite, ...] = (FranzGo(), KafkaPython(), Librdkafka())
