"""
The reader of whole committed epochs: by the manifests, never by listing the folder.

Types come from the schema that was kept beside the files: JSON lines and CSV are read back exactly,
by Arrow and by Spark alike.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, overload

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.fs as pa_fs

from epochal.contract import Rows
from epochal.errors import CorruptRecord, Misconfigured
from epochal.kit.engine_files import hadoop_url
from epochal.kit.hive_partitions import values_of
from epochal.kit.secrets import Secret
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Stores, backend_for
from epochal.sinks.files.formats import FORMATS, format_of
from epochal.sinks.files.ledger import Manifest, ledgers
from epochal.sinks.files.target import parse
from epochal.sinks.files.target import storage_options as checked_options
from epochal.storage import FileStore
from epochal.storage.local import LocalStore

_CSV_ROW_BYTES_MAX = 16 * 1024 * 1024
_SPARK_OPTIONS: dict[str, dict[str, str]] = {
    "parquet": {},
    "orc": {},
    "avro": {},
    "jsonl": {},
    "csv": {
        "header": "true",
        "escape": '"',
        "nullValue": "\0",  # so that a quoted empty string is not taken for null
        "multiLine": "true",
        "timestampFormat": "yyyy-MM-dd HH:mm:ss[.SSSSSS]X",
        "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss[.SSSSSS]",
    },
}


_NO_GLOBS = {"__globPaths__": "false"}
"""Spark's own: a `[` or `{` in the path of a folder is no pattern."""


@overload
def read_epochs(
    path: str | PathLike[str],
    *,
    epochs: Container[int] | None = ...,
    pipeline: str | None = ...,
    storage_options: Mapping[str, str | Secret] | None = ...,
    spark: None = ...,
) -> ds.Dataset: ...


@overload
def read_epochs(
    path: str | PathLike[str],
    *,
    epochs: Container[int] | None = ...,
    pipeline: str | None = ...,
    storage_options: Mapping[str, str | Secret] | None = ...,
    spark: Any,
) -> Rows: ...


def read_epochs(
    path: str | PathLike[str],
    *,
    epochs: Container[int] | None = None,
    pipeline: str | None = None,
    storage_options: Mapping[str, str | Secret] | None = None,
    spark: Any | None = None,
) -> ds.Dataset | Rows:
    """
    The rows of whole committed epochs below a `Files` sink's folder, partition columns included.

    All epochs of all pipelines, or those in `epochs` (a range, a set), or those of one pipeline.
    Gives a pyarrow Dataset, or a DataFrame of the Spark session where one is given. A dataset reads
    parquet, ORC and CSV lazily; JSON lines and Avro (by fastavro) are read into memory here.
    An object store is reached with the sink's `storage_options`; Spark reaches it with its own
    settings (`s3a`).
    """
    target = parse(path)
    if target.scheme == "file" and not Path(target.text).is_dir():
        raise Misconfigured(
            f"there is no folder {target.text}",
            "name the path of a Files sink; a start of its pipeline makes the folder",
        )
    options = checked_options(target.scheme, storage_options or {})
    stores = backend_for(target, "auto", options).stores()
    manifests = [
        manifest
        for ledger in ledgers(stores.ours)
        for manifest in ledger.all()
        if (epochs is None or manifest.epoch in epochs) and pipeline in (None, manifest.pipeline)
    ]
    return read_manifests(stores, manifests, spark)


def read_manifests(
    stores: Stores, manifests: Sequence[Manifest], spark: Any | None = None
) -> ds.Dataset | Rows:
    """The rows that these manifests name."""
    schema = _schema(stores.ours, manifests)
    files = [file.path for manifest in manifests for file in manifest.files]
    if spark is not None:
        return _spark_rows(spark, stores, files, schema)
    return _dataset(stores, files, schema)


def _schema(store: FileStore, manifests: Iterable[Manifest]) -> pa.Schema:
    """The columns of all these epochs; a column that came later is null before it."""
    digests = dict.fromkeys(
        manifest.schema for manifest in manifests if manifest.schema is not None
    )
    schemas = [_load_schema(store, digest) for digest in digests]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])
    except pa.ArrowTypeError as error:
        raise Misconfigured(
            f"the epochs in {store.location} have columns that don't fit together: {error}",
            "read them in parts: epochs=range(first, last)",
        ) from error


