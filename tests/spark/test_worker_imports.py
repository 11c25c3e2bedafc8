"""
Modules that a fresh Python worker loads for a task: unpickle, `writer`, `write`, `prepare`.

A worker pays for each of them before its first row. What only the driver needs is not loaded:
committers, checks, catalogs, operators' commands. Nor is pandas, which costs more than all of ours:
pyarrow imports it as soon as it makes an array or a scalar of Python values (`pa.array`,
`pa.scalar`, `from_pydict`, a Python value given to a compute function) or gives an array to numpy.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from servers import mysql, postgres
from servers.receiver import ReceiverServer

import epochal as ep
from epochal.contract import Sink
from epochal.coordinator import Coordinator
from epochal.coordinator.targets import described
from epochal.logs import open_log
from epochal.protocol.admission import Start
from epochal.spark.task import PrepareTask
from epochal.terms import DEFAULT_LIMITS, EpochNumber
from epochal.testing import broker

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("price", pa.float64()),
        ("paid_at", pa.timestamp("us", "UTC")),
        ("is_new", pa.bool_()),
    ]
)
EPOCH = EpochNumber(0)
MODULES_MAX = {
    "callback": 23,
    "delta": 29,
    "files": 34,
    "files_csv": 34,
    "files_jsonl": 34,
    "http": 27,
    "http_calls": 27,
    "iceberg": 33,
    "kafka": 46,
    "memory": 19,
    "mysql": 41,
    "postgres": 41,
}
"""Modules of ours, without the generated messages of Kafka's protocol."""
OWN = {
    "callback": "sink",
    "delta": "sink table_files writer",
    "files": "backend formats layout local sink target writer",
    "files_csv": "backend formats layout local sink target writer",
    "files_jsonl": "backend formats layout local sink target writer",
    "http": "client errors sink writer",
    "http_calls": "errors sink writer",
    "iceberg": "client data_files errors partitions pyiceberg_private sink table_files types "
    "writer",
    "kafka": "batch_sender client errors receipts records sink transactional_ids transactions "
    "values writer",
    "memory": "client sink store",
    "mysql": "client dialect errors sink slots types writer",
    "postgres": "client copy_format dialect errors sink slots types writer",
}
"""Modules of the sink's own folder."""
NEVER = {
    "delta": {"deltalake"},
    "http_calls": {"httpx"},
    "iceberg": {"pyiceberg.catalog", "sqlalchemy"},
    "mysql": {"sqlalchemy"},
}
"""Libraries that only the driver needs."""
LOADS_PANDAS = {
    "iceberg": "pyiceberg.io.pyarrow, which writes and reads its files, imports pyarrow.dataset",
}
DRIVER_ONLY = re.compile(
    r"^epochal\.(coordinator|logs|registry|reports|telemetry|session|testing)\b"
    r"|^epochal\..*\.(committer|check|operate|ledger)$"
)
_WORKER = """
import json, pickle, sys
import pyarrow as pa
with open(sys.argv[1], "rb") as file:
    job = pickle.load(file)
from epochal.spark.task import prepare
with pa.OSFile(sys.argv[2]) as file:
    receipt = prepare(job, iter(pa.ipc.open_stream(file)), partition=0, attempt=7)
print(json.dumps([receipt.rows, receipt.fingerprint.hash_sum, sorted(sys.modules)]))
"""

Make = Callable[[Path, ExitStack], Sink]


def _called(epoch: object) -> None:
    """What a callback sink would call."""


def _postgres(folder: Path, stack: ExitStack) -> Sink:
    server = stack.enter_context(postgres.running_server())
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE orders (id bigint, name text, price float8, paid_at timestamptz,"
            " is_new bool)"
        )
    return ep.Postgres(server.url(), table="orders")


def _mysql(folder: Path, stack: ExitStack) -> Sink:
    server = stack.enter_context(mysql.running_server())
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE shop")
        cursor.execute(
            "CREATE TABLE shop.orders (id bigint, name text, price double, paid_at datetime(3),"
            " is_new bool)"
        )
    return ep.MySQL(server.url(database="shop"), table="orders")


def _kafka(folder: Path, stack: ExitStack) -> Sink:
    bootstrap = stack.enter_context(broker())
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("orders", 2)])["orders"].result(30)
    return ep.Kafka(bootstrap, topic="orders", key="id", value=ep.json("*"))


def _http(folder: Path, stack: ExitStack) -> Sink:
    receiver = ReceiverServer(folder / "receiver")
    stack.callback(receiver.kill)
    receiver.start()
    return ep.Http(receiver.url)


