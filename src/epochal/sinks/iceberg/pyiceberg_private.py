"""The private parts of pyiceberg that this sink uses: all of them are here, for one release of it.

Why not its public verbs: `Transaction` copies the whole metadata at every look at it, retries a
commit after a conflict without asking whether the epoch is there already (a driver that wakes up
late then doubles its rows), and makes several snapshots of one upsert. So updates and requirements
are made here, for one snapshot, and sent once; what to do after a conflict is the caller's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.expressions.visitors import manifest_evaluator
from pyiceberg.io.pyarrow import (
    ParquetFormatWriter,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    write_manifest,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import (
    CommitTableRequest,
    Table,
    TableIdentifier,
    TableProperties,
    Transaction,
)
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotRefUpdate,
    RemoveSnapshotsUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.table.update.snapshot import _FastAppendFiles, _ManifestMergeManager, _OverwriteFiles
from pyiceberg.typedef import EMPTY_DICT, Record
from pyiceberg.utils.properties import property_as_bool, property_as_int

from epochal.errors import InvariantBroken, Misconfigured
from epochal.kit.parquet import (
    DICTIONARY_BYTES_MAX,
    bounds,
    column_statistics,
    has_nan,
    null_count,
)
from epochal.sinks.iceberg.partitions import schema_of_spec

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyiceberg.catalog import Catalog

RELEASE = "0.12."
"""The release that this module was written for; a test compares it with what is installed."""
_TOGETHER = "POST /v1/{prefix}/transactions/commit"
_OWN_DEFAULTS = {TableProperties.PARQUET_DICT_SIZE_BYTES: str(DICTIONARY_BYTES_MAX)}
"""How files are written where the table has no property for it."""


class Stale(Exception):
    """A change that no longer applies. Whether it was applied before, the ledger shows."""


@dataclass(slots=True, kw_only=True)
class Change:
    """One metadata commit: its requirements, its updates, and the files written for it."""

    updates: tuple[TableUpdate, ...] = ()
    requirements: tuple[TableRequirement, ...] = ()
    written: list[str] = field(default_factory=list)
    """Manifests and the manifest list: of no use if the commit is refused."""

    def also(self, *updates: TableUpdate) -> None:
        self.updates += updates

    @property
    def snapshot(self) -> Snapshot | None:
        """The one that this adds."""
        added = [one.snapshot for one in self.updates if isinstance(one, AddSnapshotUpdate)]
        return added[0] if added else None

    def is_in(self, metadata: TableMetadata) -> bool:
        """Whether a table has the snapshot that this adds."""
        added = self.snapshot
        ids = {one.snapshot_id for one in metadata.snapshots}
        return added is not None and added.snapshot_id in ids


class _ReadOnly(Transaction):
    """A transaction that is only read: the metadata is the table's, not a copy."""

    @property
    def table_metadata(self) -> TableMetadata:
        return self._table.metadata


