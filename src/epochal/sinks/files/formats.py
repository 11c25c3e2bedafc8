"""
The file formats of a Files sink: how rows become bytes, and which columns they can't hold.

Tasks encode by Arrow, Spark's own writer by itself. Where both can, a reader gets the same values
from both: `EngineForm.options` makes Spark write text in the form of `_Csv` and `json_lines`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from epochal.arrow_values import scalar
from epochal.errors import Misconfigured
from epochal.kit import json_lines, parquet


class Encoder(Protocol):
    """Turns tables into one file. `close` finishes it and leaves the stream open."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """A format as Spark's own writer knows it."""

    name: str
    codecs: Mapping[str, str] = field(default_factory=dict)
    """Spark's names of compressions, where they differ from ours."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Always given, so that `read_epochs` and other readers find the form of this module."""
    accepted: frozenset[str] = frozenset()
    """Options that a user may give: none of them changes what a reader gets."""

    def writer_options(self, compression: str, given: Mapping[str, str]) -> dict[str, str]:
        codec = self.codecs.get(compression, compression)
        return {**self.options, "compression": codec, **given}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    extension: str
    compressions: Mapping[str, str]
    """Each one's part of the file's name."""
    default: str
    refusal: Callable[[pa.DataType], str | None]
    engine: EngineForm
    encoder: Callable[[pa.Table, str], Callable[[pa.NativeFile], Encoder]] | None = None
    """What makes files, by a sample of their rows and the compression; None: only Spark does."""
    rows_at_once: int = 0
    """Rows that are worth waiting for: a parquet row group is better large, text does not care."""
    is_compressed_inside: bool = False
    """By the format itself, block by block: readers need not know it by the file's name."""

    def suffix(self, compression: str) -> str:
        mark = self.compressions[compression]
        parts = (mark, self.extension) if self.is_compressed_inside else (self.extension, mark)
        return "".join(parts)

    def require_accepted(self, name: str, given: Iterable[str]) -> None:
        """Refuse an option of the writer that is not known, or would change what readers get."""
        accepted = self.engine.accepted
        for option in given:
            # Of a column: parquet.bloom.filter.enabled#id
            if option.partition("#")[0] in accepted:
                continue
            near = get_close_matches(option.partition("#")[0], accepted, n=1, cutoff=0.6)
            known = f"one of {', '.join(sorted(accepted))}" if accepted else "leave options out"
            raise Misconfigured(
                f"options={{{option!r}: …}} is not an option that {name} files take here",
                f"did you mean {near[0]!r}?" if near else known,
            )


class _Csv:
    """Instants are text in UTC: Arrow's own kernel for them is twenty times slower."""

    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, compression: str) -> None:
        self._stream = _compressed(stream, compression)
        self._instants = [column.name for column in schema if _is_instant(column.type)]
        self._floats = [column.name for column in schema if pa.types.is_floating(column.type)]
        empty = pa.Table.from_batches([], schema=schema)
        self._plain = self._writer(_as_text(empty, self._instants, _instant_text), is_first=True)
        self._odd: pa_csv.CSVWriter | None = None

    def _writer(self, empty: pa.Table, *, is_first: bool = False) -> pa_csv.CSVWriter:
        options = pa_csv.WriteOptions(include_header=is_first, quoting_style="needed")
        return pa_csv.CSVWriter(self._stream, empty.schema, write_options=options)

    def write(self, rows: pa.Table) -> None:
        rows = _as_text(rows, self._instants, _instant_text)
        if all(_is_finite(rows.column(name)) for name in self._floats):
            self._plain.write_table(rows)
            return
        # Arrow's `nan` and `inf` are null to Spark's reader.
        rows = _as_text(rows, self._floats, _float_text)
        self._odd = self._odd or self._writer(rows)
        self._odd.write_table(rows)

    def close(self) -> None:
        for writer in (self._plain, self._odd):
            if writer is not None:
                writer.close()
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


def _as_text(
    rows: pa.Table, names: Iterable[str], text_of: Callable[[pa.ChunkedArray], pa.ChunkedArray]
) -> pa.Table:
    for name in names:
        index = rows.schema.get_field_index(name)
        rows = rows.set_column(index, name, text_of(rows.column(index)))
    return rows


def _is_finite(values: pa.ChunkedArray) -> bool:
    return bool(pc.all(pc.is_finite(values), min_count=0).as_py())


def _float_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """With what is no number as Spark and Java write it."""
    text = values.cast(pa.large_string())
    for arrow, ours in _ODD_FLOATS.items():
        is_odd = pc.equal(text, scalar(arrow, pa.large_string()))
        text = pc.if_else(is_odd, scalar(ours, pa.large_string()), text)
    return text


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
    if pa.types.is_struct(kind) and not kind.num_fields:
        return "a struct without fields has no form in parquet"
    children = (kind.field(index).type for index in range(kind.num_fields))
    return next((why for child in children if (why := _parquet_refusal(child))), None)


def _csv_refusal(kind: pa.DataType) -> str | None:
    if pa.types.is_nested(kind):
        return f"CSV has no nested values, and this is {kind}"
    if any(is_one(kind) for is_one in _NO_CSV) or isinstance(kind, pa.BaseExtensionType):
        return f"{kind} has no form in CSV"
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return f"CSV is text, and this is {kind}"
    return None


