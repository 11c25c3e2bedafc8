"""The runbook's commands print what the page shows, each in the situation that it is for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from servers.postgres import running_server

from epochal import cli
from epochal.coordinator import by_hand
from epochal.errors import WentBack
from epochal.logs import checkpoint_log
from epochal.protocol.machine import Phase
from epochal.reports.status import status
from epochal.spark.checkpoint import open_checkpoint
from epochal.telemetry.health import Health

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "runbook.md"
_SCENE = re.compile(r"<!-- scene: ([\w-]+) -->\n```\n(.*?)```", re.DOTALL)
SCENES: dict[str, str] = {}
for _name, _block in _SCENE.findall(PAGE.read_text(encoding="utf-8")):
    SCENES[_name] = SCENES.get(_name, "") + _block
JOBS = """
import os, sys, time
import pyarrow as pa
import epochal as ep
import epochal.telemetry.history_writer
from epochal.coordinator import Environment

epochal.telemetry.history_writer.FLUSH_EVERY_S = 0.1
SCHEMA = pa.schema([("id", pa.int64())])
sinks = [ep.Files("out/orders", name="orders"), ep.Files("out/audit", name="audit", format="jsonl")]
if "POSTGRES_URL" in os.environ:
    sinks.append(ep.Postgres(os.environ["POSTGRES_URL"], table="orders", name="table"))
pipeline = ep.Pipeline("shop", sinks=sinks, log="chk/shop/epochal/log")


def wait(file):
    # Until it is killed, or told to go on.
    for _ in range(60_000):
        if os.path.exists(file):
            break
        time.sleep(0.01)


def wait_at(step, epoch):
    if [step, epoch] == [*sys.argv[1:2], 2]:
        print(step, flush=True)
        wait("go")


def session():
    return ep.Session(
        "shop", sinks=sinks, schema=SCHEMA, log="chk/shop/epochal/log",
        environment=Environment(on_step=wait_at),
    )


def run(session, epochs=3):
    for _ in range(epochs):
        session.begin(session.next_epoch)
        session.write([{"id": n} for n in range(3)])
        session.commit()


if __name__ == "__main__":
    try:
        with session() as started:
            run(started)
            print("idle", flush=True)
            wait(f"go-{os.getpid()}")
            run(started, epochs=1)
    except ep.EpochalError as error:
        print(f"error: {error.message} [{error.code}]")
        print(f"hint: {error.hint}")
        sys.exit(error.exit_code)
"""


class Scene:
    """A folder with a pipeline, in the situation of one part of the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""
        """What a driver has printed at its end; the page shows it before the first command."""

    def driver(self, step: str, **more: str) -> subprocess.Popen[str]:
        """A driver that has come to this step of epoch 2, or is `idle` after it."""
        driver = subprocess.Popen(
            [sys.executable, "jobs.py", step],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more},
        )
        assert driver.stdout is not None
        if driver.stdout.readline() != f"{step}\n":
            driver.kill()
            driver.wait()
            pytest.fail(f"the driver did not come to {step}")
        return driver

    def killed(self, step: str, phase: Phase) -> None:
        """A driver that was killed after a step, and its heartbeat has shown that phase."""
        driver = self.driver(step)
        self.await_fact(lambda one: (one.epoch, one.phase) == (2, phase.value))
        _end(driver)

    def ended(self, driver: subprocess.Popen[str]) -> None:
        """A driver that has ended by itself, with what it printed and its exit code."""
        out, _ = driver.communicate(timeout=300)
        self.said += f"{out}exit code {driver.returncode}\n"

    def done(self, epochs: int = 3) -> None:
        import jobs

        with jobs.session() as session:
            jobs.run(session, epochs)

    def await_fact(self, is_so: Callable[[Any], bool]) -> None:
        deadline_s = time.monotonic() + 300
        while not is_so(status("chk").pipelines[0]):
            assert time.monotonic() < deadline_s, status("chk").pipelines[0]
            time.sleep(0.05)


def _end(driver: subprocess.Popen[str]) -> None:
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert driver.stdout is not None
    driver.stdout.close()


def in_doubt(scene: Scene):
    scene.killed("decided", Phase.DECIDED)
    yield


def undecided(scene: Scene):
    scene.killed("gated", Phase.PREPARED)
    yield


def gone(scene: Scene):
    scene.killed("idle", Phase.COMMITTED)
    yield


def retrying(scene: Scene):
    """A database that dies right after the decision."""
    with running_server() as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id bigint)")
        driver = scene.driver("decided", POSTGRES_URL=server.url())
        try:
            server.kill()
            Path("go").touch()
            scene.await_fact(
                lambda one: one.health is Health.RETRYING and "Connection refused" in one.because
            )
            yield
        finally:
            _end(driver)


