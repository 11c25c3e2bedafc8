"""What readers of a table see, counted in its files: the names of ours say whose they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from epochal.contract import Recount
from epochal.sinks.delta.place import Place, handle_in
from epochal.sinks.delta.table import active_paths
from epochal.terms import EpochNumber, Identity

if TYPE_CHECKING:
    from epochal.sinks.delta.sink import Delta

_AT_ONCE = 8


def recount(sink: Delta, identity: Identity, place: Place, table: DeltaTable) -> Recount:
    """Rows of the newest version; by epoch where every file is as a task of this sink wrote it."""
    paths = sorted(unquote(path) for path in active_paths(table))
    if because := _uncountable(sink, table, paths):
        return Recount(rows=None, because=because)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        counted = list(threads.map(lambda path: _rows_in(place, path), paths))
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
    """Why a count would say nothing; empty where it does."""
    if sink.mode != "append":
        return f"mode={sink.mode!r} replaces rows: their number says nothing"
    if "deletionVectors" in (table.protocol().reader_features or ()):
        return "the table has the feature deletionVectors: its files hold rows that readers skip"
    if any("://" in path or path.startswith("/") for path in paths):
        return "the table names files outside its folder, as shallow clones do"
    return ""


def _rows_in(place: Place, path: str) -> int | str:
    """The rows of one file, or what is wrong with it."""
    try:
        with place.open(path) as file:
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
