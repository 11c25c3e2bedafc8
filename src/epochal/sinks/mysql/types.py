"""MySQL's types: how values are written as text for LOAD DATA, and what columns make of it.

A staging column has the type of the column that its field is meant for, so that the server's own
conversion happens once, while rows are loaded, and a value that does not fit is found with its row.
Where MySQL would truncate silently (fractions of a second, NaN, a NULL that becomes a default), the
values are checked before they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import scalar
from epochal.kit.sql.types import TAKERS, Convert, Sent, in_utc, microseconds, sent_to

TEXT = pa.large_string()
_WHOLE = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "bit"})


def sent_as(kind: pa.DataType) -> Sent | str:
    """How values of this type travel as text, or why they can't."""
    sent = sent_to("mysql", kind)
    return sent if isinstance(sent, str) else sent.then(_TO_TEXT.get(sent.family, _plain))


# Values as text, by Arrow's kernels: no Python per row


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(TEXT)


def _escaped(values: pa.Array) -> pa.Array:
    text = values.cast(TEXT)
    if not pc.any(pc.match_substring_regex(text, r"[\\\t\n\x00]")).as_py():
        return text
    for raw, written in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\0", "\\0")):
        text = pc.replace_substring(text, raw, written)
    return text


_HEX = np.array([f"{byte:02X}".encode() for byte in range(256)], dtype="S2").view(np.uint16)


def _hex(values: pa.Array) -> pa.Array:
    """Every byte as two digits: raw bytes would be read as text of the file's character set."""
    values = pa.concat_arrays([values.cast(pa.large_binary())])
    offsets = np.frombuffer(values.buffers()[1], np.int64)[
        values.offset : values.offset + len(values) + 1
    ]
    data = values.buffers()[2]
    whole = (
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    )
    used = whole[offsets[0] : offsets[-1]] if len(offsets) else whole[:0]
    digits = _HEX[used].tobytes()
    text = pa.Array.from_buffers(
        TEXT,
        len(values),
        [None, pa.py_buffer(((offsets - offsets[:1]) * 2).tobytes()), pa.py_buffer(digits)],
    )
    return pc.if_else(values.is_valid(), text, scalar(None, TEXT)) if values.null_count else text


_TO_TEXT: Mapping[str, Convert] = {
    "bool": lambda values: _plain(values.cast(pa.int8())),
    # Through double: the digits of a float's own shortest form would be rounded twice.
    "float": lambda values: _plain(values.cast(pa.float64())),
    "timestamp": lambda values: _plain(in_utc(values)),
    "duration": lambda values: _plain(microseconds(values)),
    "text": _escaped,
    "json": _escaped,
    "binary": _hex,
}


# What a column takes


@dataclass(frozen=True, slots=True)
class Mismatch:
    because: str
    hint: str


def load_expression(sent: Sent, data_type: str, written: str, scale: int) -> str | Mismatch | None:
    """What is made of a loaded text `{}` for a column; None where it may be read directly."""
    is_whole = sent.family == "decimal" and sent.scale == 0 and data_type in _WHOLE
    if data_type not in TAKERS[sent.family].mysql and not is_whole:
        return Mismatch(
            f"{sent.ddl} can't become {written} without loss",
            'give it as a string (select=["cast(x as string) x"]): the server reads it as the '
            "column's own type",
        )
    if sent.family == "binary":
        return "UNHEX({})"
    if data_type == "bit":
        return "CAST({} AS UNSIGNED)"
    if sent.family == "float" and data_type == "decimal":
        return f"ROUND({{}} + 0e0, {scale})"
    return None
