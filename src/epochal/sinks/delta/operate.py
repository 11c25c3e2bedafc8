"""Commands of an operator on a Delta table: count the rows that readers see, forget a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from epochal.kit.sink_base import Dropped, Recount
from epochal.sinks.delta.client import active_paths
from epochal.sinks.delta.ledger import ledger_id
from epochal.sinks.delta.table_files import TableFiles, handle_in
from epochal.terms import EpochNumber, Identity

if TYPE_CHECKING:
    from epochal.sinks.delta.sink import Delta

_THREADS = 8


def recount(sink: Delta, identity: Identity, files: TableFiles, table: DeltaTable) -> Recount:
    """Rows of the newest version; by epoch where every file is as a task of this sink wrote it."""
    paths = sorted(unquote(path) for path in active_paths(table))
    if because := _uncountable(sink, table, paths):
        return Recount(rows=None, because=because)
    with ThreadPoolExecutor(_THREADS) as threads:
        counted = list(threads.map(lambda path: _rows_in(files, path), paths))
    rows = [count if isinstance(count, int) else 0 for count in counted]
    epochs = _by_epoch(identity, paths, rows)
    return Recount(
        rows=sum(rows),
        because=f"rows in the files of version {table.version()}"
        + ("" if epochs is not None else ", of which others wrote some or files were compacted"),
        epochs=epochs,
        is_alone=epochs is not None,
        faults=[fault for fault in counted if isinstance(fault, str)],
    )


def _uncountable(sink: Delta, table: DeltaTable, paths: Sequence[str]) -> str:
    """Why a count would mean nothing; empty where it means something."""
    if sink.mode != "append":
        return f"mode={sink.mode!r} replaces rows: their number means nothing"
    if "deletionVectors" in (table.protocol().reader_features or ()):
        return "the table has the feature deletionVectors: its files hold rows that readers skip"
    if any("://" in path or path.startswith("/") for path in paths):
        return "the table names files outside its folder, as shallow clones do"
    return ""


def _rows_in(files: TableFiles, path: str) -> int | str:
    """The rows of one file, or what is wrong with it."""
    try:
        with files.open(path) as file:
            return int(pq.ParquetFile(file).metadata.num_rows)
    except FileNotFoundError:
        return f"{path} is in the table and not there"
    except (OSError, pa.ArrowException) as error:
        return f"{path} can't be read: {error}"


def _by_epoch(
    identity: Identity, paths: Sequence[str], rows: Sequence[int]
) -> dict[EpochNumber, int] | None:
    """None where a file is not this sink's own."""
    found: Counter[EpochNumber] = Counter()
    for path, count in zip(paths, rows, strict=True):
        handle = handle_in(path)
        if handle is None or (handle.uid, handle.sink) != (identity.uid, identity.tag):
            return None
        found[handle.epoch] += count
    return dict(found)


def drop(files: TableFiles, identity: Identity, *, is_dry_run: bool) -> Dropped:
    """
    Remove rows that a late task staged for a merge after its marker was gone: VACUUM passes over
    them. Data files of such tasks are VACUUM's, like all that no version names.
    """
    orphans = [
        path
        for path in files.staged()
        if (handle := handle_in(path)) is not None
        and (handle.uid, handle.sink) == (identity.uid, identity.tag)
    ]
    if not is_dry_run:
        files.delete(orphans)
    return Dropped(
        removed=[f"the staged file {path}" for path in orphans],
        kept=f"the application transaction {ledger_id(identity.uid, identity.tag)} and those of "
        "its name: a Delta log has no way to remove one; "
        "delta.setTransactionRetentionDuration lets the table forget it",
    )
