"""Commands of an operator on an Iceberg table: count the rows that readers see, forget a uid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.update import RemovePropertiesUpdate

from epochal.kit.sink_base import Dropped, Recount
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.ledger import Ledger
from epochal.sinks.iceberg.snapshot_plan import DRIVER
from epochal.sinks.iceberg.table_files import TableFiles
from epochal.terms import EpochNumber, Handle, Identity

if TYPE_CHECKING:
    from epochal.sinks.iceberg.sink import Iceberg


def recount(sink: Iceberg, identity: Identity, table: Table) -> Recount:
    """Rows of the branch; by epoch where every file is as a task of this sink wrote it."""
    if sink.mode != "append":
        return Recount(
            rows=None, because=f"mode={sink.mode!r} replaces rows: their number means nothing"
        )
    if table.metadata.snapshot_by_name(sink.branch) is None:
        return Recount(rows=0, because=f"branch {sink.branch} has no snapshot")
    scan = table.scan() if sink.branch == "main" else table.scan().use_ref(sink.branch)
    tasks = list(scan.plan_files())
    handles = [_handle_of(task.file.file_path) for task in tasks]
    is_alone = all(
        handle is not None and (handle.uid, handle.sink) == (identity.uid, identity.tag)
        for handle in handles
    )
    is_plain = is_alone and not any(task.delete_files for task in tasks)
    missing = TableFiles(table.io).missing([task.file.file_path for task in tasks])
    return Recount(
        rows=scan.count(),
        because=f"rows of branch {sink.branch}"
        + ("" if is_alone else ", of which others wrote some or files were compacted"),
        epochs=_by_epoch(tasks, handles) if is_plain else None,
        is_alone=is_alone,
        faults=[f"{where} is in the table and not there" for where in missing],
    )


def drop(
    sink: Iceberg, identity: Identity, load: Callable[[], Table], *, attempts: int, is_dry_run: bool
) -> Dropped:
    """Remove this uid's proofs from the table's properties; rows and snapshots stay."""
    for _ in range(attempts):
        table = load()
        keys = Ledger(identity, table.metadata.properties).keys()
        if is_dry_run or not keys:
            break
        try:
            removal = RemovePropertiesUpdate(removals=keys)
            private.send(table, private.properties_only(table, removal))
        except (CommitFailedException, private.Stale):
            continue
        break
    return Dropped(removed=[f"property {key} of {sink.address}" for key in keys])


def _by_epoch(
    tasks: Iterable[FileScanTask], handles: Iterable[Handle | None]
) -> dict[EpochNumber, int] | None:
    rows: Counter[EpochNumber] = Counter()
    for task, handle in zip(tasks, handles, strict=True):
        if handle is None or handle.partition == DRIVER:
            return None
        rows[handle.epoch] += task.file.record_count
    return dict(rows)


def _handle_of(location: str) -> Handle | None:
    folder = location.rsplit("/", 2)[-2]
    return Handle.parse(folder)
