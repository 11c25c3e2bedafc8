"""
Jobs of Spark's own writer for a table: what one is asked for, and data files of what it left.

Where Iceberg's runtime is on Spark's class path, Iceberg's own writer writes: every partition
transform, lists, maps. Else Spark's writer of parquet does, and columns carry the table's numbers.
There SQL computes the partition of a row, and puts rows of one into one folder. The folder's name
is not read: the partition of a file comes from the least and the greatest value in its footer, by
the code that tasks use. That both have the same shows that SQL and Iceberg agree.

    <data>/epochal/jobs/<handle>/…/part-00003-….parquet    as the writer left it
    <data>/epochal/<handle>/00003.parquet                  prepared, like a file of a task

In a store nothing is moved: Iceberg's own writer puts files into `<data>/epochal/<handle>/`, each
under a name that no other attempt has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg import transforms
from pyiceberg import types as iceberg
from pyiceberg.conversions import from_bytes, from_json, to_bytes
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import NullOrder, SortDirection
from pyiceberg.typedef import Record

from epochal.contract import EngineWrite, EngineWritten
from epochal.errors import InvariantBroken, Misconfigured, TryAgain
from epochal.kit import parquet
from epochal.kit.engine_files import (
    Dictionaries,
    EngineFile,
    engine_files,
    require_put,
    rising,
    sql_name,
    sql_text,
    writer_options,
)
from epochal.kit.marked_files import at_once
from epochal.sinks.iceberg.partitions import partition_types, split
from epochal.sinks.iceberg.pyiceberg_private import FooterStatistics, without_history
from epochal.sinks.iceberg.table_files import Layout, TableFiles, discard
from epochal.sinks.iceberg.types import has_required_inside, inner_values, null_inside
from epochal.storage.local import make_folder
from epochal.terms import Handle

ICEBERG = "iceberg"
"""The format of Iceberg's own writer."""
_PARTITION = "__epochal_partition_{}"
_DAY_US = 86_400_000_000
_HOUR_US = 3_600_000_000
_TEXT_BYTES_MAX = 64
"""Of a partition value in the name of a folder; longer ones, and those with NUL, are hashed."""
_SQL_TYPES: Mapping[type[iceberg.IcebergType], str] = {
    iceberg.BooleanType: "boolean",
    iceberg.IntegerType: "int",
    iceberg.LongType: "bigint",
    iceberg.FloatType: "float",
    iceberg.DoubleType: "double",
    iceberg.DateType: "date",
    iceberg.TimestampType: "timestamp_ntz",
    iceberg.TimestamptzType: "timestamp",
    iceberg.StringType: "string",
    iceberg.BinaryType: "binary",
}
_NO_FOLDERS = (iceberg.FloatType, iceberg.DoubleType, iceberg.DecimalType, iceberg.BinaryType)
"""Types whose values have several texts, or bounds that are not among them."""
_PARQUET_OPTIONS = {
    "write.parquet.row-group-size-bytes": "parquet.block.size",
    "write.parquet.page-size-bytes": "parquet.page.size",
    "write.parquet.page-row-limit": "parquet.page.row.count.limit",
    "write.parquet.dict-size-bytes": "parquet.dictionary.page.size",
}
"""Properties of a table, and how Spark's writer of parquet names them."""
_CODEC = "write.parquet.compression-codec"
_CODEC_LEVEL = "write.parquet.compression-level"
_CODEC_DEFAULT = "zstd"
_DICTIONARY_OF = "write.parquet.dict-encoding-enabled.column."
_DATA_PATH = "write.data.path"
_LOCATION_PROPERTIES = {
    # Without partition values in paths, as names of folders have limits.
    "write.object-storage.enabled": "true",
    "write.object-storage.partitioned-paths": "false",
}
_LOCATIONS_OF_ITS_OWN = "write.location-provider.impl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What Spark's own writer is asked for, for rows of one schema and a table as it is."""

    metadata: TableMetadata
    rows: pa.Schema
    form: str
    """`ICEBERG`, or parquet by Spark's writer of it."""

    @property
    def is_by_iceberg(self) -> bool:
        return self.form == ICEBERG

    def refusal(self) -> str | None:
        """Why tasks must write these rows."""
        for name, kind in self._written():
            if why := self._type_refusal(self.rows.field(name).type, kind):
                return f"column {name} {why}"
        if self.is_by_iceberg:
            return None
        spec, order = self.metadata.spec(), self.metadata.sort_order()
        computed = [
            *((_folder_key, one.transform, one.source_id) for one in spec.fields),
            *((_key, one.transform, one.source_id) for one in order.fields),
        ]
        for key, transform, source_id in computed:
            if isinstance(transform, transforms.VoidTransform):
                continue
            source = self._source(source_id)
            if source is None:
                return "the table is partitioned or sorted by a field of a struct"
            if key(transform, source.field_type, sql_name(source.name)) is None:
                return f"the table is partitioned or sorted by {transform} of {source.name}"
        return None

    def asked(self, handle: Handle, folder: str, dictionaries: Dictionaries) -> EngineWrite:
        """`folder`: a URL."""
        select = {name: self._cast(name, kind) for name, kind in self._written()}
        schema = self.metadata.schema()
        required = [one.name for one in schema.fields if one.required and one.name in select]
        if self.is_by_iceberg:
            return EngineWrite(
                handle=handle,
                format=self.form,
                folder=folder,
                # To plan a selection takes Spark some milliseconds in each epoch.
                select={} if self._is_the_tables_own() else select,
                required=required,
                table=self._table_at(folder, dictionaries.unneeded()),
            )
        keys = dict(self._partition_keys())
        return EngineWrite(
            handle=handle,
            format=self.form,
            folder=folder,
            partition_by=list(keys),
            select={**select, **keys},
            required=required,
            sort_by=self._order(list(keys)),
            field_ids=dict(_field_ids(schema.fields)),
            options={**dictionaries.options(), **self._options()},
        )

    # Columns

    def _written(self) -> Iterator[tuple[str, iceberg.IcebergType]]:
        """Columns of the table that rows have; readers take those that a file lacks for null."""
        for one in self.metadata.schema().fields:
            if one.name in self.rows.names:
                yield one.name, one.field_type

    def _is_the_tables_own(self) -> bool:
        """Whether rows have the table's columns, all that are written, without a cast."""
        written = dict(self._written())
        return list(written) == self.rows.names and all(
            _is_same(self.rows.field(name).type, kind) and not has_required_inside(kind)
            for name, kind in written.items()
        )

    def _type_refusal(self, rows: pa.DataType, kind: iceberg.IcebergType) -> str | None:
        if isinstance(kind, iceberg.UUIDType) and self.is_by_iceberg and pa.types.is_string(rows):
            return None
        if isinstance(kind, iceberg.PrimitiveType):
            return None if _sql_type(kind) else f"is {kind}, of which Spark has no type"
        if not self.is_by_iceberg and not _is_of_structs(kind):
            return f"is {kind}, whose inside Spark's writer of parquet does not number"
        if not _is_same(rows, kind):
            return f"is {rows}, and {kind} in the table: fields inside are matched by tasks"
        return None

    def _cast(self, name: str, kind: iceberg.IcebergType) -> str:
        wanted, column = _sql_type(kind), sql_name(name)
        if wanted is not None:
            return f"CAST({column} AS {wanted})"
        if not has_required_inside(kind):
            return column
        error = f"raise_error({sql_text(null_inside(name).to_line())})"
        return f"IF({_has_null_inside(kind, column)}, {error}, {column})"

    def _source(self, source_id: int) -> iceberg.NestedField | None:
        """A column at the top; None of a field within a struct."""
        fields = self.metadata.schema().fields
        return next((one for one in fields if one.field_id == source_id), None)

    def _options(self) -> dict[str, str]:
        properties = self.metadata.properties
        codec = str(properties.get(_CODEC, _CODEC_DEFAULT)).lower()
        options = writer_options(codec)
        if _CODEC_LEVEL in properties and codec == _CODEC_DEFAULT:
            options["parquet.compression.codec.zstd.level"] = str(properties[_CODEC_LEVEL])
        given = ((ours, properties.get(name)) for name, ours in _PARQUET_OPTIONS.items())
        return {**options, **{name: str(value) for name, value in given if value is not None}}

    def _table_at(self, folder: str, without_dictionary: Sequence[str]) -> str:
        """The table's metadata, with its data in the job's folder: nobody commits it."""
        columns = {one.name for one in self.metadata.schema().fields}
        kept = {
            key: value
            for key, value in self.metadata.properties.items()
            if key != _LOCATIONS_OF_ITS_OWN and not key.startswith("epochal.")
        }
        # Without a codec, Iceberg's writer takes gzip, whatever a table is created with today.
        properties = {
            _CODEC: _CODEC_DEFAULT,
            **{
                f"{_DICTIONARY_OF}{name}": "false" for name in without_dictionary if name in columns
            },
            **kept,
            **_LOCATION_PROPERTIES,
            _DATA_PATH: folder,
        }
        return without_history(self.metadata, properties).model_dump_json()

    # Partitions and the order of rows

    def _partition_keys(self) -> Iterator[tuple[str, str]]:
        """Columns, by SQL, that are equal where rows are of one partition."""
        for number, one in enumerate(self.metadata.spec().fields):
            is_void = isinstance(one.transform, transforms.VoidTransform)
            source = None if is_void else self._source(one.source_id)
            if source is not None and source.name in self.rows.names:  # else null for every row
                key = _folder_key(one.transform, source.field_type, sql_name(source.name))
                yield _PARTITION.format(number), str(key)

    def _order(self, partition_keys: Sequence[str]) -> list[str]:
        fields = self.metadata.sort_order().fields
        found = [rising(name) for name in partition_keys]
        for one in fields:
            source = self._source(one.source_id)
            if source is not None and source.name in self.rows.names:
                key = _key(one.transform, source.field_type, sql_name(source.name))
                direction = "ASC" if one.direction == SortDirection.ASC else "DESC"
                nulls = "FIRST" if one.null_order == NullOrder.NULLS_FIRST else "LAST"
                found.append(f"{key} {direction} NULLS {nulls}")
        return found if fields else []


