"""Reading whole committed epochs: by the manifests, never by listing the folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import reduce
from os import PathLike
from typing import Any, overload

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds

from epochal.contract import Rows
from epochal.errors import Misconfigured
from epochal.kit.secrets import Secret
from epochal.sinks.files import layout
from epochal.sinks.files.backends import back_end
from epochal.sinks.files.formats import format_of
from epochal.sinks.files.json_reading import read_lines
from epochal.sinks.files.manifests import Manifest, ledgers
from epochal.sinks.files.options import storage_options as checked_options
from epochal.sinks.files.partitions import values_of
from epochal.sinks.files.places import Store
from epochal.sinks.files.schemas import load_schema
from epochal.sinks.files.spark_types import ddl, spark_type
from epochal.sinks.files.store_filesystem import filesystem
from epochal.sinks.files.urls import parse

_CSV_ROW_BYTES_MAX = 16 * 1024 * 1024
_SPARK_OPTIONS: dict[str, dict[str, str]] = {
    "parquet": {},
    "jsonl": {},
    "csv": {
        "header": "true",
        "escape": '"',
        "nullValue": "\0",  # so that a quoted empty string is not taken for null
        "multiLine": "true",
        "nanValue": "nan",
        "positiveInf": "inf",
        "negativeInf": "-inf",
        "timestampFormat": "yyyy-MM-dd HH:mm:ss[.SSSSSS]X",
        "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss[.SSSSSS]",
    },
}


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
    parquet and CSV lazily; JSON lines are read into memory here. An object store is reached with
    the sink's `storage_options`; Spark reaches it with its own settings (`s3a`).
    """
    target = parse(path)
    store = back_end(target, "auto", checked_options(target.scheme, storage_options or {})).store()
    manifests = [
        manifest
        for ledger in ledgers(store)
        for manifest in ledger.all()
        if (epochs is None or manifest.epoch in epochs) and pipeline in (None, manifest.pipeline)
    ]
    return read_manifests(store, manifests, spark)


def read_manifests(
    store: Store, manifests: Sequence[Manifest], spark: Any | None = None
) -> ds.Dataset | Rows:
    """The rows that these manifests name."""
    schema = _schema(store, manifests)
    files = [file.path for manifest in manifests for file in manifest.files]
    if spark is not None:
        return _spark_rows(spark, store, files, schema)
    return _dataset(store, files, schema)


def _schema(store: Store, manifests: Iterable[Manifest]) -> pa.Schema:
    """The columns of all these epochs; a column that came later is null before it."""
    digests = dict.fromkeys(
        manifest.schema for manifest in manifests if manifest.schema is not None
    )
    schemas = [load_schema(store, digest) for digest in digests]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])
    except pa.ArrowTypeError as error:
        raise Misconfigured(
            f"the epochs in {store.root} have columns that don't fit together: {error}",
            "read them in parts: epochs=range(first, last)",
        ) from error


def _dataset(store: Store, files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    parts = [_READERS[form](store, chosen, schema) for form, chosen in _by_format(files).items()]
    if not parts:
        return ds.dataset(schema.empty_table())
    return parts[0] if len(parts) == 1 else ds.dataset(parts)


def _by_format(files: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for file in files:
        groups[format_of(file)].append(file)
    return groups


def _of_columns(form: ds.FileFormat) -> Callable[[Store, Sequence[str], pa.Schema], ds.Dataset]:
    def read(store: Store, files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
        files_of_store, root = filesystem(store)
        return ds.FileSystemDataset.from_paths(
            [f"{root}/{file}" for file in files],
            schema=schema,
            format=form,
            filesystem=files_of_store,
            partitions=[_partition(file, schema) for file in files],
        )

    return read


def _partition(file: str, schema: pa.Schema) -> ds.Expression:
    """What a file's path says about all its rows."""
    claims = [
        _claim(name, _typed(value, schema.field(name).type))
        for name, value in values_of(file).items()
    ]
    return reduce(lambda one, other: one & other, claims, ds.scalar(True))


def _claim(name: str, value: pa.Scalar) -> ds.Expression:
    return ds.field(name) == value if value.is_valid else ds.field(name).is_null()


def _typed(value: str | None, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(value, pa.string()).cast(kind)


def _read_json(store: Store, files: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    tables = []
    files_of_store, root = filesystem(store)
    for file in files:
        with files_of_store.open_input_stream(f"{root}/{file}") as stream:
            rows = [
                json.loads(line, parse_float=str, parse_int=str)
                for line in stream.read().splitlines()
            ]
        fixed = {
            name: _typed(value, schema.field(name).type) for name, value in values_of(file).items()
        }
        tables.append(read_lines(rows, schema, fixed))
    return ds.dataset(pa.concat_tables(tables))


_CSV = ds.CsvFileFormat(
    parse_options=pa_csv.ParseOptions(newlines_in_values=True),
    read_options=pa_csv.ReadOptions(block_size=_CSV_ROW_BYTES_MAX),
    convert_options=pa_csv.ConvertOptions(
        strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""]
    ),
)
_READERS: dict[str, Callable[[Store, Sequence[str], pa.Schema], ds.Dataset]] = {
    "parquet": _of_columns(ds.ParquetFileFormat()),
    "csv": _of_columns(_CSV),
    "jsonl": _read_json,
}


def _spark_rows(spark: Any, store: Store, files: Sequence[str], schema: pa.Schema) -> Rows:
    if not files:
        return spark.createDataFrame([], ddl(schema))
    frames = [
        _spark_read(spark, store, form, chosen, schema)
        for form, chosen in _by_format(files).items()
    ]
    return reduce(lambda one, other: one.unionByName(other), frames)


def _spark_read(
    spark: Any, store: Store, form: str, files: Sequence[str], schema: pa.Schema
) -> Rows:
    hidden = [file for file in files if file.startswith(f"{layout.DATA}/")]
    shown = [file for file in files if file not in set(hidden)]
    root = _spark_root(store.root)
    reader = spark.read.options(**_SPARK_OPTIONS[form]).format("json" if form == "jsonl" else form)
    frames = [_spark_hidden(reader, root, some, schema) for some in _by_folder(hidden)]
    if shown:
        told = reader.schema(ddl(schema)).option("basePath", root)
        frames.append(told.load([f"{root}/{file}" for file in shown]))
    rows = reduce(lambda one, other: one.unionByName(other), frames)
    return rows.select([rows[f"`{name.replace('`', '``')}`"] for name in schema.names])


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


def _spark_root(root: str) -> str:
    """As Spark knows it."""
    return root.replace("s3://", "s3a://", 1) if root.startswith("s3://") else root