class _EverySpec:
    """
    Adds files of whichever partition spec they were written for, and merges manifests.

    A spec may be by a column that was dropped since. pyiceberg then does not know the type of its
    values, and writes manifests that nobody can read: so each spec is used with a schema that has
    its columns, and manifests of a spec that has none any more are left as they are.
    """

    is_replacement = False

    def _schema_of(self: Any, spec_id: int) -> Schema | None:
        return schema_of_spec(self._transaction.table_metadata, spec_id)

    def new_manifest_writer(self: Any, spec: PartitionSpec) -> ManifestWriter:
        schema = self._schema_of(spec.spec_id)
        if schema is None:
            raise Misconfigured(
                f"manifests of partition spec {spec.spec_id} would have to be rewritten, which is "
                "by a column that was dropped, and the table has forgotten its type",
                "rewrite the files of that spec first (rewrite_data_files)",
            )
        return write_manifest(
            format_version=self._transaction.table_metadata.format_version,
            spec=spec,
            schema=schema,
            output_file=self.new_manifest_output(),
            snapshot_id=self._snapshot_id,
            avro_compression=self._compression,
        )

    def _build_manifest_evaluator(self: Any, spec_id: int) -> Callable[[ManifestFile], bool]:
        schema = self._schema_of(spec_id)
        if schema is None:
            return lambda manifest: any(
                file.spec_id == manifest.partition_spec_id for file in self._deleted_data_files
            )
        return manifest_evaluator(
            self.spec(spec_id), schema, self.partition_filters[spec_id], self._case_sensitive
        )

    def _summary(self: Any, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        """As pyiceberg's, with each file in the partition that its own spec names."""
        metadata = self._transaction.table_metadata
        limit = metadata.properties.get(TableProperties.WRITE_PARTITION_SUMMARY_LIMIT)
        collected = SnapshotSummaryCollector(
            int(limit or TableProperties.WRITE_PARTITION_SUMMARY_LIMIT_DEFAULT)
        )
        for files, count in (
            (self._added_data_files, collected.add_file),
            (self._deleted_data_files, collected.remove_file),
        ):
            for file in files:
                schema = self._schema_of(file.spec_id) or self.schema()
                count(file, schema=schema, partition_spec=self.spec(file.spec_id))
        parent = metadata.snapshot_by_id(self._parent_snapshot_id or -1)
        summary = update_snapshot_summaries(
            Summary(operation=self._operation, **collected.build(), **snapshot_properties),
            previous_summary=parent.summary if parent else None,
        )
        if not self.is_replacement:
            return summary
        return Summary(operation=Operation.REPLACE, **summary.additional_properties)

    def _manifests(self: Any) -> list[ManifestFile]:
        self._build_delete_files_partition_predicate()
        removed = _by_spec(self._deleted_entries(), lambda entry: entry.data_file.spec_id)
        added = _by_spec(self._added_data_files, lambda file: file.spec_id)
        manifests = [
            self._written_manifest(spec_id, [_added(file, self._snapshot_id) for file in files])
            for spec_id, files in added.items()
        ]
        manifests += [self._written_manifest(spec_id, some) for spec_id, some in removed.items()]
        merged: list[ManifestFile] = self._merged(manifests + self._existing_manifests())
        return merged

    def _written_manifest(self: Any, spec_id: int, entries: list[ManifestEntry]) -> ManifestFile:
        with self.new_manifest_writer(self.spec(spec_id)) as writer:
            for entry in entries:
                writer.add_entry(entry)
        manifest: ManifestFile = writer.to_manifest_file()
        return manifest

    def _merged(self: Any, manifests: list[ManifestFile]) -> list[ManifestFile]:
        """As Iceberg's Java library does by default, so that lists of manifests stay short."""
        properties = self._transaction.table_metadata.properties
        merging: _ManifestMergeManager[Any] = _ManifestMergeManager(
            target_size_bytes=property_as_int(
                properties,
                TableProperties.MANIFEST_TARGET_SIZE_BYTES,
                TableProperties.MANIFEST_TARGET_SIZE_BYTES_DEFAULT,
            )
            or TableProperties.MANIFEST_TARGET_SIZE_BYTES_DEFAULT,
            min_count_to_merge=property_as_int(
                properties,
                TableProperties.MANIFEST_MIN_MERGE_COUNT,
                TableProperties.MANIFEST_MIN_MERGE_COUNT_DEFAULT,
            )
            or TableProperties.MANIFEST_MIN_MERGE_COUNT_DEFAULT,
            merge_enabled=property_as_bool(
                properties, TableProperties.MANIFEST_MERGE_ENABLED, default=True
            ),
            snapshot_producer=self,
        )
        kept = [
            manifest
            for manifest in manifests
            if manifest.content != 0 or self._schema_of(manifest.partition_spec_id) is None
        ]
        data = [manifest for manifest in manifests if manifest not in kept]
        return merging.merge_manifests(data) + kept


class _Append(_EverySpec, _FastAppendFiles):
    pass


class _Overwrite(_EverySpec, _OverwriteFiles):
    pass


def with_columns(table: Table, new: pa.Schema) -> Schema:
    """The columns of a table and these, which are not added to it yet."""
    update = table.update_schema()
    update.union_by_name(new)
    return update._apply()


def snapshot(
    table: Table,
    *,
    branch: str,
    add: Sequence[DataFile],
    remove: Sequence[DataFile] = (),
    summary: Mapping[str, str],
    parent_of: str | None = None,
    is_replacement: bool = False,
) -> Change:
    """
    One snapshot on a branch that adds files and removes others; the branch must not have moved.

    A branch that is not there yet begins where `parent_of` is. A replacement has the same rows.
    """
    base = (
        table
        if parent_of is None or branch in table.refs()
        else _branched(table, branch, parent_of)
    )
    has_parent = base.metadata.snapshot_by_name(branch) is not None
    kind = _Overwrite if remove else _Append
    producer = kind(
        operation=Operation.OVERWRITE if remove and has_parent else Operation.APPEND,
        transaction=_ReadOnly(base),
        io=table.io,
        snapshot_properties=dict(summary),
        branch=branch,
    )
    producer.is_replacement = is_replacement
    for file in add:
        producer.append_data_file(file)
    for file in remove:
        producer.delete_data_file(file)
    updates, _ = producer._commit()
    return Change(
        updates=tuple(updates),
        requirements=(
            AssertTableUUID(uuid=table.metadata.table_uuid),
            # Files are looked at anew where the columns are others than they were seen to fit.
            AssertCurrentSchemaId.model_validate(
                {"current-schema-id": table.metadata.current_schema_id}
            ),
            *_unmoved(table, branch),
        ),
        written=[*producer._written_manifests, *producer._written_manifest_lists],
    )


def properties_only(table: Table, *updates: TableUpdate) -> Change:
    """A commit without a snapshot."""
    return Change(updates=updates, requirements=(AssertTableUUID(uuid=table.metadata.table_uuid),))


def without_snapshots(snapshot_ids: Sequence[int]) -> TableUpdate:
    return RemoveSnapshotsUpdate.model_validate({"snapshot-ids": list(snapshot_ids)})


def without_branch(name: str) -> TableUpdate:
    return RemoveSnapshotRefUpdate.model_validate({"ref-name": name})


def send(table: Table, change: Change) -> None:
    """
    Commit once, without retries. Afterwards `table` is as the catalog answered.

    Raises `Stale` where the change names something that others removed meanwhile: catalogs for
    which pyiceberg applies changes itself don't report that as a conflict.
    """
    try:
        table._do_commit(updates=change.updates, requirements=change.requirements)
    except (KeyError, ValueError) as error:
        raise Stale(f"{type(error).__name__}: {error}") from error


def can_send_together(catalog: Catalog) -> bool:
    """Whether a catalog says that it commits several tables by one request."""
    from pyiceberg.catalog.rest import RestCatalog  # noqa: PLC0415  tasks do without it

    return isinstance(catalog, RestCatalog) and _TOGETHER in {
        str(one) for one in catalog._supported_endpoints
    }


def send_together(catalog: Catalog, changes: Sequence[tuple[Table, Change]]) -> None:
    """
    Commit several tables by one request, without retries. The answer has no tables: load them.

    Raises `CommitFailedException` where the catalog refuses. That it has then changed none of them
    is the catalog's word: ask each.
    """
    from pyiceberg.catalog.rest import RestCatalog  # noqa: PLC0415  tasks do without it
    from pyiceberg.catalog.rest.response import _handle_non_200_response  # noqa: PLC0415
    from requests import HTTPError  # noqa: PLC0415

    if not isinstance(catalog, RestCatalog):
        raise InvariantBroken("only a REST catalog commits several tables by one request")
    requests = [
        CommitTableRequest(
            identifier=TableIdentifier.model_validate(
                {"namespace": table.name()[:-1], "name": table.name()[-1]}
            ),
            requirements=change.requirements,
            updates=change.updates,
        )
        for table, change in changes
    ]
    body = ",".join(one.model_dump_json() for one in requests)
    answer = catalog._session.post(
        catalog.url("transactions/commit", prefixed=True),
        data=f'{{"table-changes":[{body}]}}'.encode(),
    )
    try:
        answer.raise_for_status()
    except HTTPError as error:
        unknown = dict.fromkeys((500, 502, 503, 504), CommitStateUnknownException)
        _handle_non_200_response(error, {409: CommitFailedException, **unknown})


class ParquetFile:
    """One data file that is being written, row group by row group."""

    def __init__(
        self,
        table_io: Any,
        metadata: TableMetadata,
        location: str,
        partition: Record,
        *,
        dictionaries: Sequence[str],
    ) -> None:
        self._output = table_io.new_output(location)
        self._metadata = metadata
        self._partition = partition
        self.location = location
        self.arrow_bytes = 0
        self._writer = ParquetFormatWriter(
            self._output, metadata.schema(), {**_OWN_DEFAULTS, **metadata.properties}
        )
        self._writer._parquet_writer_kwargs["use_dictionary"] = list(dictionaries)

    def write(self, rows: Any) -> None:
        self.arrow_bytes += rows.nbytes
        self._writer.write(rows)

    def close(self, *, sort_order_id: int | None) -> DataFile:
        self._writer.close()
        statistics = FooterStatistics(self._metadata).of(self._footer)
        file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=self.location,
            file_format=FileFormat.PARQUET,
            partition=self._partition,
            file_size_in_bytes=len(self._output),
            sort_order_id=sort_order_id,
            equality_ids=None,
            key_metadata=None,
            **statistics,
        )
        file.spec_id = self._metadata.default_spec_id
        return file

    @property
    def _footer(self) -> pq.FileMetaData:
        arrow: Any = self._writer._writer
        return arrow.writer.metadata


