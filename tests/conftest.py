"""What all tests share."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psutil import virtual_memory
from servers.jvm import make_archive, speed_up_spark
from xdist.scheduler import LoadFileScheduling

from epochal.spark.local_session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController


_SPARKS = {
    *("cli/test_demo.py", "cli/test_verify.py", "cli/test_verify_python.py", "docs/test_docs.py"),
    *("broker/test_spark.py", "examples/test_sqlite_package.py", "docs/test_docs_types.py"),
    *("sinks/delta/test_spark.py", "sinks/files/test_s3_spark.py", "sinks/test_four_at_once.py"),
    *("spark/test_clusters.py", "spark/test_kills.py", "proof/test_model.py"),
    *("spark/test_connect.py", "test_secrets.py", "examples/test_programs.py"),
    *("cli/test_run.py", "examples/test_notebook.py", "docs/test_debezium.py"),
}
"""Files that keep the cores busy, beside those that share the local Spark."""
_LONG = {
    *("broker/test_like_apache.py", "broker/test_real_clients.py", "console/test_console.py"),
    *("kafka/test_broker.py", "storage/test_processes.py", "testing/test_crash.py"),
    *("storage/test_etcd.py",),
    *("sinks/files/test_s3.py", "sinks/files/test_s3_conformance.py"),
    *("sinks/http/test_conformance.py", "sinks/http/test_faults.py"),
    *("sinks/iceberg/test_conformance.py", "sinks/delta/test_conformance.py"),
    *("sinks/kafka/test_conformance.py", "sinks/kafka/test_faults.py"),
    *("sinks/kafka/test_transactions.py", "sinks/mysql/test_conformance.py"),
    *("sinks/mysql/test_strategies.py", "sinks/mysql/test_faults.py"),
    *("sinks/postgres/test_conformance.py", "sinks/postgres/test_crashes.py"),
    *("sinks/postgres/test_faults.py", "sinks/postgres/test_shared_transactions.py"),
    *("sinks/postgres/test_strategies.py", "storage/test_every_store.py"),
    *("sinks/postgres/test_modes.py", "sinks/postgres/test_types.py", "sinks/mysql/test_modes.py"),
    *("sinks/mysql/test_refused_rows.py", "sinks/mysql/test_prepared_keys.py"),
    *("sinks/iceberg/test_evolution.py", "sinks/kafka/test_crashes.py", "reports/test_health.py"),
    *("sinks/kafka/test_values_avro.py", "broker/test_cluster.py"),
    *("broker/test_like_apache_before.py", "broker/test_own_client.py"),
}
"""Files of twenty seconds and more that wait for servers."""
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 6 << 30
_SPARK = "spark"
_SPARK_WORKERS = 2


def pytest_configure(config: pytest.Config) -> None:
    """Every Spark of this run, in this process or in others, starts quickly."""
    # Before anything imports grpc: see `epochal.storage.etcd_client`.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    if not hasattr(config, "workerinput"):
        make_archive()
        if _has_room(_MEMORY):
            # Read by pytest when it makes the folder that all `tmp_path` of the run are in.
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    speed_up_spark()
    if sys.version_info < (3, 11, 8):
        ast.parse = partial(_parse_alone, ast.parse)


def _parse_alone(parse: Any, *words: Any, **settings: Any) -> Any:
    """
    Parse while no other thread does, as tracebacks that are formatted do, too: where the garbage
    collector lets one in, these releases of Python raise a SystemError (gh-106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return parse(*words, **settings)
    finally:
        if was_enabled:
            gc.enable()


def _has_room(memory: Path) -> bool:
    """Whether folders of tests can be in memory; stores sync, and a disk takes 10 ms for it."""
    if not os.access(memory, os.W_OK):
        return False
    room = os.statvfs(memory)
    is_large = min(room.f_bavail * room.f_frsize, virtual_memory().available) > _ROOM_BYTES
    return is_large and not room.f_flag & os.ST_NOEXEC


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long goes first, as the last file keeps everybody waiting."""
    here = Path(__file__).parent
    long = {here / name for name in _SPARKS | _LONG}
    long |= {item.path for item in items if _SPARK in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path not in long, item.path))


class ByServers(LoadFileScheduling):
    """
    Gives a worker files whose servers it runs already. A folder shares its servers, and all folders
    share a Spark, which takes some ten seconds of a core to start: only two workers do.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=partial(self._rank, node)), last=False)
        super()._assign_work_unit(node)

    def _rank(self, node: WorkerController, file: str) -> tuple[bool, bool, bool]:
        """Long files first; of these one that needs no new server, or one that nobody runs yet."""
        wanted = _servers(file)
        running = [{_servers(one) for one in files} for files in self.assigned_work.values()]
        enough = _SPARK_WORKERS if wanted == _SPARK else 1
        return (
            not _is_long(file),
            all(wanted != _servers(one) for one in self.assigned_work[node]),
            sum(wanted in one for one in running) >= enough,
        )


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServers:
    return ByServers(config, log)


def _is_long(file: str) -> bool:
    return _servers(file) == _SPARK or file.removeprefix("tests/") in _SPARKS | _LONG


@cache
def _servers(file: str) -> str:
    """By the text of the file: a wrong guess costs a few seconds."""
    path = Path(file)
    is_on_spark = path.is_file() and re.search(r"[(\s]spark[:,)]", path.read_text(encoding="utf-8"))
    return _SPARK if is_on_spark or path.parent.name == _SPARK else str(path.parent)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small local Spark for the whole run."""
    session = local_session("epochal-tests", threads=2)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, which only root can mount."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "epochal-tests", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        # CI runs as root, and must not lose this test unnoticed.
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up("this user can't mount a small disk; errors of the disk are also made up above")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