def _load_schema(store: FileStore, digest: str) -> pa.Schema:
    content = store.read(layout.schema(digest))
    if content is None:
        raise CorruptRecord(
            f"{store.location}/{layout.schema(digest)} is gone, and manifests cite it",
            "what is there belongs to the pipeline: restore it from a copy",
        )
    return pa.ipc.read_schema(pa.BufferReader(content))


def _dataset(stores: Stores, files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    parts = [_READERS[form](stores, chosen, schema) for form, chosen in _by_format(files).items()]
    if not parts:
        return ds.dataset(schema.empty_table())
    return parts[0] if len(parts) == 1 else ds.dataset(parts)


def _by_format(files: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for file in files:
        groups[format_of(file)].append(file)
    return groups


def _of_columns(form: ds.FileFormat) -> Callable[[Stores, Sequence[str], pa.Schema], ds.Dataset]:
    def read(stores: Stores, files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
        return ds.FileSystemDataset.from_paths(
            [_full_path(stores, file) for file in files],
            schema=schema,
            format=form,
            filesystem=_file_system(stores),
            partitions=[_partition(file, schema) for file in files],
        )

    return read


def _partition(file: str, schema: pa.Schema) -> ds.Expression:
    """What is true of all rows of a file, by its path."""
    conditions = [
        _equals(name, _typed(value, schema.field(name).type))
        for name, value in values_of(file).items()
    ]
    return reduce(lambda one, other: one & other, conditions, ds.scalar(True))


def _equals(name: str, value: pa.Scalar) -> ds.Expression:
    return ds.field(name) == value if value.is_valid else ds.field(name).is_null()


def _typed(value: str | None, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(value, pa.string()).cast(kind)


def _read_json(stores: Stores, files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    tables = []
    file_system = _file_system(stores)
    for file in files:
        with file_system.open_input_stream(_full_path(stores, file)) as stream:
            rows = [
                json.loads(line, parse_float=str, parse_int=str)
                for line in stream.read().splitlines()
            ]
        tables.append(read_lines(rows, schema, _fixed(file, schema)))
    return ds.dataset(pa.concat_tables(tables))


def _read_avro(stores: Stores, files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    try:
        from fastavro import reader  # noqa: PLC0415  few need it
    except ImportError:
        raise Misconfigured(
            "reading Avro files without Spark can't run without fastavro, which is not installed",
            "pip install fastavro; or read_epochs(…, spark=spark)",
        ) from None
    tables = []
    file_system = _file_system(stores)
    for file in files:
        with file_system.open_input_stream(_full_path(stores, file)) as stream:
            rows: list[Any] = list(reader(stream))
        fixed = _fixed(file, schema)
        columns = [
            pa.repeat(fixed[column.name], len(rows))
            if column.name in fixed
            else pa.array([row.get(column.name) for row in rows], column.type)
            for column in schema
        ]
        tables.append(pa.Table.from_arrays(columns, schema=schema))
    return ds.dataset(pa.concat_tables(tables))


def _fixed(file: str, schema: pa.Schema) -> dict[str, pa.Scalar]:
    """The columns that a file's path holds."""
    return {name: _typed(value, schema.field(name).type) for name, value in values_of(file).items()}


_CSV = ds.CsvFileFormat(
    parse_options=pa_csv.ParseOptions(newlines_in_values=True),
    read_options=pa_csv.ReadOptions(block_size=_CSV_ROW_BYTES_MAX),
    convert_options=pa_csv.ConvertOptions(
        strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""]
    ),
)
_READERS: dict[str, Callable[[Stores, Sequence[str], pa.Schema], ds.Dataset]] = {
    "parquet": _of_columns(ds.ParquetFileFormat()),
    "orc": _of_columns(ds.OrcFileFormat()),
    "avro": _read_avro,
    "csv": _of_columns(_CSV),
    "jsonl": _read_json,
}


def _spark_rows(spark: Any, stores: Stores, files: Sequence[str], schema: pa.Schema) -> Rows:
    if not files:
        return spark.createDataFrame([], ddl(schema))
    frames = [
        _spark_read(spark, stores, form, chosen, schema)
        for form, chosen in _by_format(files).items()
    ]
    return reduce(lambda one, other: one.unionByName(other), frames)


def _spark_read(
    spark: Any, stores: Stores, form: str, files: Sequence[str], schema: pa.Schema
) -> Rows:
    hidden = [file for file in files if layout.is_data(file)]
    shown = [file for file in files if not layout.is_data(file)]
    root, ours = (hadoop_url(store.location) for store in (stores.shown, stores.ours))
    reader = spark.read.options(**_SPARK_OPTIONS[form], **_NO_GLOBS)
    reader = reader.format(FORMATS[form].engine.name)
    read_as = _avro_types(schema) if form == "avro" else schema
    frames = [_spark_hidden(reader, ours, some, read_as) for some in _by_folder(hidden)]
    if shown:
        visible = reader.schema(ddl(read_as)).option("basePath", root)
        frames.append(visible.load([f"{root}/{file}" for file in shown]))
    rows = reduce(lambda one, other: one.unionByName(other), frames)
    columns = [rows[_quoted(name)] for name in schema.names]
    if read_as is not schema:
        types = [spark_type(column.type) for column in schema]
        columns = [one.cast(kind) for one, kind in zip(columns, types, strict=True)]
    return rows.select(columns)


def _avro_types(schema: pa.Schema) -> pa.Schema:
    """The columns with Avro's integers: Spark refuses to read them as smaller ones."""
    return pa.schema([column.with_type(_with_avro_integers(column.type)) for column in schema])


def _with_avro_integers(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_int8(kind) or pa.types.is_int16(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_with_avro_integers(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _with_avro_integers(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_with_avro_integers(kind.value_type))
    return kind


def _spark_hidden(reader: Any, root: str, files: Sequence[str], schema: pa.Schema) -> Rows:
    """Files of one partition: each lies below its attempt's folder, which Spark can't follow."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  only where a session is given

    values = values_of(files[0])
    columns = pa.schema([column for column in schema if column.name not in values])
    rows = reader.schema(ddl(columns)).option("recursiveFileLookup", "true")
    frame = rows.load([f"{root}/{file}" for file in files])
    for name, value in values.items():
        frame = frame.withColumn(name, F.lit(value).cast(spark_type(schema.field(name).type)))
    return frame


def _by_folder(files: Iterable[str]) -> list[list[str]]:
    groups: dict[tuple[tuple[str, str | None], ...], list[str]] = defaultdict(list)
    for file in files:
        groups[tuple(values_of(file).items())].append(file)
    return list(groups.values())


def read_lines(
    rows: Sequence[Mapping[str, Any]], schema: pa.Schema, fixed: Mapping[str, pa.Scalar]
) -> pa.Table:
    """These rows with the columns of `schema`; one in `fixed` has the same value throughout."""
    columns = [
        pa.repeat(fixed[column.name], len(rows))
        if column.name in fixed
        else _array([row.get(column.name) for row in rows], column.type)
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Numbers and times go through text, whose cast is exact."""
    if pa.types.is_nested(kind):
        return pa.array([_nested(value, kind) for value in values], kind)
    if _is_binary(kind):
        return pa.array(
            [None if value is None else base64.b64decode(value) for value in values], kind
        )
    if pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return pa.array(values, kind)
    if pa.types.is_dictionary(kind):
        return _array(values, kind.value_type).cast(kind)
    if pa.types.is_time(kind):  # of a day, as Arrow casts no text to a time
        days = [None if value is None else f"1970-01-01 {value}" for value in values]
        return pa.array(days, pa.string()).cast(pa.timestamp(kind.unit)).cast(kind)
    return pa.array([None if value is None else str(value) for value in values], pa.string()).cast(
        kind
    )


def _nested(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _one(value.get(field.name), field.type) for field in kind}
    if pa.types.is_map(kind):
        return [
            (_one(key, kind.key_type), _one(item, kind.item_type)) for key, item in value.items()
        ]
    return [_one(item, kind.value_type) for item in value]


def _one(value: Any, kind: pa.DataType) -> Any:
    """One value within a nested one, as a scalar of its own type."""
    return _nested(value, kind) if pa.types.is_nested(kind) else _array([value], kind)[0].as_py()


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(is_one(kind) for is_one in tests)


def _full_path(stores: Stores, file: str) -> str:
    return f"{stores.of(file).location}/{file}"


def _file_system(stores: Stores) -> pa_fs.FileSystem:
    """What opens files by their full paths."""
    if isinstance(stores.shown, LocalStore):
        return pa_fs.LocalFileSystem()
    return pa_fs.PyFileSystem(_Handler(stores))


class _Handler(pa_fs.FileSystemHandler):  # type: ignore[misc] # Arrow has no types
    """Opens known files, which is all that a dataset of them needs."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def get_type_name(self) -> str:
        return "epochal"

    def normalize_path(self, path: str) -> str:
        return path

    def open_input_file(self, path: str) -> pa.NativeFile:
        store = next(
            one
            for one in (self._stores.shown, self._stores.ours)
            if path.startswith(f"{one.location}/")
        )
        file = store.open(path.removeprefix(f"{store.location}/"))
        if file is None:
            raise FileNotFoundError(path)
        return pa.PythonFile(file, mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def get_file_info(self, paths: list[str]) -> list[pa_fs.FileInfo]:
        return [pa_fs.FileInfo(path, pa_fs.FileType.File) for path in paths]

    def _refuse(self, *what: Any) -> Any:
        raise OSError(f"{what}: this file system is read-only")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refuse
    get_file_info_selector = _refuse


def ddl(schema: pa.Schema) -> str:
    return ", ".join(f"{_quoted(column.name)} {spark_type(column.type)}" for column in schema)


def _quoted(name: str) -> str:
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def spark_type(kind: pa.DataType) -> str:
    for accepts, name in _SPARK_TYPES:
        if accepts(kind):
            return name(kind) if callable(name) else name
    raise Misconfigured(f"Spark has no type for {kind}", "read it without a Spark session")


def _struct(kind: pa.DataType) -> str:
    fields = (f"{_quoted(field.name)}: {spark_type(field.type)}" for field in kind)
    return f"STRUCT<{', '.join(fields)}>"


def _map(kind: pa.DataType) -> str:
    return f"MAP<{spark_type(kind.key_type)}, {spark_type(kind.item_type)}>"


_Name: TypeAlias = "str | Callable[[pa.DataType], str]"
_SPARK_TYPES: tuple[tuple[Callable[[pa.DataType], bool], _Name], ...] = (
    (pa.types.is_boolean, "BOOLEAN"),
    (pa.types.is_int8, "TINYINT"),
    (pa.types.is_int16, "SMALLINT"),
    (pa.types.is_int32, "INT"),
    (pa.types.is_int64, "BIGINT"),
    (pa.types.is_float32, "FLOAT"),
    (pa.types.is_float64, "DOUBLE"),
    (pa.types.is_decimal, lambda kind: f"DECIMAL({kind.precision}, {kind.scale})"),
    (pa.types.is_string, "STRING"),
    (pa.types.is_large_string, "STRING"),
    (pa.types.is_binary, "BINARY"),
    (pa.types.is_large_binary, "BINARY"),
    (pa.types.is_date32, "DATE"),
    (pa.types.is_timestamp, lambda kind: "TIMESTAMP_NTZ" if kind.tz is None else "TIMESTAMP"),
    (pa.types.is_map, _map),
    (pa.types.is_list, lambda kind: f"ARRAY<{spark_type(kind.value_type)}>"),
    (pa.types.is_large_list, lambda kind: f"ARRAY<{spark_type(kind.value_type)}>"),
    (pa.types.is_struct, _struct),
)
