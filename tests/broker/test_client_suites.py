"""Test suites of others, as their authors run them: franz-go's `kgo`, and kcat's own commands."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.embedded import EmbeddedServer
from servers.programs import CACHE, program

FRANZ_GO = "github.com/twmb/franz-go@v1.22.2"
LOOK_FOR_INTERNAL_TOPICS = {"TestConsumeRegex", "Test848RegexBrokerResolves"}
"""They expect a topic `__consumer_offsets`: there is none here."""
RECORDS = 5_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "data", settings={"topics_auto_created": True})
    server.start()
    yield server
    server.stop()


def kgo_tests() -> tuple[Path, Path]:
    """The suite as a program, compiled once, and the folder that it runs in."""
    go = program("go", "golang-go")
    folder = CACHE / "franz-go"
    folder.mkdir(parents=True, exist_ok=True)
    found = run([go, "mod", "download", "-json", FRANZ_GO], folder)
    source = Path(re.search(r'"Dir": "([^"]+)"', found)[1]) / "pkg" / "kgo"
    compiled = folder / f"{FRANZ_GO.rpartition('@')[2]}.test"
    if not compiled.exists():
        run([go, "test", "-c", "-o", str(compiled), "."], source)
    return compiled, source


def run(command: list[str], folder: Path, **environment: str) -> str:
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=1_800,
        cwd=folder,
        env={**os.environ, **environment},
    )
    assert ran.returncode == 0, ran.stdout[-5_000:] + ran.stderr[-5_000:]
    return ran.stdout


@pytest.mark.proof
def test_franz_gos_suite_passes_but_for_internal_topics(server: EmbeddedServer) -> None:
    """Among it: consume, transform, produce in transactions, with both protocols of groups."""
    compiled, source = kgo_tests()
    skipped = "|".join(sorted(LOOK_FOR_INTERNAL_TOPICS))
    printed = run(
        [str(compiled), "-test.v", "-test.timeout=20m", f"-test.skip=^({skipped})$"],
        source,
        KGO_SEEDS=server.address(),
        KGO_TEST_RF="1",
        KGO_TEST_RECORDS=str(RECORDS),
    )
    passed = re.findall(r"^\s*--- PASS: (\S+)", printed, re.MULTILINE)
    assert {"TestTxnEtl/sticky/848", "TestTxnEtl/cooperative-sticky", "TestGroupETL"} <= set(passed)


@pytest.mark.proof
def test_kcat_writes_reads_lists_and_joins_groups(server: EmbeddedServer, tmp_path: Path) -> None:
    kcat = [program("kcat", "kcat"), "-b", server.address()]
    rows = tmp_path / "rows"
    rows.write_text("".join(f"key{number}:row{number}\n" for number in range(100)))
    run([*kcat, "-P", "-t", "kcat", "-K:", "-l", str(rows)], tmp_path)
    listed = run([*kcat, "-L"], tmp_path)
    assert 'topic "kcat" with 1 partitions' in listed
    read = run([*kcat, "-C", "-t", "kcat", "-K:", "-e", "-q", "-o", "beginning"], tmp_path)
    assert read == rows.read_text()
    joined = [*kcat, "-G", "group", "-q", "-c", "100", "-K:", "-X", "auto.offset.reset=earliest"]
    assert sorted(run([*joined, "kcat"], tmp_path).splitlines()) == sorted(read.splitlines())
    asked = run([*kcat, "-Q", "-t", "kcat:0:-1"], tmp_path)
    assert "offset 100" in asked
