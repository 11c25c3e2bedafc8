"""
Executors in processes of their own: killed with SIGKILL, and raced by speculative copies.

What an attempt leaves behind is known here exactly: each leaves a note once its rows are prepared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cluster_driver
import psutil
import psycopg
import pyspark
import pytest
from cluster_driver import EPOCHS, SINKS, Note
from servers.jvm import QUICK
from servers.ports import free_port
from servers.postgres import PostgresServer, debian_binaries, running_server

from epochal.coordinator.journal import read_state
from epochal.logs import checkpoint_log
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.files.ledger import ledgers
from epochal.sinks.files.local import stores_at
from epochal.terms import Handle, Identity, Limits, SinkName

SPARK_HOME = Path(pyspark.__file__).parent
WORKERS = ("127.0.0.2", "127.0.0.3")
DEATHS = {1: "pyspark.daemon", 3: "CoarseGrainedExecutorBackend"}
"""In which epoch a Python worker dies, and in which an executor: part of its command line."""


@contextmanager
def _driver(root: Path, master: str, hold: str, writer: str) -> Iterator[subprocess.Popen[bytes]]:
    cluster_driver.make_source(root)
    command = [sys.executable, cluster_driver.__file__, str(root), master, hold, writer]
    with _running(command, root / "driver.txt", "127.0.0.1", home=_home(root)) as driver:
        yield driver


def _home(root: Path) -> Path:
    """Spark's own files under another roof: `local-cluster` keeps its workers' logs in there."""
    home = root / "spark"
    home.mkdir()
    for path in SPARK_HOME.iterdir():
        (home / path.name).symlink_to(path)
    return home


@contextmanager
def _running(
    command: list[str], output: Path, host: str, home: Path = SPARK_HOME
) -> Iterator[subprocess.Popen[bytes]]:
    env = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": " ".join(QUICK),
    }
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    try:
        yield process
    finally:
        started = _descendants(process)
        process.terminate()
        try:
            process.wait(20)
        finally:
            for one in started:
                if one.is_running():
                    one.kill()
            process.kill()
            process.wait()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_for(what: Callable[[], Any], driver: subprocess.Popen[bytes], root: Path) -> Any:
    deadline = time.monotonic() + 600
    while not (found := what()):
        if driver.poll() not in (None, 0) or time.monotonic() > deadline:
            pytest.fail(f"it never came: {(root / 'driver.txt').read_text()[-4000:]}")
        time.sleep(0.05)
    return found


def _finish(driver: subprocess.Popen[bytes], root: Path) -> list[str]:
    """Wait for the driver's end, and return the errors of the starts that failed."""
    _wait_for(lambda: driver.poll() is not None, driver, root)
    assert driver.returncode == 0, (root / "driver.txt").read_text()[-4000:]
    return json.loads((root / "errors.json").read_text())


def _held(root: Path, epoch: int) -> Note | None:
    """The first attempt that prepared partition 0 of an epoch."""
    found = [note for note in cluster_driver.notes(root, "all") if note.epoch == epoch]
    return next((note for note in found if note.partition == 0 and note.number == 0), None)


@pytest.mark.proof
@pytest.mark.parametrize("writer", ["tasks", "engine"])
def test_executors_and_python_workers_that_are_killed_lose_no_row_and_repeat_none(
    tmp_path: Path, writer: str
) -> None:
    root = tmp_path / "killed"
    killed = []
    with _driver(root, "local-cluster[2,1,1024]", "killed", writer) as driver:
        for epoch, part in DEATHS.items():
            note = _wait_for(lambda epoch=epoch: _held(root, epoch), driver, root)
            victim = _owner(driver, note.pid, part)
            victim.kill()
            psutil.wait_procs([victim], timeout=20)
            killed.append((epoch, note.attempt))
        errors = _finish(driver, root)
    # A worker's death costs an attempt. An executor's may take evaluated rows along, which must
    # not be computed again for one sink alone: then the epoch fails whole, and is started again.
    assert all(error.startswith("epoch 3,") for error in errors), errors
    assert len(errors) <= 1
    _judge(root)
    for epoch, attempt in killed:
        assert len(_prepared(root, epoch)) > 1, "nothing prepared the same rows again"
        if writer == "tasks":
            assert attempt not in _committed(root, epoch)