def _http_calls(folder: Path, stack: ExitStack) -> Sink:
    return ep.Http("http://localhost:9/", mode="idempotency-key", spool=folder / "spool")


def _iceberg(folder: Path, stack: ExitStack) -> Sink:
    lake = {"type": "sql", "uri": f"sqlite:///{folder}/lake.db", "warehouse": f"file://{folder}"}
    catalog = load_catalog("lake", **lake)
    stack.callback(catalog.close)
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", schema=SCHEMA)
    return ep.Iceberg("lake.shop.orders", properties=lake)


def _delta(folder: Path, stack: ExitStack) -> Sink:
    DeltaTable.create(str(folder / "table"), SCHEMA)
    return ep.Delta(folder / "table")


SINKS: dict[str, Make] = {
    "callback": lambda folder, _: ep.Callback(_called, spool=folder / "spool"),
    "delta": _delta,
    "files": lambda folder, _: ep.Files(str(folder / "out"), partition_by=["is_new"]),
    "files_csv": lambda folder, _: ep.Files(str(folder / "out"), format="csv"),
    "files_jsonl": lambda folder, _: ep.Files(str(folder / "out"), format="jsonl"),
    "http": _http,
    "http_calls": _http_calls,
    "iceberg": _iceberg,
    "kafka": _kafka,
    "memory": lambda _folder, _stack: ep.Memory(),
    "mysql": _mysql,
    "postgres": _postgres,
}


@pytest.fixture(scope="module", params=SINKS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A sink's kind, and all modules that a new process has loaded when it has prepared."""
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        sink = SINKS[request.param](folder, stack)
        job = _job(sink, folder, stack)
        yield request.param, _prepare_in_new_process(job, folder)


def _job(sink: Sink, folder: Path, stack: ExitStack) -> PrepareTask:
    coordinator = Coordinator(log=open_log(str(folder / "log")), sinks=[sink])
    stack.callback(coordinator.stop)
    start = Start(pipeline="imports", location=str(folder), sinks=described([sink]))
    coordinator.start(start, {sink.name: SCHEMA})
    coordinator.begin(EPOCH)
    coordinator.preparing()
    return PrepareTask(
        sink=sink,
        identity=coordinator.identity(sink.name),
        epoch=EPOCH,
        schema=SCHEMA,
        handout=coordinator.handout(sink.name),
        limits=DEFAULT_LIMITS,
        is_hashed=True,
    )


def _prepare_in_new_process(job: PrepareTask, folder: Path) -> list[str]:
    pickled, rows = folder / "job.pickle", folder / "rows.arrow"
    pickled.write_bytes(pickle.dumps(job))
    arriving = SCHEMA.append(pa.field("hash", pa.int64()))
    with pa.OSFile(str(rows), "wb") as file, pa.ipc.new_stream(file, arriving) as stream:
        columns = {
            "id": [1, 2, 3],
            "name": ["a", "b", None],
            "price": [1.5, None, 2.0],
            "paid_at": [0, None, 1_000],
            "is_new": [True, None, False],
            "hash": [-1, 3, 2**62],
        }
        stream.write(pa.RecordBatch.from_pydict(columns, schema=arriving))
    done = subprocess.run(
        [sys.executable, "-c", _WORKER, str(pickled), str(rows)],
        capture_output=True,
        check=False,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    written, hash_sum, modules = json.loads(done.stdout.splitlines()[-1])
    assert (written, hash_sum) == (3, 2**62 + 2)
    return modules


def test_a_worker_loads_few_modules_of_ours(loaded) -> None:
    kind, modules = loaded
    ours = [name for name in modules if name.startswith("epochal.") and ".messages." not in name]
    assert len(ours) <= MODULES_MAX[kind], "\n".join(ours)


def test_a_worker_loads_the_writer_of_its_sink_and_what_that_needs(loaded) -> None:
    kind, modules = loaded
    folder = f"epochal.sinks.{kind.partition('_')[0]}."
    own = [name.removeprefix(folder) for name in modules if name.startswith(folder)]
    assert [name for name in own if "." not in name] == OWN[kind].split()


def test_a_worker_loads_nothing_that_only_the_driver_needs(loaded) -> None:
    kind, modules = loaded
    assert not [name for name in modules if DRIVER_ONLY.search(name)]
    assert not NEVER.get(kind, set()).intersection(modules)


def test_a_worker_does_not_load_pandas(loaded) -> None:
    kind, modules = loaded
    assert ("pandas" in modules) == (kind in LOADS_PANDAS)
