"""Data files in a receipt: all that a manifest needs, as JSON (never a pickle).

Bounds and partition values are written as the bytes that Iceberg's own format defines for single
values, so that they come back exactly, whatever their type.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from epochal.errors import InvariantBroken
from epochal.sinks.iceberg.partitions import partition_types, schema_of_spec
from epochal.sinks.iceberg.types import replaced_columns
from epochal.terms import Fingerprint, Handle, Json, Receipt

_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def receipt_of(
    handle: Handle,
    fingerprint: Fingerprint,
    files: Sequence[DataFile],
    *,
    folder: str,
    metadata: TableMetadata,
) -> Receipt:
    """The receipt of an attempt whose files are durable."""
    token: dict[str, Json] = {"files": []}
    if files:
        token = {
            "folder": folder,
            "table": str(metadata.table_uuid),
            "schema": metadata.current_schema_id,
            "spec": metadata.default_spec_id,
            "files": [*_files_out(files, folder, metadata)],
        }
    size = sum(file.file_size_in_bytes for file in files)
    return Receipt(handle=handle, fingerprint=fingerprint, bytes=size, token=token)


def _files_out(
    files: Sequence[DataFile], folder: str, metadata: TableMetadata
) -> list[dict[str, Json]]:
    """The files of a receipt; their place is the receipt's folder, so only their names are kept."""
    kinds = partition_types(metadata, metadata.default_spec_id)
    return [_file_out(file, file.file_path[len(folder) + 1 :], kinds) for file in files]


def _file_out(file: DataFile, name: str, kinds: Sequence[PrimitiveType]) -> dict[str, Json]:
    fields: dict[str, Json] = {
        "name": name,
        "rows": file.record_count,
        "bytes": file.file_size_in_bytes,
        "splits": list(file.split_offsets or ()),
        "sorted": file.sort_order_id,
    }
    for field in _COUNTS:
        fields[field] = {str(key): count for key, count in (getattr(file, field) or {}).items()}
    for field in _BOUNDS:
        fields[field] = {
            str(key): b64encode(bound).decode()
            for key, bound in (getattr(file, field) or {}).items()
        }
    fields["partition"] = [
        None if value is None else b64encode(to_bytes(kind, value)).decode()
        for kind, value in zip(kinds, _values(file.partition), strict=True)
    ]
    return fields


def files_in(receipt: Receipt, metadata: TableMetadata) -> list[DataFile]:
    """The data files that a receipt names, for the manifest of a snapshot."""
    listed = _listed(receipt)
    if not listed:
        return []
    wrote = _written_for(receipt)
    if str(receipt.handle) != wrote.folder.rsplit("/", 1)[-1]:
        raise InvariantBroken(f"the receipt of {receipt.handle} names files in {wrote.folder}")
    kinds = partition_types(metadata, wrote.spec_id, schema_id=wrote.schema_id)
    return [_file_in(fields, wrote.folder, wrote.spec_id, kinds) for fields in listed]


def misfit(receipt: Receipt, metadata: TableMetadata) -> str | None:
    """
    Why a table, as it is now, can't take the files of a receipt; None where it can.

    Files name columns by number: another table's numbers, or columns that were replaced since,
    would show the rows under other names, or without their values.
    """
    listed = _listed(receipt)
    if not listed:
        return None
    wrote = _written_for(receipt)
    if wrote.table != str(metadata.table_uuid):
        return "they were written for a table that was dropped"
    schema = next((one for one in metadata.schemas if one.schema_id == wrote.schema_id), None)
    if schema is None or wrote.spec_id not in metadata.specs():
        return "the table has forgotten the columns or the partitions that they were written for"
    if schema_of_spec(metadata, wrote.spec_id, schema_id=wrote.schema_id) is None:
        return "the table has forgotten the columns that it was partitioned by"
    if schema.schema_id == metadata.current_schema_id:
        return None

    def may_be_null(field_id: int) -> bool:
        counts = (fields["null_value_counts"].get(str(field_id)) for fields in listed)
        return any(count is None or count > 0 for count in counts)

    return next(replaced_columns(schema, metadata.schema(), may_be_null), None)


def locations_in(receipt: Receipt) -> list[str]:
    """Where the files of a receipt are."""
    return [f"{receipt.token['folder']}/{fields['name']}" for fields in _listed(receipt)]


def sizes_in(receipt: Receipt) -> list[int]:
    """How many bytes each of them had when it was prepared."""
    return [int(fields["bytes"]) for fields in _listed(receipt)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenFor:
    """What a table was when a task wrote for it."""

    folder: str
    table: str
    schema_id: int
    spec_id: int


def _written_for(receipt: Receipt) -> _WrittenFor:
    fields: Any = receipt.token
    return _WrittenFor(
        folder=str(fields["folder"]),
        table=str(fields["table"]),
        schema_id=int(fields["schema"]),
        spec_id=int(fields["spec"]),
    )


def _listed(receipt: Receipt) -> Any:
    return receipt.token.get("files", ())


def _file_in(fields: Any, folder: str, spec_id: int, kinds: Sequence[PrimitiveType]) -> DataFile:
    partition = Record(
        *(
            None if value is None else from_bytes(kind, b64decode(value))
            for kind, value in zip(kinds, fields["partition"], strict=True)
        )
    )
    statistics: dict[str, Any] = {field: _counts(fields[field]) for field in _COUNTS}
    statistics |= {field: _bounds(fields[field]) for field in _BOUNDS}
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{folder}/{fields['name']}",
        file_format=FileFormat.PARQUET,
        partition=partition,
        record_count=fields["rows"],
        file_size_in_bytes=fields["bytes"],
        **statistics,
        key_metadata=None,
        split_offsets=fields["splits"] or None,
        equality_ids=None,
        sort_order_id=fields["sorted"],
    )
    file.spec_id = spec_id
    return file


def _values(record: Record) -> list[Any]:
    return [record[at] for at in range(len(record))]


def _counts(fields: Mapping[str, int]) -> dict[int, int]:
    return {int(key): count for key, count in fields.items()}


def _bounds(fields: Mapping[str, str]) -> dict[int, bytes]:
    return {int(key): b64decode(bound) for key, bound in fields.items()}
