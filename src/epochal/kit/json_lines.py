"""Arrow rows as JSON text, one column at a time, by Arrow's own kernels.

What is written is what Spark's JSON sink writes, except where that would lose something: nulls are
written out, and instants carry their `Z`.

- Integers, booleans and decimals as JSON numbers and literals; a decimal keeps all its digits,
  which readers that go through floating point don't.
- NaN and the infinities, for which JSON has no number, as the strings "NaN", "Infinity" and
  "-Infinity", which Spark reads back.
- Instants as ISO 8601 in UTC ("2026-01-31T09:30:00.000000Z"), timestamps without a zone and times
  likewise without the Z, dates as "2026-01-31".
- Binary as base64. Maps as objects; their keys become strings.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import number_array, numbers, scalar, texts

_TEXT = pa.large_string()
_MUST_ESCAPE = r'[\x00-\x1f"\\]'
_CONTROLS = r"[\x00-\x1f]"
_ODD_FLOAT = r"^-0$|n"
_ODD_FLOATS = {
    "-0": "-0.0",
    "nan": '"NaN"',
    "-nan": '"NaN"',
    "inf": '"Infinity"',
    "-inf": '"-Infinity"',
}
"""A zero without its point is an integer to many readers, and integers have no negative zero."""


def refusal(kind: pa.DataType) -> str | None:
    """Why values of this type can't be written, or None where they can."""
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        children = (kind.field(index).type for index in range(kind.num_fields))
        return next((why for child in children if (why := refusal(child))), None)
    return None if _writer_of(kind) is not None else f"{kind} has no form in JSON here"


def lines(rows: pa.RecordBatch) -> pa.Buffer:
    """All rows as UTF-8 text, one object and one newline per row."""
    objects = _object(rows.schema.names, rows.columns, rows.num_rows)
    text = _concatenated(objects, "\n")
    return _bytes_of(text)


def _bytes_of(text: pa.LargeStringArray) -> pa.Buffer:
    """The values of an unsliced array lie one after the other: they are the file's content."""
    data = text.buffers()[2]
    return (
        pa.py_buffer(b"")
        if data is None
        else data.slice(0, pc.sum(pc.binary_length(text)).as_py() or 0)
    )


def as_json(values: pa.Array) -> pa.Array:
    """Each value as JSON text; null as `null`."""
    writer = _writer_of(values.type)
    if writer is None:
        raise TypeError(f"{values.type} has no form in JSON here")
    return pc.fill_null(writer(values), scalar("null", _TEXT))


def _writer_of(kind: pa.DataType) -> Callable[[pa.Array], pa.Array] | None:
    return next((writer for accepts, writer in _WRITERS if accepts(kind)), None)


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(_TEXT)


def _nothing(values: pa.Array) -> pa.Array:
    return pa.nulls(len(values), _TEXT)


def _floating(values: pa.Array) -> pa.Array:
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    text = values.cast(_TEXT)
    if pc.any(pc.match_substring_regex(text, _ODD_FLOAT)).as_py():
        for arrow, ours in _ODD_FLOATS.items():
            text = pc.if_else(pc.equal(text, scalar(arrow, _TEXT)), scalar(ours, _TEXT), text)
    return text


def _string(values: pa.Array) -> pa.Array:
    text = values.cast(_TEXT)
    if pc.any(pc.match_substring_regex(text, _MUST_ESCAPE)).as_py():
        text = _escaped(text)
    return _quoted(text)


def _escaped(text: pa.Array) -> pa.Array:
    text = pc.replace_substring(text, "\\", "\\\\")
    text = pc.replace_substring(text, '"', '\\"')
    if pc.any(pc.match_substring_regex(text, _CONTROLS)).as_py():
        for code in range(0x20):
            text = pc.replace_substring(text, chr(code), json.dumps(chr(code))[1:-1])
    return text


def _quoted(text: pa.Array) -> pa.Array:
    return _concatenated('"', text, '"')


