"""
The compaction of an Iceberg table: small files of a partition become one, by one snapshot.

Files are read, and what is written in their place lies in a folder that no sweep looks into:

    <data>/epochal/compacted/c-<handle>/00000.parquet    in the table, or left by a compaction that
    <data>/epochal/compacted/in-doubt/<handle>           was killed: for remove_orphan_files

The snapshot holds only if the branch is where it was. Epochs that are committed meanwhile move it:
then the same files are put into a snapshot of the newer table, as long as all that they replace are
still in it, as they were read. Streams that read the table skip `replace` snapshots.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from random import getrandbits
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table

from epochal.errors import TryAgain
from epochal.kit.marked_files import at_once
from epochal.kit.sink_base import Compacted
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.ledger import DRIVER, DRIVER_ATTEMPT_BITS
from epochal.sinks.iceberg.partitions import schema_of_spec
from epochal.sinks.iceberg.table_files import Layout, TableFiles, layout_of
from epochal.sinks.iceberg.types import ColumnMatch, has_structs_in_lists
from epochal.sinks.iceberg.writer import Attempt, FileLimits
from epochal.terms import EpochNumber, Handle, Identity

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from epochal.sinks.iceberg.sink import Iceberg

_SMALL = 0.75
"""Of the target: a file that has this much is left as it is, as in Iceberg's own compaction."""
_TRIES_MAX = 30
_WAIT_S = 0.05
_IN_MEMORY = 4
"""How much larger rows are in memory than in a file, about: a writer counts the former."""


class CompactedLayout(Layout):
    """Beside the folders of attempts: a sweep would take these files for an attempt's."""

    @property
    def marker_folder(self) -> str:
        return f"{self.data_path}/epochal/compacted/in-doubt"

    def folder(self, handle: Handle) -> str:
        return f"{self.data_path}/epochal/compacted/c-{handle}"


