"""Drivers that are killed, their targets, and what every reader of these must find in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import victim
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from servers.postgres import running_server
from servers.processes import await_paused

from epochal.coordinator import read_state
from epochal.logs import checkpoint_log
from epochal.protocol.state import State
from epochal.sinks.files import read_epochs
from epochal.terms import Identity, Limits
from epochal.testing import broker

KILLS = int(os.environ.get("EPOCHAL_KILLS", "13"))
SEED = int(os.environ.get("EPOCHAL_KILLS_SEED", "20261117"))
PARTITIONS = 2
TO_THE_END = ""
_ENDS_WITHIN_S = 300


class Driver:
    """One life of the driver, in a process group of its own with its JVM."""

    def __init__(self, root: Path, program: str) -> None:
        self._root = root
        # Into a file: the JVM outlives its driver for a moment, and would keep a pipe open.
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, program, str(root)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    @property
    def _output(self) -> Path:
        return self._root / "driver.txt"

    def live(self, death: str) -> str:
        """Let it work until it dies, is frozen, or has nothing left to do; returns which."""
        note = self._root / victim.DIED
        note.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{death}\n")
        self._process.stdin.close()
        if death.startswith("freeze") and await_paused(self._process, _ENDS_WITHIN_S):
            return note.read_text()
        code = self._process.wait(_ENDS_WITHIN_S)
        if code == 0:
            return TO_THE_END
        if code != -signal.SIGKILL and not death.startswith("jvm"):
            pytest.fail(f"exit code {code}: {self._output.read_text()[-4000:]}")
        return note.read_text()

    def thaw(self) -> None:
        """It goes on where it was frozen, and must end by itself: its successor has claimed."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.wait(_ENDS_WITHIN_S) != 0, "a fenced driver ended as if all were well"

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


def lives(root: Path, ends: Sequence[str], program: str = victim.__file__) -> Iterator[str]:
    """
    Drivers one after the other, each with one epoch more to write; how each has ended.

    While one works the next starts its Spark, and no more than that. A frozen one is thawed when
    its successor has ended.
    """
    frozen: Driver | None = None
    drivers = [Driver(root, program)]
    try:
        for epoch, death in enumerate(ends):
            if epoch + 1 < len(ends):
                drivers.append(Driver(root, program))
            victim.add_epoch(root, epoch)
            yield drivers[epoch].live(death)
            if frozen is not None:
                frozen.thaw()
            frozen = drivers[epoch] if death.startswith("freeze") else None
    finally:
        for driver in drivers:
            driver.kill()


@contextmanager
def running_targets(folder: Path) -> Iterator[Path]:
    """The folder of the drivers; a table and a topic per pipeline."""
    (folder / "in").mkdir()
    with running_server() as server, broker() as bootstrap:
        victim.Targets(postgres=server.url(), kafka=bootstrap).save(folder)
        with psycopg.connect(server.url(), autocommit=True) as connection:
            for name in victim.QUERIES:
                connection.execute(f"CREATE TABLE {name} (id bigint, value bigint)")
        admin = AdminClient({"bootstrap.servers": bootstrap})
        topics = [NewTopic(name, PARTITIONS) for name in victim.QUERIES]
        for made in admin.create_topics(topics).values():
            made.result(30)
        yield folder


def judge(root: Path, pipeline: str, rows: list[tuple[int, int]]) -> State:
    """Every target shows these rows once, and nothing is in doubt anywhere."""
    assert read_files(root, pipeline) == rows
    assert read_table(root, pipeline) == rows
    assert read_topic(root, pipeline) == rows
    state = read_state(checkpoint_log(root / pipeline))
    assert state is not None
    assert (state.is_stopped, state.unsettled) == (True, None)
    assert left_behind(root, state) == []
    return state


def expected(numbers: range) -> dict[str, list[tuple[int, int]]]:
    last = numbers[-1]
    # The watermark ends at the last event less 5 s: windows that end by then are out, once each.
    starts = [start for start in range(0, last, 10) if start + 10 <= last - 5]
    # It begins at 0: a row of that very time is late, and is joined with nothing.
    left = [n for n in numbers[1:] if n % 2 == 0 and n + victim.GAP <= last]
    return {
        "plain": [(n, n * 7) for n in numbers],
        "windows": [(start, sum(range(start, start + 10))) for start in starts],
        "joined": [(n, n + victim.GAP) for n in left],
    }


def read_files(root: Path, pipeline: str) -> list[tuple[int, int]]:
    folder = victim.folder(root, pipeline)
    if not folder.is_dir():  # no driver has started yet
        return []
    rows = read_epochs(str(folder)).to_table().to_pylist()
    return sorted((row["id"], row["value"]) for row in rows)


def read_table(root: Path, pipeline: str) -> list[tuple[int, int]]:
    with psycopg.connect(victim.Targets.load(root).postgres) as connection:
        return connection.execute(f"SELECT id, value FROM {pipeline} ORDER BY 1, 2").fetchall()


def read_topic(root: Path, pipeline: str) -> list[tuple[int, int]]:
    consumer = Consumer(
        {
            "bootstrap.servers": victim.Targets.load(root).kafka,
            "group.id": f"reader of {pipeline}",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(pipeline, n, OFFSET_BEGINNING) for n in range(PARTITIONS)])
    found, ended = [], set()
    while len(ended) < PARTITIONS:
        message = consumer.poll(30)
        assert message is not None, "the topic has no end within 30 s"
        if message.error():
            ended.add(message.partition())
        else:
            row = json.loads(message.value())
            found.append((row["id"], row["value"]))
    consumer.close()
    return sorted(found)


def left_behind(root: Path, state: State) -> list[object]:
    found: list[object] = []
    for sink in victim.sinks_of(root, state.pipeline):
        who = Identity(
            pipeline=state.pipeline, uid=state.uid, sink=sink.name, generation=state.generation
        )
        committer = sink.committer(who, Limits())
        found += committer.in_doubt()
        committer.close()
    return found