def _sql_type(kind: iceberg.IcebergType) -> str | None:
    if isinstance(kind, iceberg.DecimalType):
        return f"decimal({kind.precision}, {kind.scale})"
    return _SQL_TYPES.get(type(kind))


def _is_same(rows: pa.DataType, kind: iceberg.IcebergType) -> bool:
    """Whether values are the table's own without a cast, with the same fields in the same order."""
    if isinstance(kind, iceberg.StructType):
        inside = [(one.name, one.field_type) for one in kind.fields]
        return (
            pa.types.is_struct(rows)
            and [one.name for one in rows] == [name for name, _ in inside]
            and all(_is_same(rows.field(name).type, inner) for name, inner in inside)
        )
    if isinstance(kind, iceberg.ListType):
        return pa.types.is_list(rows) and _is_same(rows.value_type, kind.element_type)
    if isinstance(kind, iceberg.MapType):
        return (
            pa.types.is_map(rows)
            and _is_same(rows.key_type, kind.key_type)
            and _is_same(rows.item_type, kind.value_type)
        )
    return _sql_type(kind) is not None and _plain(rows) == _plain(schema_to_pyarrow(kind))


def _plain(kind: pa.DataType) -> pa.DataType:
    """One of the forms in which Arrow has the same values."""
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    return kind