def went_back(scene: Scene):
    """A folder that was put back from a backup, which a start has noticed."""
    import jobs

    scene.done(epochs=2)
    shutil.copytree("out", "backup")
    scene.done(epochs=1)
    for name in ("orders", "orders.epochal"):
        shutil.rmtree(f"out/{name}")
        shutil.copytree(f"backup/{name}", f"out/{name}")
    with pytest.raises(WentBack):
        jobs.session()
    yield


def thrown_away(scene: Scene):
    """A decided epoch whose prepared files somebody has deleted."""
    scene.killed("decided", Phase.DECIDED)
    for file in Path("out/orders.epochal").rglob("*-e2-*/*"):
        file.unlink()
    yield


def fenced(scene: Scene):
    """A driver that was started beside one that runs, which then finds out."""
    older = scene.driver("idle")
    newer = scene.driver("idle")
    try:
        Path(f"go-{older.pid}").touch()
        scene.ended(older)
        scene.await_fact(lambda one: one.health is Health.OK)
        yield
    finally:
        _end(newer)


def rejected(scene: Scene):
    """A table with a constraint that a row breaks."""
    with running_server() as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id bigint CHECK (id < 2))")
        more = {"POSTGRES_URL": server.url(), "PYTHONPATH": os.pathsep.join(sys.path)}
        scene.ended(
            subprocess.Popen(
                [sys.executable, "jobs.py"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **more},
            )
        )
        yield


def missing_rows(scene: Scene):
    scene.done()
    next(Path("out/orders").glob("*-e2-*")).unlink()
    yield


def copied(scene: Scene):
    scene.done()
    Path("chk/shop/metadata").write_text('{"id": "a"}')  # Spark's, in every checkpoint
    found = open_checkpoint("chk/shop")
    by_hand.adopt(
        checkpoint_log("chk/shop"), location=found.location, query_id=None, position=found.position
    )
    shutil.copytree("chk/shop", "backup/shop")
    yield


def unreadable(scene: Scene):
    scene.done()
    newest = max(Path("chk/shop/epochal/log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:40])
    yield


def settled(scene: Scene):
    scene.done()
    yield


@pytest.fixture
def scene(request, tmp_path, monkeypatch):
    (tmp_path / "jobs.py").write_text(JOBS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    sys.modules.pop("jobs", None)
    scene = Scene(tmp_path)
    playing = globals()[request.param.replace("-", "_")](scene)
    with closing(playing):
        next(playing)
        yield scene
    sys.modules.pop("jobs", None)


def printed(words, capfd, monkeypatch) -> str:
    """What a terminal shows: messages after data, and the exit code if it is not 0."""
    monkeypatch.setattr(sys, "argv", ["epochal", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capfd.readouterr()
    code = ended.value.code or 0
    return captured.out + captured.err + (f"exit code {code}\n" if code else "")


_MASKS = (
    (r"\b\d[\d.,]* ?(ms|s|min|h)\b", "AGE"),
    (r"epochal-[a-z2-7]{12}-[\w-]+", "HANDLE"),
    (r"\b[a-z2-7]{12}\b", "UID"),
    (r"\S+ pid \d+( machine \w+)?", "DRIVER"),
    (r"\bby \w+(?= at |: rows)", "by SOMEBODY"),
    (r"\d{4}-\d\d-\d\d[T ][\d:.+Z-]+( UTC)?", "TIME"),
    (r"127\.0\.0\.1:\d+|port \d+", "SERVER"),
    (r"\d+ attempts? failed", "N attempts failed"),
    (r"[ \t]+", " "),
    (r"(alive, g\d+) [\d.,]* ", r"\1 "),
)


def masked(text: str, folder: Path) -> list[str]:
    """Without what differs from run to run."""
    text = text.replace(str(folder), "/srv/shop")
    for pattern, mask in _MASKS:
        text = re.sub(pattern, mask, text)
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("scene", SCENES, indirect=True)
def test_the_commands_print_what_the_page_shows(scene, request, capfd, monkeypatch):
    """Blocks of one scene follow each other, in the order of the page."""
    capfd.readouterr()
    shown = SCENES[request.node.callspec.params["scene"]]
    seen = scene.said + "".join(
        f"$ epochal {command}\n{printed(shlex.split(command), capfd, monkeypatch)}"
        for command in re.findall(r"^\$ epochal (.*)$", shown, re.MULTILINE)
    )
    assert masked(seen, scene.folder) == masked(shown, scene.folder), seen