def _timestamp(values: pa.Array) -> pa.Array:
    kind = values.type
    if kind.tz is not None:
        values = values.cast(pa.timestamp(kind.unit, "UTC"))
    # Without its zone first: the kernel that also prints the zone is twenty times slower.
    wall = values.cast(pa.timestamp(kind.unit)).cast(_TEXT)
    iso = pc.replace_substring(wall, " ", "T", max_replacements=1)
    return _concatenated('"', iso, '"' if kind.tz is None else 'Z"')


def _date_or_time(values: pa.Array) -> pa.Array:
    if pa.types.is_date64(values.type):
        values = values.cast(pa.date32())
    return _quoted(values.cast(_TEXT))


def _binary(values: pa.Array) -> pa.Array:
    encoded = [b"" if value is None else base64.b64encode(value) for value in values.to_pylist()]
    return _where_valid(values, _quoted(texts(encoded, _TEXT)))


def _list(values: pa.Array) -> pa.Array:
    return _joined_lists(values, as_json(values.flatten()), "[", "]")


def _map(values: pa.Array) -> pa.Array:
    kind = values.type
    pairs = pa.struct(
        [pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]
    )
    lists = values.cast(pa.list_(pairs))
    keys, items = lists.flatten().flatten()
    entries = _concatenated(_key(keys), ":", as_json(items))
    return _joined_lists(lists, entries, "{", "}")


def _key(keys: pa.Array) -> pa.Array:
    text = as_json(keys)
    return pc.if_else(pc.starts_with(text, '"'), text, _quoted(text))


def _joined_lists(lists: pa.Array, entries: pa.Array, opening: str, closing: str) -> pa.Array:
    counts = pc.list_value_length(lists).cast(pa.int64())
    lengths = numbers(pc.fill_null(counts, scalar(0, pa.int64())))
    offsets = number_array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    joined = pc.binary_join(pa.LargeListArray.from_arrays(offsets, entries), scalar(",", _TEXT))
    return _where_valid(lists, _concatenated(opening, joined, closing))


def _struct(values: pa.Array) -> pa.Array:
    names = [field.name for field in values.type]
    return _where_valid(values, _object(names, values.flatten(), len(values)))


def _object(names: Sequence[str], columns: Sequence[pa.Array], count: int) -> pa.Array:
    if not names:
        return texts(["{}"] * count, _TEXT)
    parts: list[pa.Array | str] = []
    for name, column in zip(names, columns, strict=True):
        parts += [
            ("," if parts else "{") + json.dumps(name, ensure_ascii=False) + ":",
            as_json(column),
        ]
    return _concatenated(*parts, "}")


def _concatenated(*parts: pa.Array | str) -> pa.Array:
    """Element by element; null where any part is null."""
    pieces = [scalar(part, _TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*pieces, scalar("", _TEXT))


def _where_valid(values: pa.Array, text: pa.Array) -> pa.Array:
    return pc.if_else(values.is_valid(), text, scalar(None, _TEXT))


def _decoded(values: pa.Array) -> pa.Array:
    return as_json(values.dictionary_decode())


_WRITERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...] = (
    (pa.types.is_null, _nothing),
    (pa.types.is_boolean, _plain),
    (pa.types.is_integer, _plain),
    (pa.types.is_decimal, _plain),
    (pa.types.is_floating, _floating),
    (pa.types.is_string, _string),
    (pa.types.is_large_string, _string),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_date, _date_or_time),
    (pa.types.is_time, _date_or_time),
    (pa.types.is_binary, _binary),
    (pa.types.is_large_binary, _binary),
    (pa.types.is_fixed_size_binary, _binary),
    (pa.types.is_map, _map),
    (pa.types.is_list, _list),
    (pa.types.is_large_list, _list),
    (pa.types.is_fixed_size_list, _list),
    (pa.types.is_struct, _struct),
    (pa.types.is_dictionary, _decoded),
)