def _has_null_inside(kind: iceberg.IcebergType, sql: str, depth: int = 0) -> str:
    """A condition in SQL: whether a value has a null in a field or element that takes none."""
    is_struct, element = isinstance(kind, iceberg.StructType), f"e{depth}"
    tests: list[str] = []
    for field in inner_values(kind):
        value = f"{sql}.{sql_name(field.name)}" if is_struct else element
        if field.required:
            tests.append(f"{value} IS NULL")
        if has_required_inside(field.field_type):
            tests.append(f"({_has_null_inside(field.field_type, value, depth + 1)})")
    is_one = " OR ".join(tests)
    if is_struct:
        return f"{sql} IS NOT NULL AND ({is_one})"
    elements = f"map_values({sql})" if isinstance(kind, iceberg.MapType) else sql
    return f"exists({elements}, {element} -> {is_one})"


def _is_of_structs(kind: iceberg.IcebergType) -> bool:
    if isinstance(kind, iceberg.StructType):
        return all(_is_of_structs(one.field_type) for one in kind.fields)
    return isinstance(kind, iceberg.PrimitiveType)


def _field_ids(fields: Sequence[iceberg.NestedField], above: str = "") -> Iterator[tuple[str, int]]:
    for one in fields:
        path = f"{above}{one.name}"
        yield path, one.field_id
        if isinstance(one.field_type, iceberg.StructType):
            yield from _field_ids(one.field_type.fields, f"{path}.")


