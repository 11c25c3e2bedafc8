"""A Delta table through deltalake: its handle, its transactions, and the actions of a commit."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, PostCommitHookProperties, RemoveAction

from epochal.errors import Misconfigured
from epochal.sinks.delta.errors import translate_errors
from epochal.sinks.delta.table_files import Stamp, TableFiles, handle_in
from epochal.storage.local import sync
from epochal.terms import EpochNumber

_LOG = "_delta_log"
_METADATA = "epochal"
_RESTORE = "RESTORE"
_HISTORY_FIRST = 64
_VERSIONS_COMPARED_MAX = 20
_NOT_ENCODED = "/!$&'()+,:;=@~"
"""What delta-rs leaves as it is in a path, beside letters, digits and `_.-`."""
_INTERVAL = "delta.checkpointInterval"
_INTERVAL_DEFAULT = "100"
_SYNCED_BEFORE = 4
"""Versions up to the newest that a repeated commit makes durable, in case its writer died."""


class Table:
    """
    A table at its newest version.

    A commit is made on the very handle on which the ledger was read: delta-rs then refuses it where
    another commit of the same application id came in between (`CommitFailedError`).
    """

    def __init__(self, files: TableFiles) -> None:
        self._files = files
        self._kept: _Kept | None = None

    def open(self) -> DeltaTable | None:
        """Read the log from its last checkpoint on; None where there is no table."""
        try:
            with translate_errors(f"open {self._files.uri}"):
                return DeltaTable(self._files.uri, storage_options=self._files.options)
        except TableNotFoundError:
            return None

    def require(self) -> DeltaTable:
        table = self.open()
        if table is None:
            raise Misconfigured(
                f"there is no Delta table at {self._files.uri}",
                "create it, or create_table='if_missing'",
            )
        return table

    @contextmanager
    def newest(self) -> Iterator[DeltaTable]:
        """
        The handle of the last call, having read what was added to the log since: opening a table
        costs as much as it has files. It is kept for the next call only if nothing fails on it, and
        used by one call at a time: a commit that hangs may still hold it.
        """
        kept, self._kept = self._kept, None
        table = None if kept is None else self._caught_up(kept)
        if table is None:
            table = self.require()
        version = table.version()
        stamp = self._stamp(version)
        yield table
        self._kept = None if stamp is None else _Kept(table=table, version=version, stamp=stamp)

    def make_durable(self, since: int) -> None:
        """Make the versions above `since` outlive a power cut; object stores do so themselves."""
        if self._files.local is None:
            return
        version = max(since + 1, 0)
        with translate_errors(f"make version {version} of {self._files.uri} durable"):
            while (path := self._files.local / _version_path(version)).exists():
                self._files.make_durable(_not_by_tasks(path))
                sync(path)
                version += 1
            sync(self._files.local / _LOG)

    def make_recent_durable(self, table: DeltaTable) -> None:
        self.make_durable(table.version() - _SYNCED_BEFORE)

    def _caught_up(self, kept: _Kept) -> DeltaTable | None:
        """None where the log is not the one that the handle has read: a new table, an old log."""
        try:
            kept.table.update_incremental()
        except (DeltaError, OSError):
            return None
        return kept.table if self._stamp(kept.version) == kept.stamp else None

    def _stamp(self, version: int) -> Stamp | None:
        with translate_errors(f"look at version {version} of {self._files.uri}"):
            return self._files.stamp(_version_path(version))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A handle, and the stamp of the last version it has read."""

    table: DeltaTable
    version: int
    stamp: Stamp


def _version_path(version: int) -> str:
    return f"{_LOG}/{version:020d}.json"


