"""The file formats of a Files sink: how rows become bytes, and which columns they can't hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from epochal.arrow_values import scalar
from epochal.kit import json_lines, parquet


class Encoder(Protocol):
    """Turns tables into one file. `close` finishes it and leaves the stream open."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    extension: str
    compressions: Mapping[str, str]
    """Each one's part of the file's name."""
    default: str
    encoder: Callable[[pa.Table, str], Callable[[pa.NativeFile], Encoder]]
    """What makes files, by a sample of their rows and the compression."""
    refusal: Callable[[pa.DataType], str | None]
    rows_at_once: int
    """Rows that are worth waiting for: a parquet row group is better large, text does not care."""

    def suffix(self, compression: str) -> str:
        mark = self.compressions[compression]
        return (
            f"{mark}{self.extension}" if self.extension == ".parquet" else f"{self.extension}{mark}"
        )


class _Csv:
    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, compression: str) -> None:
        self._stream = _compressed(stream, compression)
        options = pa_csv.WriteOptions(include_header=True, quoting_style="needed")
        self._instants = [column.name for column in schema if _is_instant(column.type)]
        empty = self._as_text(pa.Table.from_batches([], schema=schema))
        self._writer = pa_csv.CSVWriter(self._stream, empty.schema, write_options=options)

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(self._as_text(rows))

    def _as_text(self, rows: pa.Table) -> pa.Table:
        """Instants as text in UTC: Arrow's own kernel for them is twenty times slower."""
        for name in self._instants:
            index = rows.schema.get_field_index(name)
            rows = rows.set_column(index, name, _instant_text(rows.column(index)))
        return rows

    def close(self) -> None:
        self._writer.close()
        _finish(self._stream)


class _JsonLines:
    def __init__(self, stream: pa.NativeFile, compression: str) -> None:
        self._stream = _compressed(stream, compression)

    def write(self, rows: pa.Table) -> None:
        for batch in rows.to_batches():
            self._stream.write(json_lines.lines(batch))

    def close(self) -> None:
        _finish(self._stream)


def _csv(sampled: pa.Table, compression: str) -> Callable[[pa.NativeFile], Encoder]:
    return lambda stream: _Csv(stream, sampled.schema, compression)


def _json_lines(sampled: pa.Table, compression: str) -> Callable[[pa.NativeFile], Encoder]:  # noqa: ARG001
    return lambda stream: _JsonLines(stream, compression)


def _is_instant(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind)) and kind.tz is not None


def _instant_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    unit = values.type.unit
    wall = values.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit))
    zone, nothing = scalar("Z", pa.large_string()), scalar("", pa.large_string())
    return pc.binary_join_element_wise(wall.cast(pa.large_string()), zone, nothing)


def _compressed(stream: pa.NativeFile, compression: str) -> pa.NativeFile:
    return stream if compression == "none" else pa.CompressedOutputStream(stream, compression)


def _finish(stream: pa.NativeFile) -> None:
    if isinstance(stream, pa.CompressedOutputStream):
        stream.close()
    else:
        stream.flush()


def _parquet_refusal(kind: pa.DataType) -> str | None:
    if pa.types.is_null(kind):
        return "a column of nothing but nulls has no type in parquet"
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return f"{kind} would come back from parquet as a plain number"
    children = (kind.field(index).type for index in range(kind.num_fields))
    return next((why for child in children if (why := _parquet_refusal(child))), None)


def _csv_refusal(kind: pa.DataType) -> str | None:
    if pa.types.is_nested(kind):
        return f"CSV has no nested values, and this is {kind}"
    if pa.types.is_null(kind) or pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return f"{kind} has no form in CSV"
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return f"CSV is text, and this is {kind}"
    return None


_TEXT_ROWS_AT_ONCE = 10_000
_TEXT_COMPRESSIONS = {"none": "", "gzip": ".gz"}
"""What every reader of text files undoes by the file's name; of zstd few do."""

FORMATS: Mapping[str, Format] = {
    "parquet": Format(
        extension=".parquet",
        compressions={
            "snappy": ".snappy",
            "zstd": ".zstd",
            "gzip": ".gz",
            "lz4": ".lz4",
            "none": "",
        },
        default="snappy",
        encoder=parquet.encoder,
        refusal=_parquet_refusal,
        rows_at_once=1_000_000,
    ),
    "jsonl": Format(
        extension=".jsonl",
        compressions=_TEXT_COMPRESSIONS,
        default="none",
        encoder=_json_lines,
        refusal=json_lines.refusal,
        rows_at_once=_TEXT_ROWS_AT_ONCE,
    ),
    "csv": Format(
        extension=".csv",
        compressions=_TEXT_COMPRESSIONS,
        default="none",
        encoder=_csv,
        refusal=_csv_refusal,
        rows_at_once=_TEXT_ROWS_AT_ONCE,
    ),
}


def format_of(path: str) -> str:
    """The format of a file, by its name."""
    name = path.rpartition("/")[2]
    return next(kind for kind, form in FORMATS.items() if form.extension in name)