def _key(
    transform: transforms.Transform[Any, Any], kind: iceberg.IcebergType, sql: str
) -> str | None:
    """A transform of a column in SQL; None where it is not known here."""
    if isinstance(transform, transforms.IdentityTransform):
        return sql if _sql_type(kind) else None
    if isinstance(transform, transforms.TimeTransform):
        return _time_key(transform, kind, sql)
    if isinstance(transform, transforms.TruncateTransform):
        if isinstance(kind, (iceberg.IntegerType, iceberg.LongType)):
            return f"({sql} - pmod({sql}, {transform.width}))"
        if isinstance(kind, iceberg.StringType):
            return f"substring({sql}, 1, {transform.width})"
    return None


def _time_key(
    transform: transforms.Transform[Any, Any], kind: iceberg.IcebergType, sql: str
) -> str:
    """In UTC, whatever the zone of the session is."""
    has_zone = isinstance(kind, iceberg.TimestamptzType)
    if isinstance(transform, transforms.HourTransform):
        hours = f"(unix_date(CAST({sql} AS date)) * 24 + hour({sql}))"
        return _whole_units(sql, _HOUR_US) if has_zone else hours
    days = _whole_units(sql, _DAY_US) if has_zone else f"unix_date(CAST({sql} AS date))"
    if isinstance(transform, transforms.DayTransform):
        return days
    day = f"date_from_unix_date({days})"
    if isinstance(transform, transforms.YearTransform):
        return f"(year({day}) - 1970)"
    return f"((year({day}) - 1970) * 12 + month({day}) - 1)"


def _whole_units(sql: str, unit_us: int) -> str:
    """Rounded down, before 1970 too."""
    micros = f"unix_micros({sql})"
    return f"CAST(({micros} - pmod({micros}, {unit_us})) div {unit_us} AS int)"


def _folder_key(
    transform: transforms.Transform[Any, Any], kind: iceberg.IcebergType, sql: str
) -> str | None:
    """
    The same as a value that names a folder: different values have different names. A text is never
    null: Spark takes an empty one for the same, and sorts rows again by what may be null.
    """
    key = _key(transform, kind, sql)
    if key is None or isinstance(kind, _NO_FOLDERS):
        return None
    if isinstance(kind, iceberg.StringType):
        is_name = f"octet_length({key}) <= {_TEXT_BYTES_MAX} AND NOT contains({key}, char(0))"
        return f"coalesce(IF({is_name}, concat('v', {key}), sha2({key}, 256)), 'n')"
    if isinstance(transform, transforms.IdentityTransform):
        if isinstance(kind, iceberg.TimestamptzType):
            return f"unix_micros({sql})"
        if isinstance(kind, iceberg.TimestampType):
            return f"coalesce(CAST({sql} AS string), 'n')"
    return key