class FooterStatistics:
    """What a table's manifests say of a file's columns, by the file's footer."""

    def __init__(self, metadata: TableMetadata) -> None:
        schema = metadata.schema()
        self._plan = compute_statistics_plan(schema, metadata.properties)
        self._numbers = parquet_path_to_id_mapping(schema)

    def of(self, footer: pq.FileMetaData) -> dict[str, Any]:
        found: dict[str, Any] = data_file_statistics_from_parquet_metadata(
            parquet_metadata=footer,
            stats_columns=self._plan,
            parquet_column_mapping=self._numbers,
        ).to_serialized_dict()
        for path, groups in column_statistics(footer).items():
            if not _is_bounded(groups):
                found["lower_bounds"].pop(self._numbers[path], None)
                found["upper_bounds"].pop(self._numbers[path], None)
            if null_count(groups) is None:
                found["null_value_counts"].pop(self._numbers[path], None)
        return found


def _is_bounded(groups: Sequence[Any]) -> bool:
    """
    Whether the bounds of a column's row groups are those of its values. A group whose values are
    long has none, and pyiceberg takes those of the others: readers would skip the file.
    parquet-java orders NaN above all numbers, and Iceberg has it in no bound.
    """
    if bounds(groups) is None:
        return False
    is_float = groups[0].physical_type in ("FLOAT", "DOUBLE")
    return not (is_float and any(has_nan(group) for group in groups))


