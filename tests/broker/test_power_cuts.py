"""An answer leaves after everything before it is synced: a power cut takes back nothing."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from broker.test_kills import Killed, kill_loop
from conftest_tools import PROOF_KILLS
from table import Table
from test_hostile_clients import connected, frame
from test_storage import write
from wire import produce_request

from epochal.broker import server
from epochal.broker.connection import Connection
from epochal.broker.core.settings import Settings
from epochal.broker.embedded import BrokerProcess
from epochal.broker.server import Listener, running
from epochal.broker.storage.store import Store
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic

SYNC_S = 0.004
ROUNDS = 60


class SlowStore(Store):
    """Counts writes that are not synced yet, and sees two syncs at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written = self.safe = 0
        self.faults: list[str] = []
        self._is_busy = False

    def commit(self) -> None:
        self.written += self.has_pending
        super().commit()

    def sync(self) -> None:
        if self._is_busy:
            self.faults.append("a sync begins during another")
        self._is_busy = True
        written = self.written
        super().sync()
        time.sleep(SYNC_S)
        self.safe = written
        self._is_busy = False


def body_of(request: Any, version: int) -> bytes:
    return b"".join(bytes(part) for part in request.encode(version))


class Wire:
    """Requests as bytes, several under way at once."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._reader, self._writer = streams

    def send(self, *requests: tuple[int, int, bytes]) -> None:
        self._writer.write(b"".join(frame(*request) for request in requests))

    async def answer(self) -> bytes:
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        return await self._reader.readexactly(size)

    def close(self) -> None:
        self._writer.close()


def test_no_answer_leaves_before_what_was_written_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[SlowStore] = []

    def made(*args: Any, **options: Any) -> SlowStore:
        stores.append(SlowStore(*args, **options))
        return stores[-1]

    def flush(connection: Connection) -> None:
        (store,) = stores
        if store.safe < store.written:
            store.faults.append("an answer leaves before its sync")
        real(connection)

    real = Connection.flush
    monkeypatch.setattr(server, "Store", made)
    monkeypatch.setattr(Connection, "flush", flush)
    asyncio.run(_converse(tmp_path))
    assert stores[0].written > ROUNDS
    assert not stores[0].faults, set(stores[0].faults)


async def _converse(folder: Path) -> None:
    """One client's Metadata waits behind its long Fetch; two others write beside it."""
    topic = CreatableTopic(name="t", num_partitions=1, replication_factor=1)
    create = (19, 4, body_of(CreateTopicsRequest(topics=[topic]), 4))
    write_row = (0, 8, body_of(produce_request("t", [b"row"]), 8))
    async with running(folder, Listener(port=0), Settings(), fsync=True) as address:
        wires = [Wire(await asyncio.open_connection(address.host, address.port)) for _ in range(3)]
        reader, first, second = wires
        first.send(create)
        await first.answer()
        for offset in range(ROUNDS):
            part = FetchPartition(partition=0, fetch_offset=2 * offset, partition_max_bytes=1 << 20)
            fetch = FetchRequest(
                max_wait_ms=60_000,
                min_bytes=1,
                max_bytes=1 << 20,
                topics=[FetchTopic(topic="t", partitions=[part])],
            )
            reader.send((1, 11, body_of(fetch, 11)), (3, 1, struct.pack(">i", 0)))
            await asyncio.sleep(SYNC_S * 2)
            first.send(write_row)
            await asyncio.sleep(SYNC_S / 3)
            second.send(write_row)
            for wire in (first, second, reader, reader):
                await wire.answer()
        for wire in wires:
            wire.close()


class RollingStore(Store):
    """Begins a new journal when it is asked to, and takes until it may go on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_due = self.is_rolling = False
        self.may_end = threading.Event()

    @property
    def wants_roll(self) -> bool:
        return self.is_due

    def roll(self, known: Any) -> None:
        if self.is_due:
            self.is_rolling = True
            assert self.may_end.wait(60)
            self.is_due = False
        super().roll(known)


def test_the_loop_goes_on_while_a_new_journal_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of a cluster take over from an active whose loop stands still."""
    stores: list[RollingStore] = []

    def made(*args: Any, **options: Any) -> RollingStore:
        stores.append(RollingStore(*args, **options))
        return stores[-1]

    metadata = (3, 1, struct.pack(">i", 0))

    async def run() -> None:
        async with running(tmp_path, Listener(port=0), Settings()) as address:
            wire = Wire(await asyncio.open_connection(address.host, address.port))
            (store,) = stores
            store.is_due = True
            while not store.is_rolling:
                await asyncio.sleep(0.01)  # this is its own loop
            wire.send(metadata)
            answer = asyncio.create_task(wire.answer())
            await asyncio.sleep(0.3)
            assert not answer.done(), "a tick was decided meanwhile"
            store.may_end.set()
            await answer
            wire.close()

    monkeypatch.setattr(server, "Store", made)
    asyncio.run(asyncio.wait_for(run(), 60))


def test_all_segments_that_a_tick_points_at_are_synced_with_it() -> None:
    table = Table(is_synced=True, tail_bytes_max=100, segment_bytes_max=400)
    topic = CreatableTopic(name="t", num_partitions=1, replication_factor=1)
    table.ask(CreateTopicsRequest(topics=[topic]))
    real = table.store.sync
    table.store.sync = lambda: None  # ticks without an answer are not synced
    for _ in range(3):
        write(table, b"x" * 300)
    table.store.sync = real
    write(table, b"x" * 300)
    for path, data in table.disk.files.items():
        if path.endswith(".segment"):
            assert table.disk.synced.get(path) == bytes(data), path
            assert table.disk.is_named(path), path


class PowerCutBroker(BrokerProcess):
    PROGRAM = (str(Path(__file__).with_name("power_cut_broker.py")),)


class Pipeliner(threading.Thread):
    """Always has a Metadata waiting behind a Fetch that waits for rows."""

    def __init__(self, address: str, topic: str, is_over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address, self._topic, self._is_over = address, topic, is_over

    def run(self) -> None:
        part = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 16)
        fetch = FetchRequest(
            max_wait_ms=500,
            min_bytes=1 << 30,
            max_bytes=1 << 16,
            topics=[FetchTopic(topic=self._topic, partitions=[part])],
        )
        asked = frame(1, 11, body_of(fetch, 11)) + frame(3, 1, struct.pack(">i", 0))
        while not self._is_over.is_set():
            try:
                with connected(self._address) as sock:
                    sock.settimeout(1.0)
                    while not self._is_over.is_set():
                        sock.sendall(asked)
                        while not sock.recv(1 << 16):
                            raise ConnectionError
            except OSError:
                time.sleep(0.01)


def _cut_power(folder: Path, kills: int) -> Killed:
    process = PowerCutBroker(folder / "data", settings={"topics_auto_created": False})
    return kill_loop(process, kills, lambda *args: [Pipeliner(*args) for _ in range(4)])


def test_a_power_cut_under_load_takes_back_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    assert _cut_power(tmp_path, 4).committed > 0


@pytest.mark.proof
def test_many_power_cuts_under_load_take_back_nothing_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    assert _cut_power(tmp_path, PROOF_KILLS).committed > 0