@pytest.fixture(params=["18", "15"])
def database(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A PostgreSQL server with tables that have keys."""
    binaries = debian_binaries() if request.param == "15" else None
    with running_server(binaries=binaries) as server:
        with psycopg.connect(server.url(), autocommit=True) as admin:
            for statement in cluster_driver.TABLES.values():
                admin.execute(statement)
        yield server


@pytest.mark.proof
def test_prepared_keys_survive_executors_that_are_killed(
    tmp_path: Path, database: PostgresServer
) -> None:
    root = tmp_path / "killed"
    with _driver(root, "local-cluster[2,1,1024]", "killed", database.url()) as driver:
        for epoch, part in DEATHS.items():
            note = _wait_for(lambda epoch=epoch: _held(root, epoch), driver, root)
            assert note.handle in _in_transactions(database), "the first attempt did not prepare"
            victim = _owner(driver, note.pid, part)
            victim.kill()
            psutil.wait_procs([victim], timeout=20)
        errors = _finish(driver, root)
    assert all(error.startswith("epoch 3,") for error in errors), errors
    assert len(errors) <= 1
    _judge_tables(root, database)
    for epoch in DEATHS:
        assert len(_prepared(root, epoch)) > 1, "nothing prepared the same rows again"


@pytest.mark.proof
def test_prepared_keys_survive_speculative_copies(
    standalone: str, tmp_path: Path, database: PostgresServer
) -> None:
    root = tmp_path / "speculated"
    with _driver(root, standalone, "speculated", database.url()) as driver:
        errors = _finish(driver, root)
    assert errors == []
    _judge_tables(root, database)
    copies = _speculative(root)
    for epoch in cluster_driver.HOLDS["speculated"]:
        attempts = _prepared(root, epoch)
        assert attempts & copies, "Spark launched no copy"


def _in_transactions(database: PostgresServer) -> set[str]:
    with psycopg.connect(database.url()) as admin:
        return {name for (name,) in admin.execute("SELECT gid FROM pg_prepared_xacts")}


def _judge_tables(root: Path, database: PostgresServer) -> None:
    """Every row of every epoch in each table, once; nothing prepared or staged is left."""
    state = read_state(checkpoint_log(root / "checkpoint"))
    assert state.is_stopped
    assert (state.last.epoch, state.unsettled) == (EPOCHS - 1, None)
    every = [number for epoch in range(EPOCHS) for number in cluster_driver.numbers(epoch)]
    assert _in_transactions(database) == set()
    with psycopg.connect(database.url()) as admin:

        def ids(query: str) -> list[int]:
            return [number for (number,) in admin.execute(query)]

        assert ids("SELECT id FROM everything ORDER BY 1") == every
        assert ids("SELECT id FROM odd ORDER BY 1") == [number for number in every if number % 2]
        assert ids("SELECT slot FROM epochal_staging.slots WHERE handle IS NOT NULL") == []


def _owner(driver: subprocess.Popen[bytes], pid: int, part: str) -> psutil.Process:
    """The process of a task's worker, or the JVM that it works for: always of this driver."""
    worker = psutil.Process(pid)
    line = [worker, *worker.parents()]
    assert driver.pid in [one.pid for one in line]
    return next(one for one in line if any(part in argument for argument in one.cmdline()))


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """A master with a worker on each of two addresses: Spark speculates on another host only."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    master = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    work = ["--cores", "1", "--memory", "1g", "--webui-port", "0", url]
    deploy = "org.apache.spark.deploy"
    with ExitStack() as stack:

        def start(kind: str, host: str, arguments: list[str]) -> None:
            command = [str(SPARK_HOME / "bin" / "spark-class"), f"{deploy}.{kind}", *arguments]
            stack.enter_context(_running(command, tmp_path / f"{kind}-{host}.txt", host))

        start("master.Master", "127.0.0.1", master)
        for host in WORKERS:
            folder = str(tmp_path / f"work-{host}")
            start("worker.Worker", host, ["--host", host, "--work-dir", folder, *work])
        yield url


@pytest.mark.proof
@pytest.mark.parametrize("writer", ["tasks", "engine"])
def test_speculative_copies_that_also_prepare_leave_every_row_visible_once(
    standalone: str, tmp_path: Path, writer: str
) -> None:
    root = tmp_path / "speculated"
    with _driver(root, standalone, "speculated", writer) as driver:
        errors = _finish(driver, root)
    assert errors == []
    _judge(root)
    copies = _speculative(root)
    for epoch in cluster_driver.HOLDS["speculated"]:
        attempts = _prepared(root, epoch)
        assert len(attempts) == 2, f"epoch {epoch}: {attempts}"
        assert len(attempts & copies) == 1, "Spark launched no copy"
        if writer == "tasks":
            assert len(attempts & _committed(root, epoch)) == 1


def _prepared(root: Path, epoch: int) -> set[int]:
    """The attempts that prepared partition 0 of the sink `all`."""
    found = cluster_driver.notes(root, "all")
    return {note.attempt for note in found if (note.epoch, note.partition) == (epoch, 0)}


def _committed(root: Path, epoch: int) -> set[int]:
    """The attempts whose rows of the sink `all` readers see."""
    (ledger,) = ledgers(stores_at(cluster_driver.folder(root, "all")).ours)
    handles = [Handle.parse(text) for one in ledger.all() for text in one.handles]
    return {handle.attempt for handle in handles if handle.epoch == epoch}


def _speculative(root: Path) -> set[int]:
    """Which attempts were speculative copies, by Spark's event log."""
    (file,) = (root / "events").iterdir()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    tasks = [one["Task Info"] for one in events if one["Event"] == "SparkListenerTaskStart"]
    return {task["Task ID"] for task in tasks if task["Speculative"]}


def _judge(root: Path) -> None:
    """Every row of every epoch in each sink, once; nothing in doubt."""
    state = read_state(checkpoint_log(root / "checkpoint"))
    assert state.is_stopped
    assert (state.last.epoch, state.unsettled) == (EPOCHS - 1, None)
    for epoch in range(EPOCHS):
        numbers = cluster_driver.numbers(epoch)
        assert _ids(root, "all", epoch) == numbers
        assert _ids(root, "odd", epoch) == [n for n in numbers if n % 2]
    for name in SINKS:
        sink = Files(str(cluster_driver.folder(root, name)), name=SinkName(name))
        who = Identity(
            pipeline=state.pipeline, uid=state.uid, sink=sink.name, generation=state.generation
        )
        assert list(sink.committer(who, Limits()).in_doubt()) == []
        assert _files(Path(sink.path)) == _listed(Path(sink.path)), "a file of no epoch is visible"


def _ids(root: Path, sink: str, epoch: int) -> list[int]:
    rows = read_epochs(str(cluster_driver.folder(root, sink)), epochs={epoch}).to_table()
    return sorted(rows["id"].to_pylist())


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def _listed(folder: Path) -> set[str]:
    manifests = [one for ledger in ledgers(stores_at(folder).ours) for one in ledger.all()]
    return {file.path for manifest in manifests for file in manifest.files}