class TableCompaction:
    """One compaction of one table."""

    def __init__(
        self, sink: Iceberg, identity: Identity, catalog: Catalog, *, target_bytes: int
    ) -> None:
        self._sink = sink
        self._identity = identity
        self._catalog = catalog
        self._target_bytes = target_bytes

    def run(self, *, is_dry_run: bool) -> Compacted:
        table = self._loaded()
        rewritten = [
            one.name for one in table.schema().fields if has_structs_in_lists(one.field_type)
        ]
        if rewritten:
            because = (
                f"{', '.join(rewritten)} has structs in a list or map, of which pyiceberg loses "
                "nulls when it reads: compact with rewrite_data_files of Spark"
            )
            return Compacted(because=because)
        groups = list(self._groups(table))
        count = sum(map(len, groups))
        if is_dry_run or not groups:
            return Compacted(files_before=count, files_after=len(groups))
        handle = self._identity.handle(
            EpochNumber(0), partition=DRIVER, attempt=getrandbits(DRIVER_ATTEMPT_BITS)
        )
        attempt = self._attempt(table, handle)
        try:
            for group in groups:
                self._write(table, group, attempt)
            written = attempt.finish()
            self._replace(table, [task.file for group in groups for task in group], written)
        except BaseException:
            attempt.discard()
            raise
        self._files(table).delete([self._layout(table).marker(handle)])
        return Compacted(files_before=count, files_after=len(written))

    # Which files, and what takes their place

    def _groups(self, table: Table) -> Iterator[list[FileScanTask]]:
        """Small files of one partition, as many as make one file of the target's size."""
        for tasks in self._small(table).values():
            group: list[FileScanTask] = []
            size = 0
            for task in sorted(tasks, key=lambda one: one.file.file_size_in_bytes):
                if group and size + task.file.file_size_in_bytes > self._target_bytes:
                    if len(group) > 1:
                        yield group
                    group, size = [], 0
                group.append(task)
                size += task.file.file_size_in_bytes
            if len(group) > 1:
                yield group

    def _small(self, table: Table) -> Mapping[tuple[int, str], list[FileScanTask]]:
        found: dict[tuple[int, str], list[FileScanTask]] = defaultdict(list)
        for task in self._plan(table):
            file = task.file
            if (
                not task.delete_files
                and file.file_size_in_bytes < self._target_bytes * _SMALL
                and schema_of_spec(table.metadata, file.spec_id) is not None
            ):
                found[file.spec_id, repr(file.partition)].append(task)
        return found

    def _plan(self, table: Table) -> list[FileScanTask]:
        branch = self._sink.branch
        if table.metadata.snapshot_by_name(branch) is None:
            return []
        scan = table.scan() if branch == "main" else table.scan().use_ref(branch)
        return list(scan.plan_files())

    def _attempt(self, table: Table, handle: Handle) -> Attempt:
        return Attempt(
            handle,
            metadata=table.metadata,
            files=self._files(table),
            layout=self._layout(table),
            limits=FileLimits(
                file_bytes_max=self._target_bytes * _IN_MEMORY,
                open_files_max=self._sink.open_files_max,
            ),
        )

    def _write(self, table: Table, group: Sequence[FileScanTask], attempt: Attempt) -> None:
        match = ColumnMatch(_arrow_schema(table), table.schema())
        scan = ArrowScan(
            table_metadata=table.metadata,
            io=table.io,
            projected_schema=table.schema(),
            row_filter=AlwaysTrue(),
        )
        if attempt.is_sorted:
            # A file is sorted as a whole.
            attempt.write(match.cast(scan.to_table(tasks=group)))
            return
        for batch in scan.to_record_batches(group):
            attempt.write(match.cast(pa.Table.from_batches([batch])))
        attempt.close_files()

    # The commit

    def _replace(self, base: Table, old: Sequence[DataFile], new: Sequence[DataFile]) -> None:
        for _ in range(_TRIES_MAX):
            table = self._loaded()
            self._require_same(base, table, old)
            change = private.snapshot(
                table,
                branch=self._sink.branch,
                add=new,
                remove=old,
                summary=self._summary(len(old)),
                is_replacement=True,
            )
            files = self._files(table)
            at_once(files.make_durable, change.written)
            try:
                private.send(table, change)
            except (CommitFailedException, ValidationException, private.Stale):
                if not change.is_in(self._loaded().metadata):
                    files.delete(change.written)
                    time.sleep(_WAIT_S)
                    continue
            files.make_durable(self._loaded().metadata_location)
            return
        raise TryAgain(f"{self._sink.address}: others committed {_TRIES_MAX} times meanwhile")

    def _require_same(self, base: Table, table: Table, old: Sequence[DataFile]) -> None:
        """What was read is still the table's, under the columns and partitions it had."""
        is_same = all(
            getattr(base.metadata, field) == getattr(table.metadata, field)
            for field in ("table_uuid", "current_schema_id", "default_spec_id")
        )
        plain = {task.file.file_path for task in self._plan(table) if not task.delete_files}
        if not is_same or any(file.file_path not in plain for file in old):
            raise TryAgain(
                f"{self._sink.address} was changed by others while its files were compacted",
                "nothing was compacted; the next compaction begins anew",
            )

    def _summary(self, count: int) -> Mapping[str, str]:
        return {
            "epochal.pipeline": self._identity.pipeline,
            "epochal.uid": self._identity.uid,
            "epochal.sink": self._identity.sink,
            "epochal.compacted": str(count),
        }

    def _loaded(self) -> Table:
        return self._sink.address.load(self._catalog)

    def _files(self, table: Table) -> TableFiles:
        return TableFiles(table.io)

    def _layout(self, table: Table) -> CompactedLayout:
        plain = layout_of(table.metadata.location, table.metadata.properties)
        return CompactedLayout(plain.data_path)


def _arrow_schema(table: Table) -> pa.Schema:
    return table.schema().as_arrow()