def without_history(metadata: TableMetadata, properties: Mapping[str, str]) -> TableMetadata:
    """What a task must know of a table: not its snapshots."""
    return metadata.model_copy(
        update={
            "snapshots": [],
            "snapshot_log": [],
            "metadata_log": [],
            "refs": {},
            "statistics": [],
            "partition_statistics": [],
            "current_snapshot_id": None,
            "properties": dict(properties),
        }
    )


def _unmoved(table: Table, branch: str) -> Sequence[TableRequirement]:
    head = table.refs().get(branch)
    # Of a table without a snapshot pyiceberg lets no other branch than main be asked about.
    if not table.metadata.snapshots and branch != MAIN_BRANCH:
        return ()
    fields = {"ref": branch, "snapshot-id": head.snapshot_id if head else None}
    return (AssertRefSnapshotId.model_validate(fields),)


def _branched(table: Table, branch: str, parent_of: str) -> Table:
    """The same table, with a branch that begins where another one is."""
    head = table.refs().get(parent_of)
    if head is None:
        return table
    refs = {**table.metadata.refs, branch: head}
    return Table(
        table.name(),
        table.metadata.model_copy(update={"refs": refs}),
        table.metadata_location,
        table.io,
        table.catalog,
    )


def _added(file: DataFile, snapshot_id: int) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED,
        snapshot_id=snapshot_id,
        sequence_number=None,
        file_sequence_number=None,
        data_file=file,
    )


def _by_spec(things: Iterable[Any], spec_of: Any) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = defaultdict(list)
    for thing in things:
        groups[spec_of(thing)].append(thing)
    return groups