def _not_by_tasks(version: Path) -> list[str]:
    """The files below the table that a version added and no task has made durable: a merge's."""
    # Not by splitlines(): a value among a file's statistics may hold a separator that it knows.
    actions = [json.loads(line) for line in version.read_bytes().split(b"\n") if line]
    paths = [unquote(action["add"]["path"]) for action in actions if "add" in action]
    return [
        path for path in paths if handle_in(path) is None and (version.parents[1] / path).is_file()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What an epoch's commit writes beside its files."""

    ledger: str
    """The application id whose number is the epoch."""
    epoch: EpochNumber
    handles: tuple[str, ...]
    transactions: Mapping[str, int]


def transaction_number(table: DeltaTable, app_id: str) -> int | None:
    with translate_errors("read the table's transactions"):
        return table.transaction_version(app_id)


def commit_properties(entry: Entry) -> CommitProperties:
    now_ms = time.time_ns() // 1_000_000
    named = {"ledger": entry.ledger, "epoch": entry.epoch, "handles": entry.handles}
    return CommitProperties(
        custom_metadata={_METADATA: json.dumps(named)},
        app_transactions=[
            Transaction(app_id, number, now_ms) for app_id, number in entry.transactions.items()
        ],
    )


def hooks(table: DeltaTable) -> PostCommitHookProperties:
    """
    Whether delta-rs maintains the log after the commit: it lists the whole log for that, so only
    where a checkpoint is due, for this version or for one that comes in before it.
    """
    interval = int(table.metadata().configuration.get(_INTERVAL, _INTERVAL_DEFAULT))
    is_due = (table.version() + 2) % max(interval, 1) <= 1
    return PostCommitHookProperties(
        create_checkpoint=is_due, cleanup_expired_logs=None if is_due else False
    )


def handles_in_history(table: DeltaTable, epoch: EpochNumber, ledger: str) -> set[str] | None:
    """The handles that a commit of this epoch named; None where the log does not go back so far."""
    for limit in (_HISTORY_FIRST, None):
        with translate_errors("read the table's history"):
            entries = table.history(limit)
        for entry in entries:
            named = json.loads(entry.get(_METADATA, "{}"))
            if (named.get("ledger"), named.get("epoch")) == (ledger, epoch):
                return set(named["handles"])
    return None


def is_restored_since(table: DeltaTable, version: int) -> bool:
    """Whether RESTORE made one of the versions above this one."""
    with translate_errors("read the table's history"):
        entries = table.history(table.version() - version)
    return any(entry.get("operation") == _RESTORE for entry in entries)


def epoch_after_restores(table: DeltaTable, ledger: str, written: int) -> int | None:
    """
    The newest epoch of a ledger whose commit is part of the newest version; `written`, the number
    of its transaction, where the log does not go back so far.
    """
    for limit in (_HISTORY_FIRST, None):
        with translate_errors("read the table's history"):
            entries = {entry["version"]: entry for entry in table.history(limit)}
        at, is_restored = table.version(), False
        while (entry := entries.get(at)) is not None:
            named = json.loads(entry.get(_METADATA, "{}"))
            if named.get("ledger") == ledger:
                return int(named["epoch"])
            if entry.get("operation") != _RESTORE:
                at -= 1
                continue
            is_restored, at = True, _restored_version(table, entry, entries)
    return None if is_restored else written


def _restored_version(
    table: DeltaTable, restore: Mapping[str, Any], entries: Mapping[int, Mapping[str, Any]]
) -> int:
    """
    The version that it put back; -1 where that is not found. Of a time, it is found by the files: a
    writer may go by the times of the log's own files, which are later than those in commits.
    """
    asked = restore.get("operationParameters") or {}
    if (asked.get("version") or "null") != "null":
        return int(asked["version"])
    moment = str(asked.get("datetime") or "")
    older = [
        version
        for version, entry in sorted(entries.items(), reverse=True)
        if version < restore["version"]
        and (not moment.isdigit() or entry.get("timestamp", 0) <= int(moment))
    ]
    files = _paths_at(table, restore["version"])
    for version in older[:_VERSIONS_COMPARED_MAX]:
        if files is not None and _paths_at(table, version) == files:
            return version
    return -1


def _paths_at(table: DeltaTable, version: int) -> set[str] | None:
    """The files of a version; None where the log no longer goes back so far."""
    with translate_errors(f"read version {version} of the table"):
        try:
            options = table._storage_options
            return active_paths(DeltaTable(table.table_uri, version, storage_options=options))
        except DeltaError:
            return None


def active_paths(table: DeltaTable) -> set[str]:
    """The files of the newest version, relative to the table."""
    columns = table.get_add_actions(flatten=False)
    return set(_plain(columns.column("path")))


def add_of(file: Mapping[str, Any]) -> AddAction:
    return AddAction(
        path=file["path"],
        size=file["bytes"],
        partition_values=file["partition"],
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=file["stats"],
    )


def small_files(table: DeltaTable, target_bytes: int) -> list[int]:
    """How many files of each partition are below a size, where that is more than one."""
    listed = table.get_add_actions(flatten=True)
    names = [name for name in listed.schema.names if name.startswith("partition.")]
    partitions = zip(*(_plain(listed.column(name)) for name in names), strict=True)
    counted = Counter(
        partition
        for partition, size in zip(
            partitions if names else repeat(()), _plain(listed.column("size_bytes")), strict=False
        )
        if size < target_bytes
    )
    return [count for count in counted.values() if count > 1]


def removals(
    table: DeltaTable, partitions: Iterable[Mapping[str, str | None]], columns: Sequence[str]
) -> list[RemoveAction]:
    """The files of these partitions in this version, which an overwrite removes."""
    touched = {tuple(values.get(name) for name in columns) for values in partitions}
    now_ms = time.time_ns() // 1_000_000
    found = []
    for path, size, values in _files(table, columns):
        if tuple(values[name] for name in columns) in touched:
            found.append(
                RemoveAction(
                    path=_decoded(path),
                    data_change=True,
                    deletion_timestamp=now_ms,
                    size=size,
                    partition_values=values,
                )
            )
    return found


def _files(
    table: DeltaTable, columns: Sequence[str]
) -> Iterator[tuple[str, int, dict[str, str | None]]]:
    listed = table.get_add_actions(flatten=True)
    texts = [_plain(listed.column(f"partition.{name}")) for name in columns]
    for at, (path, size) in enumerate(
        zip(_plain(listed.column("path")), _plain(listed.column("size_bytes")), strict=True)
    ):
        yield path, size, {name: _text(texts[i][at]) for i, name in enumerate(columns)}


def _decoded(path: str) -> str:
    """
    A path as delta-rs takes it, which encodes it again for the log. A removal whose text differs
    from what was added would remove nothing, so one that can't be written the same is refused.
    """
    decoded = unquote(path)
    if quote(decoded, safe=_NOT_ENCODED) != path:
        raise Misconfigured(
            f"the log names the file {path!r}, in an encoding that deltalake does not write: it "
            "can't be replaced",
            "compact this partition once (OPTIMIZE, or deltalake's optimize.compact)",
        )
    return decoded


def _plain(column: Any) -> list[Any]:
    return [value.as_py() for chunk in column.chunks for value in chunk]


def _text(value: Any) -> str | None:
    """A partition value as the log writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None or value == "" else str(value)
