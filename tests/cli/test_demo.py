"""`epochal demo`, run as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
from servers.processes import default_sigint

from epochal.demo.audit import READERS, audit
from epochal.demo.kills import STEPS, plan_kills
from epochal.demo.servers import forget, running_servers
from epochal.demo.workspace import Workspace
from epochal.terms import Identity

COMMAND = [sys.executable, "-m", "epochal.cli"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Iterator[tuple[Path, dict[str, object]]]:
    """One demonstration with kills, its folder kept and its servers started again."""
    root = tmp_path_factory.mktemp("demo") / "kept"
    sizes = ["--rows", "3000", "--epochs", "6", "--kills", "1", "--seed", "11"]
    with running_demo(*sizes, "--json", "--keep", str(root)) as (demo, address):
        shown = shown_while_running(address, demo)
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    assert not answers(address)
    with running_servers(Workspace(root)):
        yield root, {**json.loads(output), "console": shown}
    forget(root / "postgres")


@contextmanager
def running_demo(*more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a demonstration in its own process, and yield it with the address of its console."""
    demo = subprocess.Popen(
        [*COMMAND, "demo", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_sigint,  # noqa: PLW1509  it takes no lock
    )
    try:
        lines: list[str] = []
        for line in demo.stderr:
            lines.append(line)
            if found := re.search(r"the console of this run: (http://127\.0\.0\.1:\d+/)", line):
                yield demo, found[1]
                return
        raise AssertionError(f"no console was announced: {''.join(lines)}")
    finally:
        if demo.poll() is None:
            demo.send_signal(signal.SIGINT)
        demo.communicate()


def shown_while_running(address: str, demo: subprocess.Popen[str]) -> dict[str, object]:
    """What the console shows of the pipeline once it has decided an epoch."""
    while demo.poll() is None:
        with urllib.request.urlopen(f"{address}api/status", timeout=30) as answer:
            found = json.load(answer)["pipelines"]
        if found and found[0]["last_epoch"] is not None:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return {**found[0], "page": answer.read().decode()}
        time.sleep(0.2)
    raise AssertionError("the demonstration ended before its console showed an epoch")


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def test_a_console_shows_the_run_while_it_lasts(kept):
    _, result = kept
    shown = result["console"]
    assert shown["pipeline"] == "demo"
    assert {sink["name"] for sink in shown["sinks"]} == {"orders", "events", "amounts"}
    assert ">demo<" in shown["page"]


def test_ctrl_c_ends_demonstration_and_console_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tmp_path.chmod(0o755)
    with running_demo("--rows", "10", "--epochs", "1", "--kills", "0") as (demo, address):
        assert answers(address)
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        _, messages = demo.communicate(timeout=300)
    assert demo.returncode == 130
    assert "Traceback" not in messages
    assert not answers(address)
    assert psutil.wait_procs(started, timeout=120)[1] == []
    assert [path.name for path in tmp_path.glob("epochal-demo-*")] == []


def test_every_row_is_there_once_after_the_kills(kept):
    _, result = kept
    assert result["rows"] == 3000
    assert result["epochs"] == 6
    assert result["kills"] == 1
    losses = {name: result[name] for name in ("lost", "duplicated", "torn_epochs", "left_in_doubt")}
    assert losses == {"lost": 0, "duplicated": 0, "torn_epochs": 0, "left_in_doubt": 0}


def test_each_target_shows_every_row_to_its_own_client(kept):
    root, _ = kept
    for read in READERS.values():
        assert sorted(read(Workspace(root))["id"].to_pylist()) == list(range(3000))


def test_the_audit_objects_to_lost_rows_and_to_doubled_ones(kept):
    root, _ = kept
    workspace = Workspace(root)
    with psycopg.connect(workspace.addresses.postgres, autocommit=True) as connection:
        connection.execute("INSERT INTO orders SELECT * FROM orders WHERE part = 3")
        assert audit(workspace, rows=3000, parts=6).duplicated == 500
        connection.execute("DELETE FROM orders WHERE part = 3")
    found = audit(workspace, rows=3000, parts=6)
    assert (found.lost, found.torn_epochs) == (500, 1)
    assert not found.is_clean


def test_the_audit_objects_to_what_is_left_in_doubt(kept):
    root, _ = kept
    workspace = Workspace(root)
    before = audit(workspace, rows=3000, parts=6).left_in_doubt
    uid = json.loads(_newest_record(workspace).split(b"\n")[1])["state"]["uid"]
    who = Identity(pipeline="orders", uid=uid, sink="orders", generation=1)
    left = who.handle(0, partition=0, attempt=7)
    with psycopg.connect(workspace.addresses.postgres, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO epochal_staging.slots (slot, target, shape, handle)"
            f" VALUES (999, 'orders', '', '{left}')"
        )
        connection.execute("CREATE TABLE epochal_staging.slot_999 (id bigint)")
        assert audit(workspace, rows=3000, parts=6).left_in_doubt == before + 1 == 1
        connection.execute("DROP TABLE epochal_staging.slot_999")
        connection.execute("DELETE FROM epochal_staging.slots WHERE slot = 999")


def _newest_record(workspace: Workspace) -> bytes:
    return max((workspace.checkpoint / "epochal" / "log").glob("*.json")).read_bytes()


def test_a_seed_repeats_the_same_kills():
    assert list(plan_kills(9, 4)) == list(plan_kills(9, 4))
    assert {kill.step for kill in plan_kills(200, 1)} == set(STEPS)


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine").write_text("precious")
    done = subprocess.run(
        [*COMMAND, "demo", "--keep", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    message = " ".join(done.stderr.replace("│", " ").split())
    assert "is not empty" in message
    assert (tmp_path / "mine").read_text() == "precious"


def test_help_names_every_verb():
    text = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(verb in text for verb in ("demo", "adopt", "fork", "rename"))


def test_an_error_is_one_message_with_its_hint_and_no_traceback(tmp_path):
    done = subprocess.run(
        [*COMMAND, "adopt", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
