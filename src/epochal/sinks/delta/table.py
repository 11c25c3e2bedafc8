"""One table's log, as this sink reads and writes it, and what its errors mean."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)
from deltalake.transaction import AddAction, PostCommitHookProperties, RemoveAction

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.sinks.delta.place import Place
from epochal.sinks.disk import sync
from epochal.terms import EpochNumber, Handle

_METADATA = "epochal"
_HISTORY_FIRST = 64
_NOT_ENCODED = "/!$&'()+,:;=@~"
"""What delta-rs leaves as it is in a path, beside letters, digits and `_.-`."""
_INTERVAL = "delta.checkpointInterval"
_INTERVAL_DEFAULT = "100"
_SYNCED_BEFORE = 4
"""Versions below the newest that a repeated commit makes durable, in case its writer died."""


class Table:
    """
    Opened anew for every question that must not be answered from memory.

    A commit is made on the very handle on which the ledger was read: delta-rs then refuses it where
    another commit of the same application id came between (`CommitFailedError`).
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self) -> DeltaTable | None:
        """The newest version, or None where there is no table."""
        try:
            with sorting(f"open {self._place.uri}"):
                return DeltaTable(self._place.uri, storage_options=self._place.options)
        except TableNotFoundError:
            return None

    def require(self) -> DeltaTable:
        table = self.open()
        if table is None:
            raise Misconfigured(
                f"there is no Delta table at {self._place.uri}",
                "create it, or create_table='if_missing'",
            )
        return table

    def make_durable(self, since: int) -> None:
        """See that the versions above `since` outlive a power cut; object stores see to that."""
        if self._place.local is None:
            return
        folder = self._place.local / "_delta_log"
        version = max(since + 1, 0)
        while (path := folder / f"{version:020d}.json").exists():
            sync(path)
            version += 1
        sync(folder)

    def make_recent_durable(self, table: DeltaTable) -> None:
        self.make_durable(table.version() - _SYNCED_BEFORE)


def looking(table: DeltaTable) -> Callable[[str], int | None]:
    def look(app_id: str) -> int | None:
        with sorting("read the table's transactions"):
            return table.transaction_version(app_id)

    return look


def properties(
    transactions: Mapping[str, int], *, ledger: str, epoch: EpochNumber, handles: Iterable[Handle]
) -> CommitProperties:
    """What goes into an epoch's commit beside its files."""
    now_ms = time.time_ns() // 1_000_000
    named = {
        "ledger": ledger,
        "epoch": epoch,
        "handles": sorted(str(handle) for handle in handles),
    }
    return CommitProperties(
        custom_metadata={_METADATA: json.dumps(named)},
        app_transactions=[
            Transaction(app_id, number, now_ms) for app_id, number in transactions.items()
        ],
    )


def hooks(table: DeltaTable) -> PostCommitHookProperties:
    """
    Whether delta-rs shall look after the log once the commit is made: it lists the whole log for
    that, so only where a checkpoint is due, for this version or one that slips in before it.
    """
    interval = int(table.metadata().configuration.get(_INTERVAL, _INTERVAL_DEFAULT))
    is_due = (table.version() + 2) % max(interval, 1) <= 1
    return PostCommitHookProperties(
        create_checkpoint=is_due, cleanup_expired_logs=None if is_due else False
    )


def handles_in_history(table: DeltaTable, epoch: EpochNumber, ledger: str) -> set[str] | None:
    """The handles that a commit of this epoch named; None where the log does not go back so far."""
    for limit in (_HISTORY_FIRST, None):
        with sorting("read the table's history"):
            entries = table.history(limit)
        for entry in entries:
            named = json.loads(entry.get(_METADATA, "{}"))
            if (named.get("ledger"), named.get("epoch")) == (ledger, epoch):
                return set(named["handles"])
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


def removals(
    table: DeltaTable, partitions: Iterable[Mapping[str, str | None]], columns: Sequence[str]
) -> list[RemoveAction]:
    """What replaces a partition must take away: its files in this version."""
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


@contextmanager
def sorting(doing: str) -> Iterator[None]:
    """What deltalake raises, by what the caller may do next."""
    try:
        yield
    except (EpochalError, TableNotFoundError, CommitFailedError):
        raise
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise Misconfigured(
            f"{doing}: {error}", "the table asks for what deltalake can't do"
        ) from error
    except (DeltaError, OSError) as error:
        raise TryAgain(f"{doing}: {error}") from error
