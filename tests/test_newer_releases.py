"""What a newer release wrote is refused with its number, before anything in it is believed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from epochal.broker.storage import codec
from epochal.errors import CorruptRecord
from epochal.kit.spool.ledger import SpoolLedger
from epochal.protocol.receipts import ListedReceipts, Sum
from epochal.protocol.records import decode
from epochal.receiver.store import Database
from epochal.sinks.files.ledger import Manifest
from epochal.sinks.iceberg.ledger import Ledger
from epochal.storage.memory import MemoryStore
from epochal.storage.sqlite import SqliteStore
from epochal.telemetry.history import History
from epochal.terms import NO_ROWS, EpochNumber, Generation, Identity, Uid

ME = Identity(pipeline="p", uid=Uid("a" * 12), sink="s", generation=Generation(1))
ZERO = EpochNumber(0)


def record(_: Path) -> None:
    body = b'{"a key of the future": 1}'
    digest = hashlib.sha256(body).hexdigest().encode()
    decode(b"epochal-log 7 %s %d\n%s\n" % (digest, len(body), body), "record 3")


def receipts(_: Path) -> None:
    content = b"epochal-list 7 n\nsomething else"
    name = hashlib.sha256(content).hexdigest()
    counted = Sum(receipts=1, fingerprint=NO_ROWS, bytes=0)
    list(ListedReceipts([name], counted, read=lambda _: content))


def manifest(_: Path) -> None:
    Manifest.from_line(b'{"version": 7, "a key of the future": 1}', "0.json")


def spool(_: Path) -> None:
    store = MemoryStore()
    ledger = SpoolLedger(store, ME)
    ledger.settle(ZERO, frozenset(), {})
    (name,) = store.names(f"ledger/s{ME.tag}/{ME.uid}")
    store.put(f"ledger/s{ME.tag}/{ME.uid}/{name}", b'{"format": 7}')
    ledger.find(ZERO)


def iceberg(_: Path) -> None:
    (key,) = Ledger(ME, {}).written(ZERO, (), None)
    Ledger(ME, {key: json.dumps({"format": 7})}).find(ZERO)


def iceberg_marks(_: Path) -> None:
    (key,) = Ledger(ME, {}).written(ZERO, (), None)
    Ledger(ME, {key: json.dumps({"format": 7})}).marks()


def receiver(folder: Path) -> None:
    Database(folder / "rows.db").close()
    Database(folder / "rows.db").close()
    with closing(sqlite3.connect(folder / "rows.db")) as connection:
        connection.execute("PRAGMA user_version = 7")
    Database(folder / "rows.db")


def sqlite_store(folder: Path) -> None:
    store = SqliteStore(folder / "log.db")
    store.put("1", b"a record")
    with closing(sqlite3.connect(folder / "log.db")) as connection:
        connection.execute("PRAGMA user_version = 7")
    store.read("1")


def history(_: Path) -> None:
    store = MemoryStore()
    name = f"{0:020d}-{1:010d}-0000.jsonl"
    store.put(name, b'{"history": 7}\n{"a key of the future": 1}\n')
    History(store=store).read(name)


@pytest.mark.parametrize(
    "read",
    [record, receipts, manifest, spool, iceberg, iceberg_marks, receiver, sqlite_store, history],
)
def test_a_newer_format_is_refused_with_its_number(
    read: Callable[[Path], None], tmp_path: Path
) -> None:
    with pytest.raises(CorruptRecord, match="format 7, this release reads up to 1") as caught:
        read(tmp_path)
    assert "newer release" in caught.value.hint


def test_an_entry_of_the_brokers_journal_of_an_unknown_kind_is_refused_with_its_number() -> None:
    with pytest.raises(CorruptRecord, match="250") as caught:
        list(codec.read(struct.pack(">BI", 250, 0)))
    assert "newer release" in caught.value.hint
