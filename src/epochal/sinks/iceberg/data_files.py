"""Data files in a receipt: all that a manifest needs, as JSON (never a pickle).

Bounds and partition values are written as the bytes that Iceberg's own format defines for single
values, so that they come back exactly, whatever their type.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record
from pyiceberg.types import NestedField, PrimitiveType

from epochal.errors import InvariantBroken
from epochal.terms import Json, Receipt

_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def files_out(
    files: Sequence[DataFile], folder: str, metadata: TableMetadata
) -> list[dict[str, Json]]:
    """The files of a receipt; their place is the receipt's folder, so only their names are kept."""
    kinds = _partition_types(metadata, metadata.default_spec_id)
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
    listed: Any = receipt.token.get("files", ())
    if not listed:
        return []
    require_fitting(receipt, metadata)
    folder, spec_id = _folder_and_spec(receipt)
    kinds = _partition_types(metadata, spec_id)
    return [_file_in(fields, folder, spec_id, kinds) for fields in listed]


def require_fitting(receipt: Receipt, metadata: TableMetadata) -> None:
    """Refuse files that are not this attempt's own, or were written for another table."""
    if not receipt.token.get("files"):
        return
    folder, spec_id = _folder_and_spec(receipt)
    if str(receipt.handle) != folder.rsplit("/", 1)[-1]:
        raise InvariantBroken(f"the receipt of {receipt.handle} names files in {folder}")
    if spec_id not in metadata.specs():
        raise InvariantBroken(
            f"{receipt.handle} wrote for partition spec {spec_id}, which the table no longer has",
            "was the table dropped and made again under the same name?",
        )


def is_for(receipt: Receipt, metadata: TableMetadata) -> bool:
    """
    False for a table of the same name that was made later: what its columns' numbers mean is its
    own affair, so that rows would come back under other names.
    """
    wrote_for = receipt.token.get("table")
    return wrote_for is None or wrote_for == str(metadata.table_uuid)


def locations_in(receipt: Receipt) -> list[str]:
    """Where the files of a receipt are."""
    listed: Any = receipt.token.get("files", ())
    return [f"{receipt.token['folder']}/{fields['name']}" for fields in listed]


def _folder_and_spec(receipt: Receipt) -> tuple[str, int]:
    fields: Any = receipt.token
    return str(fields["folder"]), int(fields["spec"])


def _partition_types(metadata: TableMetadata, spec_id: int) -> list[PrimitiveType]:
    fields = metadata.specs()[spec_id].partition_type(metadata.schema()).fields
    return [_primitive(field) for field in fields]


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


def _primitive(field: NestedField) -> PrimitiveType:
    if not isinstance(field.field_type, PrimitiveType):
        raise InvariantBroken(f"a partition by {field.name}, which is {field.field_type}")
    return field.field_type


def _values(record: Record) -> list[Any]:
    return [record[at] for at in range(len(record))]


def _counts(fields: Mapping[str, int]) -> dict[int, int]:
    return {int(key): count for key, count in fields.items()}


def _bounds(fields: Mapping[str, str]) -> dict[int, bytes]:
    return {int(key): b64decode(bound) for key, bound in fields.items()}