# What a job left


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A data file in the folder of its job."""

    file: EngineFile
    about: Mapping[str, Any]
    """What a manifest says of it, but for its place."""

    def at(self, location: str, spec_id: int) -> DataFile:
        return _data_file(location, spec_id, self.about)


def _data_file(location: str, spec_id: int, about: Mapping[str, Any]) -> DataFile:
    found = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=location,
        file_format=FileFormat.PARQUET,
        key_metadata=None,
        equality_ids=None,
        **about,
    )
    found.spec_id = spec_id
    return found


def job_files(
    written: EngineWritten, metadata: TableMetadata, folder: Path, dictionaries: Dictionaries
) -> list[JobFile]:
    """The files of a job that succeeded, each looked at, and nothing that other attempts left."""
    if written.reports is None:
        files = engine_files(folder, written, footer_of=dictionaries.footer)
        if files:
            _require_field_ids(files[0], metadata)
        footers = Footers(metadata)
        return [JobFile(file=file, about=footers.describe(file)) for file in files]
    reports = {_local(report["file-path"]): report for report in map(json.loads, written.reports)}
    files = engine_files(folder, written, footer_of=dictionaries.footer, named=list(reports))
    return [
        JobFile(
            file=file,
            about=_reported(
                reports[file.path], metadata, str(file.path), rows=file.rows, size=file.bytes
            ),
        )
        for file in files
    ]


def stored_files(
    written: EngineWritten, metadata: TableMetadata, files: TableFiles, layout: Layout
) -> list[DataFile]:
    """The files of a job of Iceberg's own writer in a store, each looked at, where it put them."""
    handle, spec_id = written.handle, metadata.default_spec_id
    reports = {report["file-path"]: report for report in map(json.loads, written.reports or ())}
    if any(not location.startswith(f"{layout.folder(handle)}/") for location in reports):
        raise InvariantBroken(f"Iceberg has written elsewhere than to {layout.folder(handle)}")
    sizes = {location: report["file-size-in-bytes"] for location, report in reports.items()}
    require_put(sizes, files.sizes(list(sizes)), layout.folder(handle), "the table's catalog")
    rows = sum(report["record-count"] for report in reports.values())
    if rows != written.fingerprint.rows:
        raise TryAgain(
            f"Iceberg has written {rows} rows, and was given {written.fingerprint.rows}",
            "the epoch is tried again at the next start",
        )
    if reports and not layout.markers(files).exists(handle):
        discard(handle, files=files, layout=layout)
        raise TryAgain(f"{handle} was aborted while it was still writing")
    return [
        _data_file(
            location,
            spec_id,
            _reported(
                report, metadata, location, rows=report["record-count"], size=sizes[location]
            ),
        )
        for location, report in reports.items()
    ]


def prepared_files(
    found: Sequence[JobFile], handle: Handle, files: TableFiles, layout: Layout, *, spec_id: int
) -> list[DataFile]:
    """Give the files of a job the names that files of a task have, and make them durable."""
    prepared: list[DataFile] = []
    for number, one in enumerate(found):
        location = layout.file(handle, f"{number:05d}.parquet")
        path = files.local(location)
        if path is None:
            raise InvariantBroken(f"{location} is not on a local disk")
        if not number:
            make_folder(path.parent)
        one.file.move_to(path)
        prepared.append(one.at(location, spec_id))
    at_once(files.make_durable, [file.file_path for file in prepared])
    if prepared and not layout.markers(files).exists(handle):
        discard(handle, files=files, layout=layout)
        raise TryAgain(f"{handle} was aborted while it was still writing")
    return prepared


def _local(location: str) -> Path:
    """Hadoop writes `file:/tmp/…`."""
    return Path("/" + location.removeprefix("file:").lstrip("/"))


