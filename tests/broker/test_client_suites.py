"""Test suites of others on our broker and on Apache Kafka, and kcat's own commands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_suites import SUITES, Outcomes, Suite, command, outcomes
from servers.embedded import EmbeddedServer
from servers.kafka import KafkaServer
from servers.programs import program

RESULTS = Path(__file__).parent / "client_suites.json"
"""Of the last run: `make docs` makes docs/reference/broker-clients.md of it."""
PARTITIONS = 4
"""Of topics that are made by writing to them, as the suites' own servers have it."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    settings = {"topics_auto_created": True, "partitions_default": PARTITIONS}
    server = EmbeddedServer(tmp_path / "data", settings=settings)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def apache(tmp_path: Path) -> Iterator[KafkaServer]:
    (tmp_path / "apache").mkdir()
    settings = {"auto.create.topics.enable": "true", "num.partitions": str(PARTITIONS)}
    server = KafkaServer(tmp_path / "apache", settings=settings)
    server.start()
    yield server
    server.kill()


@pytest.mark.proof
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_what_passes_on_apache_kafka_passes_here(
    suite: Suite, server: EmbeddedServer, apache: KafkaServer, tmp_path: Path
) -> None:
    ours = outcomes(suite, server.address(), tmp_path)
    theirs = outcomes(suite, apache.address(), tmp_path)
    keep(suite, ours, theirs)
    passed = {test for test, outcome in theirs.items() if outcome == "passed"}
    assert len(passed) > 10
    missing = {test for test in passed if ours.get(test) != "passed"}
    assert missing == set(suite.why), f"{suite.name}: compare with {RESULTS}"


def keep(suite: Suite, ours: Outcomes, theirs: Outcomes) -> None:
    """Put the outcomes of one suite into the file of all."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[suite.name] = {
        "comes_as": suite.comes_as,
        "remarks": suite.remarks,
        "tests": {
            test: [ours.get(test, "skipped"), theirs.get(test, "skipped")]
            for test in sorted({*ours, *theirs})
        },
        "why": dict(suite.why),
    }
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


@pytest.mark.proof
def test_kcat_writes_reads_lists_and_joins_groups(server: EmbeddedServer, tmp_path: Path) -> None:
    kcat = [program("kcat", "kcat"), "-b", server.address()]
    rows = tmp_path / "rows"
    rows.write_text("".join(f"key{number}:row{number}\n" for number in range(100)))
    command([*kcat, "-P", "-t", "kcat", "-K:", "-l", str(rows)], tmp_path)
    listed = command([*kcat, "-L"], tmp_path)
    assert f'topic "kcat" with {PARTITIONS} partitions' in listed
    read = command([*kcat, "-C", "-t", "kcat", "-K:", "-e", "-q", "-o", "beginning"], tmp_path)
    assert sorted(read.splitlines()) == sorted(rows.read_text().splitlines())
    joined = [*kcat, "-G", "group", "-q", "-c", "100", "-K:", "-X", "auto.offset.reset=earliest"]
    assert sorted(command([*joined, "kcat"], tmp_path).splitlines()) == sorted(read.splitlines())
    ends = [command([*kcat, "-Q", "-t", f"kcat:{one}:-1"], tmp_path) for one in range(PARTITIONS)]
    assert sum(int(re.search(r"offset (\d+)", end)[1]) for end in ends) == 100
