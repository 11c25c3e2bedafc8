"""The verbs of operators: data on stdout, messages on stderr, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from epochal import __version__, cli
from epochal.cli.output import show_table
from epochal.errors import Refused

JOB = """
import os, sys, time
import pyarrow as pa
import epochal as ep
from epochal.coordinator import Environment

SCHEMA = pa.schema([("id", pa.int64())])
sinks = [ep.Files("out/orders", name="orders"), ep.Files("out/audit", name="audit", format="jsonl")]
pipeline = ep.Pipeline("shop", sinks=sinks, log="chk/epochal/log")
not_a_pipeline = 7


def made():
    return pipeline


def session(watch=lambda step, epoch: None):
    return ep.Session(
        "shop",
        sinks=sinks,
        schema=SCHEMA,
        log="chk/epochal/log",
        environment=Environment(on_step=watch),
    )


def run(session, epochs):
    for _ in range(epochs):
        session.begin(session.next_epoch)
        session.write([{"id": n} for n in range(3)])
        session.commit()


def sleep_when_decided(step, epoch):
    if step == "decided" and epoch == 2:
        print("decided", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    run(session(sleep_when_decided), 3)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "jobs.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("jobs", None)


@pytest.fixture
def epochal(capsys, monkeypatch):
    """Run a command; returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["epochal", *arguments])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.delenv("EPOCHAL_DEBUG", raising=False)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return (0 if code is None else code), captured.out, captured.err

    return run


@pytest.fixture
def killed(place):
    """A driver that died by SIGKILL between its decision and the first commit."""
    driver = subprocess.Popen(
        [sys.executable, "jobs.py"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert driver.stdout.readline() == b"decided\n"
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    return place


def test_a_killed_driver_is_seen_recovered_and_audited_from_the_command_line(killed, epochal):
    code, out, err = epochal("status", "chk")
    assert code == 3
    assert "in doubt" in out
    assert "epoch 2 is decided and not committed on orders, audit" in err

    code, out, _ = epochal("verify", "jobs:pipeline")
    assert code == 0
    assert out.count("epoch 2 (3 rows) is decided and not committed yet") == 2

    code, out, err = epochal("recover", "jobs:pipeline", "--dry-run")
    assert code == 0
    assert "would: commit epoch 2 on orders: 1 receipt (1 unknown)" in out
    assert rows(killed) == 6

    code, out, err = epochal("recover", "jobs:pipeline", "--json")
    assert (code, json.loads(out)["report"]) == (0, "recovery")
    assert rows(killed) == 9

    code, out, _ = epochal("recover", "jobs:pipeline")
    assert (code, out) == (0, "done: nothing is in doubt\n")
    assert epochal("status", "chk")[0] == 0

    code, out, _ = epochal("epochs", "chk", "--json")
    assert [one["epoch"] for one in json.loads(out)["epochs"]] == [2, 1, 0]

    code, out, err = epochal("verify", "jobs:made")
    assert code == 0
    assert "agrees" in out
    next(Path("out/orders").glob("epochal-*")).unlink()
    code, out, err = epochal("verify", "jobs:pipeline")
    assert code == 1
    assert "3 rows missing: 9 decided, 6 visible" in err


def rows(place: Path) -> int:
    import pyarrow.dataset as ds

    return ds.dataset(str(place / "out" / "orders"), exclude_invalid_files=False).count_rows()


def test_the_doctor_lists_problems_until_they_are_resolved(killed, epochal):
    code, out, err = epochal("doctor", "jobs:pipeline")
    assert code == 1
    assert "problem: epoch 2 is decided and not settled" in err
    assert "hint: `epochal recover jobs:pipeline --dry-run`" in err
    finish = ["resolve", "finish", "jobs:pipeline", "--sink", "orders", "--epoch", "2"]
    assert epochal(*finish)[:2] == (0, "epoch 2 is committed on 'orders'\n")
    assert epochal(*finish)[:2] == (0, "epoch 2 is committed on 'orders' already\n")
    give_up = ["resolve", "give-up", "jobs:pipeline", "--sink", "audit", "--epoch", "2"]
    code, out, err = epochal(*give_up, "--kept-at", "backup", "--because", "gone", "--dry-run")
    assert (code, out) == (
        0,
        "would give up sink 'audit' of epoch 2; its rows are kept at backup\n",
    )
    assert epochal(*give_up, "--kept-at", "backup", "--because", "gone")[0] == 0
    code, out, err = epochal(*give_up, "--kept-at", "elsewhere", "--because", "twice")
    assert (code, "already; its rows are kept at backup" in out) == (0, True)
    assert epochal("recover", "jobs:pipeline")[0] == 0
    code, out, err = epochal("doctor", "jobs:pipeline")
    assert (code, "no problems" in err) == (0, True)
    assert epochal("verify", "jobs:pipeline")[0] == 0


def test_a_session_is_paused_and_resumed_from_the_command_line(place, epochal):
    import jobs

    with jobs.session() as session:
        jobs.run(session, 1)
        code, _, err = epochal("pause", "jobs:pipeline", "--because", "an upgrade", "--wait", "0.1")
        assert code == 1
        assert "paused by" in err
        assert "the driver has not stopped within 0 s" in err
        jobs.run(session, 1)  # it learns of the pause by this decision
        with pytest.raises(Refused, match="an upgrade"):
            session.begin(2)
    code, _, err = epochal("pause", "chk", "--because", "again", "--wait", "60")
    assert code == 0
    assert "an upgrade" in err
    assert "the last driver stopped cleanly" in err
    code, _, err = epochal("status", "chk")
    assert code == 0
    assert "hint: `epochal resume" in err
    with pytest.raises(Refused, match="paused by"):
        jobs.session()
    assert epochal("resume", "chk")[0] == 0
    with jobs.session() as session:
        jobs.run(session, 1)
    assert rows(place) == 9


def test_small_files_are_compacted_and_what_can_not_be_is_said(place, epochal, monkeypatch):
    import jobs

    import epochal as ep

    lake = ep.Delta(str(place / "lake"), create_table="if_missing", name="lake")
    monkeypatch.setattr(jobs.pipeline, "sinks", (*jobs.sinks, lake))
    jobs.sinks.append(lake)
    with jobs.session() as session:
        jobs.run(session, 3)
    code, out, _ = epochal("compact", "jobs:pipeline", "--sink", "lake", "--dry-run")
    assert (code, out) == (0, "lake: 3 files would become about 1\n")
    code, out, _ = epochal("compact", "jobs:pipeline", "--json")
    sinks = json.loads(out)["sinks"]
    assert (code, sinks["lake"]["files_before"], sinks["lake"]["files_after"]) == (0, 3, 1)
    assert "readers of a folder go by the files in it" in sinks["orders"]["result"]


def test_the_log_is_exported_and_a_dropped_pipeline_leaves_its_rows(place, epochal):
    import jobs

    with jobs.session() as session:
        jobs.run(session, 2)
    code, out, _ = epochal("log", "export", "chk")
    assert [record["kind"] for record in json.loads(out)["records"]] == [
        "claim",
        "commit",
        "commit",
        "stop",
    ]
    code, out, _ = epochal("drop", "jobs:pipeline", "--dry-run")
    assert (code, "would remove: 4 records" in out) == (0, True)
    assert epochal("drop", "jobs:pipeline")[0] == 0
    code, _, err = epochal("status", "chk")
    assert (code, "holds no epoch log" in err) == (1, True)
    assert rows(place) == 6
    assert epochal("grants", "jobs:pipeline")[0] == 0
    assert epochal("staging", "jobs:pipeline") == (0, "", "no sink has staging='fixed'\n")


def test_a_running_driver_is_not_fenced_unless_requested(place, epochal):
    import jobs

    with jobs.session() as session:
        jobs.run(session, 1)
        code, out, err = epochal("recover", "jobs:pipeline")
        assert (code, out) == (1, "")
        assert "seems to be running" in err
        assert "hint: stop that driver first" in err
        jobs.run(session, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "nowhere"], "nowhere holds no epoch log [refused]\nhint: "),
        (["epochs", "nowhere"], "holds no epoch log"),
        (["recover", "nowhere"], "holds no epoch log"),
        (["grants", "nowhere"], "a log holds no credentials"),
        (["recover", "missing:pipeline"], "there is no module 'missing'"),
        (["recover", "jobs:missing"], "has no attribute 'missing'"),
        (["recover", "jobs:not_a_pipeline"], "is a int, not a Pipeline"),
        (["recover", "broken:pipeline"], "could not be loaded: ZeroDivisionError"),
        (["verify", "jobs:pipeline"], "holds no epoch log"),
        (["verify", "jobs:pipeline", "--source"], "does not say what its stream is"),
        (
            ["verify", "jobs:pipeline", "--stream", "jobs:not_a_pipeline"],
            "is a int, not a function",
        ),
        (["status", "s3://bucket/x", "--json"], "cannot list"),
        (["status", "hdfs://name:8020/chk"], "hint: a start of the pipeline recovers by itself"),
        (["epochs", "hdfs://name:8020/chk"], "hint: a start of the pipeline recovers by itself"),
        (["init", "nowhere/orders.yaml"], "can't be written: No such file or directory"),
        (["doctor", "chk", "--checkpoint", "chk"], "is a place, and so is --checkpoint"),
        (
            ["epochs", "postgresql://nobody@127.0.0.1:1/none#x"],
            "cannot reach postgresql://127.0.0.1:1",
        ),
    ],
)
def test_bad_input_ends_in_one_message_with_a_hint(place, epochal, monkeypatch, arguments, message):
    (place / "broken.py").write_text("1 / 0")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-value")
    code, out, err = epochal(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert "secret-value" not in err


def test_a_corrupt_log_is_reported_by_its_code_with_exit_code_3(place, epochal):
    folder = place / "chk" / "epochal" / "log"
    folder.mkdir(parents=True)
    (folder / "00000000000000000001.json").write_bytes(b"torn")
    code, _, err = epochal("status", "chk")
    assert (code, "[corrupt-record]" in err) == (3, True)
    assert epochal("epochs", "chk")[0] == 1


def test_a_narrow_terminal_truncates_no_cell(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    where = "s3://lake/checkpoints/of/a/department/and/of/its/orders"
    because = "rows in the files that manifests name, counted in the files"
    show_table(["pipeline", "health", "where"], [["orders", "in doubt", where]])
    show_table(["epoch", "by phase", "why"], [["7", "x" * 50, "full disk"]], optional=["by phase"])
    show_table(["sink", "what was counted"], [["orders", because]])
    captured = capsys.readouterr()
    assert "left out on this narrow terminal: by phase" in captured.err
    out = captured.out
    assert where in out
    assert "xxx" not in out
    assert "…" not in out
    assert because.split() == out.partition("what was counted")[2].split("orders", 1)[1].split()


def test_wrong_arguments_are_a_usage_error(epochal):
    assert epochal("recover")[0] == 2
    assert epochal("resolve", "finish", "jobs:pipeline")[0] == 2


def test_status_takes_a_pipeline_too(killed, epochal):
    (killed / "shop.yaml").write_text(
        "pipeline: shop\ncheckpoint: chk\nsource: {format: rate}\n"
        "sinks:\n  - {kind: files, path: out}\n"
    )
    below = epochal("status", "chk")
    assert below[0] == 3
    table = [re.sub(r"\d+ s", "", line) for line in below[1].splitlines()]
    for named in ("shop.yaml", "jobs:pipeline"):
        code, out, _ = epochal("status", named)
        assert code == 3
        assert [re.sub(r"\d+ s", "", line) for line in out.splitlines()] == table


def test_status_of_a_pipeline_that_was_never_started_is_no_broken_log(place, epochal):
    code, _, err = epochal("status", "jobs:pipeline")
    assert (code, "jobs:pipeline holds no epoch log" in err) == (1, True)
    code, _, err = epochal("doctor", "jobs:pipeline")
    assert (code, f"nothing was started there; relative paths begin at {place}" in err) == (1, True)


def test_the_version_is_printed(epochal):
    assert epochal("--version") == (0, f"epochal {__version__}\n", "")


def test_debug_shows_the_stack_trace(place):
    ran = subprocess.run(
        [sys.executable, "-m", "epochal.cli", "--debug", "status", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr


PARTS = {"log": ["export"], "resolve": ["finish", "give-up", "abort", "accept"]}


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_teaches_with_an_example_of_its_own(epochal, verb):
    for part in PARTS.get(verb, [""]):
        code, out, _ = epochal(*f"{verb} {part}".split(), "--help")
        examples = [line for line in out.splitlines() if "Example: " in line]
        assert code == 0
        assert examples, part
        assert all(f"Example: epochal {verb} {part}".strip() in line for line in examples)
        assert all(line.count("Example: ") == 1 for line in examples)


CHANGING = {
    "recover": (),
    "resolve finish": ("--sink", "orders", "--epoch", "2"),
    "resolve give-up": ("--sink", "orders", "--epoch", "2", "--kept-at", "x", "--because", "y"),
    "resolve abort": ("--sink", "orders", "--name", "{handle}"),
    "resolve accept": ("--sink", "orders", "--because", "y"),
    "repair": ("--sink", "orders"),
    "compact": (),
    "drop": (),
    "adopt": (),
    "fork": (),
    "rename": ("stall",),
}
"""Verbs that commit, remove or fence, with what they need to do so for a killed driver."""
OF_A_CHECKPOINT = {"adopt", "fork", "rename"}
"""Of these, those that take the checkpoint and not the pipeline."""
OTHERS = {
    "demo": "in a folder of its own",
    "init": "writes a file, if there is none",
    "validate": "reads",
    "run": "is the pipeline itself",
    "broker": "a server",
    "receiver": "a server",
    "status": "reads",
    "epochs": "reads",
    "visible": "reads",
    "doctor": "reads",
    "verify": "reads",
    "pause": "is undone by resume",
    "resume": "is undone by pause",
    "grants": "prints",
    "staging": "prints",
    "log export": "reads",
    "metrics": "prints",
    "console": "a server that reads",
}


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_every_verb_that_commits_or_removes_has_a_dry_run() -> None:
    verbs = dict(commands(typer.main.get_command(cli.application())))
    assert verbs.keys() == CHANGING.keys() | OTHERS.keys()
    dry = {
        verb
        for verb, command in verbs.items()
        if any("--dry-run" in one.opts for one in command.params)
    }
    assert set(CHANGING) <= dry


@pytest.mark.parametrize("verb", CHANGING)
def test_a_dry_run_changes_no_file(killed, epochal, verb):
    """Neither of the log nor of a target; whether there is anything to do or not."""
    before = contents(killed)
    handle = next(found.name for found in before if "-e2-" in found.name)
    given = [one.replace("{handle}", handle) for one in CHANGING[verb]]
    target = "chk" if verb in OF_A_CHECKPOINT else "jobs:pipeline"
    code, _, err = epochal(*verb.split(), target, *given, "--dry-run")
    assert code != 2, err
    assert contents(killed) == before


def test_a_dry_run_says_what_would_become_of_a_copied_checkpoint(place, epochal):
    import jobs

    with jobs.session() as session:
        jobs.run(session, 2)
    shutil.copytree("chk", "copy")
    code, _, err = epochal("fork", "copy", "--dry-run")
    assert (code, err) == (
        0,
        f"would be pipeline 'shop', a new uid, at {place}/copy: next epoch 2\n",
    )
    code, _, err = epochal("adopt", "copy", "--dry-run")
    assert code == 0
    assert err.startswith("would be pipeline 'shop', uid ")
    assert epochal("rename", "copy", "stall", "--dry-run")[2].startswith(
        "would be pipeline 'stall'"
    )
    code, _, err = epochal("fork", "chk/epochal/log", "--dry-run")
    assert (code, "it is the original, not a copy" in err) == (1, True)


def test_a_moved_checkpoint_whose_log_is_kept_elsewhere_is_adopted_and_renamed(place, epochal):
    import jobs

    with jobs.session() as session:
        jobs.run(session, 2)
    shutil.move("chk/epochal/log", "kept")
    shutil.move("chk", "moved")
    code, _, err = epochal("adopt", "moved")
    assert (code, "moved" in err) == (1, True), "its own folder has no log"
    code, _, err = epochal("adopt", "moved", "--log", "kept")
    assert (code, f"at {place}/moved: next epoch 2" in err) == (0, True)
    code, _, err = epochal("rename", "moved", "stall", "--log", "kept")
    assert (code, "pipeline 'stall'" in err) == (0, True)


def contents(place: Path) -> dict[Path, bytes]:
    return {
        found: found.read_bytes()
        for found in place.rglob("*")
        if found.is_file() and "__pycache__" not in found.parts
    }