def _reported(
    report: Any, metadata: TableMetadata, location: str, *, rows: int | None, size: int
) -> dict[str, Any]:
    """As Iceberg's own writer says, where the file has these rows and this size."""
    if report["record-count"] != rows or report["file-size-in-bytes"] != size:
        raise TryAgain(
            f"{location} has {rows} rows and {size} bytes, and Iceberg has written "
            f"{report['record-count']} and {report['file-size-in-bytes']}",
            "nothing was decided: the epoch is tried again at the next start",
        )
    if report["spec-id"] != metadata.default_spec_id:
        raise InvariantBroken(f"{location} is of partition spec {report['spec-id']}")
    kinds = partition_types(metadata, metadata.default_spec_id)
    values = report.get("partition") or []
    return {
        "record_count": rows,
        "file_size_in_bytes": size,
        "partition": Record(
            *(
                None if value is None else from_bytes(kind, to_bytes(kind, from_json(kind, value)))
                for kind, value in zip(kinds, values, strict=True)
            )
        ),
        **{
            name.replace("-", "_"): dict(_by_field(report.get(name)))
            for name in ("column-sizes", "value-counts", "null-value-counts", "nan-value-counts")
        },
        **{
            name.replace("-", "_"): {
                number: bytes.fromhex(bound) for number, bound in _by_field(report.get(name))
            }
            for name in ("lower-bounds", "upper-bounds")
        },
        "split_offsets": report.get("split-offsets"),
        "sort_order_id": report.get("sort-order-id") or None,
    }


def _by_field(found: Any) -> Iterator[tuple[int, Any]]:
    if found is not None:
        yield from zip(found["keys"], found["values"], strict=True)


def _require_field_ids(file: EngineFile, metadata: TableMetadata) -> None:
    """Readers of a table know columns by number, and take a column without one for null."""
    wanted = {one.name: one.field_id for one in metadata.schema().fields}
    for column in file.footer.schema.to_arrow_schema():
        found = (column.metadata or {}).get(b"PARQUET:field_id")
        if found is None or int(found) != wanted.get(column.name):
            raise Misconfigured(
                f"Spark has written column {column.name} without its number in the table",
                "spark.sql.parquet.fieldId.write.enabled must be true, as it is by default",
            )


class Footers:
    """Describes files of Spark's writer of parquet by their footers."""

    def __init__(self, metadata: TableMetadata) -> None:
        self._metadata = metadata
        self._statistics = FooterStatistics(metadata)
        self._types = schema_to_pyarrow(metadata.schema(), include_field_ids=False)
        order = metadata.sort_order()
        self._order_id = order.order_id if order.fields else None

    def describe(self, file: EngineFile) -> dict[str, Any]:
        return {
            "file_size_in_bytes": file.bytes,
            "partition": self._partition(file),
            "sort_order_id": self._order_id,
            **self._statistics.of(file.footer),
        }

    def _partition(self, file: EngineFile) -> Record:
        schema, spec = self._metadata.schema(), self._metadata.spec()
        columns: dict[str, pa.Array] = {}
        for one in spec.fields:
            if not isinstance(one.transform, transforms.VoidTransform):
                name = schema.find_field(one.source_id).name
                columns[name] = pa.array(_extremes(file, name), self._types.field(name).type)
        rows = pa.table(columns) if columns else pa.table({"none": [None]})
        found = [partition for partition, _ in split(rows, spec, schema)]
        if len(found) != 1:
            raise _several_partitions(file, str(found))
        return found[0]


def _extremes(file: EngineFile, name: str) -> list[Any]:
    """The least and the greatest value of a column; of one without a value, nulls."""
    groups = parquet.column_statistics(file.footer).get(name, ())
    nulls = parquet.null_count(groups)
    if nulls == file.rows or not groups:
        return [None, None]
    found = parquet.bounds(groups)
    if found is None or nulls is None:  # parquet-java keeps no statistics of long values
        column = pq.read_table(file.path, columns=[name], partitioning=None).column(0)
        nulls, first = column.null_count, column.drop_null()[0].as_py()
        found = first, first
    if nulls:
        raise _several_partitions(file, f"{name} is null in {nulls} of {file.rows} rows")
    return list(found)


def _several_partitions(file: EngineFile, fact: str) -> InvariantBroken:
    return InvariantBroken(
        f"{file.path} has rows of several partitions: {fact}",
        "nothing was decided; with file_bytes_max=… tasks write instead",
    )
