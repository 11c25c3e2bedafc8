"""Where a history lies: in a folder `history` beside the records of the epoch log.

    <checkpoint>/epochal/log/00000000000000000042.json        a record of the log
    <checkpoint>/epochal/log/history/…                        what is told here

An SQLite log has a folder of its own beside the file, a log in PostgreSQL a table beside its own.
A log behind Hadoop's file systems has the same folder, written through Spark as its records are.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from epochal.contract import EpochLog
from epochal.logs.files import FilesLog
from epochal.logs.objects import ObjectsLog, open_store
from epochal.logs.sqlite import SqliteLog

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FOLDER = "history"


class HistoryPlace(Protocol):
    """Named pieces of bytes. A put replaces, and a reader sees the old or the new, never half."""

    def put(self, name: str, content: bytes) -> None: ...

    def names(self) -> Sequence[str]:
        """All names, in rising order; none where nothing was put yet."""

    def read(self, name: str) -> bytes | None: ...

    def delete(self, names: Sequence[str]) -> None: ...


class HistoryFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        hidden = self._folder / f".{name}.{secrets.token_hex(4)}"
        hidden.write_bytes(content)
        hidden.replace(self._folder / name)

    def names(self) -> Sequence[str]:
        try:
            found = os.listdir(self._folder)  # noqa: PTH208  names only
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.startswith("."))

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()


class HistoryObjects:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, name: str, content: bytes) -> None:
        import obstore  # noqa: PLC0415  only where a log is in a store

        obstore.put(self._store, name, content, use_multipart=False)

    def names(self) -> Sequence[str]:
        import obstore  # noqa: PLC0415  only where a log is in a store

        listed = obstore.list_with_delimiter(self._store)["objects"]
        return sorted(entry["path"] for entry in listed)

    def read(self, name: str) -> bytes | None:
        import obstore  # noqa: PLC0415  only where a log is in a store

        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[str]) -> None:
        import obstore  # noqa: PLC0415  only where a log is in a store

        for name in names:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, name)


def history_place(log: EpochLog) -> HistoryPlace | None:
    """Where the history of this log is; None where its storage has no room for one."""
    if isinstance(log, FilesLog):
        return HistoryFolder(Path(log.place) / FOLDER)
    if isinstance(log, SqliteLog):
        return HistoryFolder(Path(f"{log.place.removeprefix('sqlite://')}.{FOLDER}"))
    if isinstance(log, ObjectsLog):
        return HistoryObjects(open_store(f"{log.place.rstrip('/')}/{FOLDER}"))
    return _of_an_extra(log)


def _of_an_extra(log: EpochLog) -> HistoryPlace | None:
    """Of logs whose packages may be missing: where one is open, its package has been loaded."""
    if "epochal.logs.postgres" in sys.modules:
        from epochal.logs.postgres import PostgresLog  # noqa: PLC0415  needs epochal[postgres]
        from epochal.telemetry.tables import HistoryTable  # noqa: PLC0415  the same

        if isinstance(log, PostgresLog):
            return HistoryTable(log)
    if "epochal.logs.hadoop" in sys.modules:
        from epochal.logs.hadoop import HadoopLog  # noqa: PLC0415  needs epochal[spark]

        if isinstance(log, HadoopLog):
            return log.folder(FOLDER)
    return None
