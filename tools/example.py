"""
Run one of examples/ with the servers that it needs, and show what readers find: `make example`.

    python tools/example.py orders
    python tools/example.py orders /tmp/orders     in a folder that stays, to run it again
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

import epochal as ep
from epochal.broker.embedded import broker
from epochal.demo.servers import forget, running_postgres

TOPIC = "orders.v1"
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


@contextmanager
def _postgres(folder: Path) -> Iterator[dict[str, str]]:
    with running_postgres(folder / "postgres") as url:
        yield {"POSTGRES_URL": url}


@contextmanager
def _kafka(folder: Path) -> Iterator[dict[str, str]]:
    with broker(folder / "kafka") as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        if TOPIC not in admin.list_topics(timeout=30).topics:
            admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(30)
        yield {"KAFKA_BOOTSTRAP": bootstrap}


def show_table(name: str) -> Callable[[dict[str, str], Path], None]:
    def show(env: dict[str, str], _folder: Path) -> None:
        with psycopg.connect(env["POSTGRES_URL"]) as connection:
            _show(f"table {name}", connection.execute(f"SELECT * FROM {name} ORDER BY 1"))  # noqa: S608  our own names

    return show


def show_topic(env: dict[str, str], _folder: Path) -> None:
    settings = {"group.id": "reader", "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": env["KAFKA_BOOTSTRAP"], **settings})
    consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])
    found = []
    while (message := consumer.poll(20)) is not None and message.error() is None:
        found.append((message.value() or b"").decode())
    consumer.close()
    _show(f"topic {TOPIC}", found)


def show_files(name: str) -> Callable[[dict[str, str], Path], None]:
    def show(_env: dict[str, str], folder: Path) -> None:
        _show(f"folder {name}", ep.read_epochs(folder / name).to_table().to_pylist())

    return show


def show_sqlite(_env: dict[str, str], folder: Path) -> None:
    with closing(sqlite3.connect(folder / "events.db")) as connection:
        _show("table events", connection.execute("SELECT * FROM events ORDER BY id"))


def _show(title: str, rows: object) -> None:
    print(f"{title}:")
    for row in rows:  # type: ignore[attr-defined]
        print(f"  {row}")


PROGRAMS = {
    "orders": ("orders", [_postgres, _kafka], [show_table("orders"), show_topic]),
    "changes": ("changes", [_postgres], [show_table("customers"), show_table("customers_deleted")]),
    "events": ("events", [], []),
    "payments": (
        "payments",
        [_postgres],
        [show_table("payments"), show_files("refused"), show_files("large")],
    ),
    "own_sink": ("events", [], [show_sqlite, show_files("archive")]),
}
"""By name: the folder of its input, its servers, and what is shown afterwards."""


def run(name: str, folder: Path) -> None:
    source, servers, shows = PROGRAMS[name]
    with ExitStack() as stack:
        env = {"FOLDER": str(folder), "INPUT": str(EXAMPLES / "input" / source)}
        for server in servers:
            env |= stack.enter_context(server(folder))
        path = os.pathsep.join([str(EXAMPLES / "epochal-sqlite"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            env={**os.environ, **env, "PYTHONPATH": path},
            check=True,
        )
        for show in shows:
            show(env, folder)


def main() -> None:
    given = sys.argv[1:]
    if not given or given[0] not in PROGRAMS:
        sys.exit(f"usage: make example NAME={'|'.join(PROGRAMS)} [FOLDER=…]")
    name, *more = given
    if more:
        folder = Path(more[0]).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run(name, folder)
        return
    folder = Path(tempfile.mkdtemp(prefix=f"epochal-{name}-"))
    try:
        run(name, folder)
    finally:
        forget(folder / "postgres")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