_NO_CSV = (
    pa.types.is_null,
    pa.types.is_duration,
    pa.types.is_interval,
    # Written, and not read back by Arrow.
    pa.types.is_float16,
    pa.types.is_decimal256,
    # Not written by Arrow.
    pa.types.is_string_view,
    pa.types.is_binary_view,
)


def _orc_refusal(kind: pa.DataType) -> str | None:
    if pa.types.is_timestamp(kind) and kind.tz is None:
        return "Spark writes a timestamp without a zone to ORC as a plain number"
    children = (kind.field(index).type for index in range(kind.num_fields))
    return _parquet_refusal(kind) or next(
        (why for child in children if (why := _orc_refusal(child))), None
    )


def _avro_refusal(kind: pa.DataType) -> str | None:
    if pa.types.is_map(kind) and not pa.types.is_string(kind.key_type):
        return f"keys of Avro's maps are text, and these are {kind.key_type}"
    for index in range(kind.num_fields):
        inner = kind.field(index)
        if pa.types.is_struct(kind) and (why := avro_name_refusal(inner.name)):
            return why
        if why := _avro_refusal(inner.type):
            return why
    return _parquet_refusal(kind)


def avro_name_refusal(name: str) -> str | None:
    """Why a column can't have this name in Avro."""
    if _AVRO_NAME.fullmatch(name):
        return None
    return f"the name {name!r} has signs that Avro does not allow"


_AVRO_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TEXT_ROWS_AT_ONCE = 10_000
_ODD_FLOATS = {"nan": "NaN", "-nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_DATES = {"dateFormat": "yyyy-MM-dd", "timeZone": "UTC"}
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
        is_compressed_inside=True,
        engine=EngineForm(
            name="parquet",
            codecs={"lz4": "lz4_raw"},
            accepted=frozenset(
                f"parquet.{name}"
                for name in (
                    "block.size",
                    "block.row.count.limit",
                    "page.size",
                    "page.row.count.limit",
                    "page.write-checksum.enabled",
                    "enable.dictionary",
                    "dictionary.page.size",
                    "writer.version",
                    "bloom.filter.enabled",
                    "bloom.filter.expected.ndv",
                    "bloom.filter.fpp",
                    "bloom.filter.max.bytes",
                    "bloom.filter.adaptive.enabled",
                    "columnindex.truncate.length",
                    "statistics.truncate.length",
                    "compression.codec.zstd.level",
                    "compression.codec.zstd.workers",
                )
            ),
        ),
    ),
    "orc": Format(
        extension=".orc",
        compressions={
            "snappy": ".snappy",
            "zlib": ".zlib",
            "zstd": ".zstd",
            "lz4": ".lz4",
            "none": "",
        },
        default="zstd",
        refusal=_orc_refusal,
        is_compressed_inside=True,
        engine=EngineForm(
            name="orc",
            # Without it, days before 1582 are moved, and only Java's readers move them back.
            options={"orc.proleptic.gregorian": "true"},
            accepted=frozenset(
                f"orc.{name}"
                for name in (
                    "stripe.size",
                    "stripe.row.count",
                    "row.index.stride",
                    "create.index",
                    "compress.size",
                    "compression.strategy",
                    "compression.zstd.level",
                    "encoding.strategy",
                    "dictionary.key.threshold",
                    "column.encoding.direct",
                    "bloom.filter.columns",
                    "bloom.filter.fpp",
                    "block.padding",
                    "block.padding.tolerance",
                    "block.size",
                )
            ),
        ),
    ),
    "avro": Format(
        extension=".avro",
        compressions={
            "snappy": "",
            "deflate": "",
            "bzip2": "",
            "xz": "",
            "zstd": "",
            "none": "",
        },
        default="snappy",
        refusal=_avro_refusal,
        is_compressed_inside=True,
        engine=EngineForm(
            name="avro",
            codecs={"zstd": "zstandard", "none": "uncompressed"},
            accepted=frozenset({"recordName", "recordNamespace"}),
        ),
    ),
    "jsonl": Format(
        extension=".jsonl",
        compressions=_TEXT_COMPRESSIONS,
        default="none",
        encoder=_json_lines,
        refusal=json_lines.refusal,
        rows_at_once=_TEXT_ROWS_AT_ONCE,
        engine=EngineForm(
            name="json",
            options={
                **_DATES,
                "ignoreNullFields": "false",
                "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSX",
                "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
            },
            accepted=frozenset({"ignoreNullFields", "writeNonAsciiCharacterAsCodePoint"}),
        ),
    ),
    "csv": Format(
        extension=".csv",
        compressions=_TEXT_COMPRESSIONS,
        default="none",
        encoder=_csv,
        refusal=_csv_refusal,
        rows_at_once=_TEXT_ROWS_AT_ONCE,
        engine=EngineForm(
            name="csv",
            options={
                **_DATES,
                "header": "true",
                "escape": '"',
                "nullValue": "",
                "emptyValue": '""',
                "ignoreLeadingWhiteSpace": "false",
                "ignoreTrailingWhiteSpace": "false",
                "timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSSX",
                "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
            },
        ),
    ),
}


def format_of(path: str) -> str:
    """The format of a file, by its name."""
    name = path.rpartition("/")[2]
    return next(
        kind
        for kind, form in FORMATS.items()
        # Where files keep the names that Spark's writer gives them, its extension.
        if form.extension in name or f".{form.engine.name}" in name
    )
