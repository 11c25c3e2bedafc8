"""Oracle's types: the Arrow types that are bound, and which column takes which family.

A staging column has the type of the column that its field is meant for. Where Oracle would truncate
or change a value silently (fractions of a second in a DATE, digits behind a NUMBER's scale, the
empty string, which it takes for null), the values are checked before they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from epochal.kit.sql.types import (
    TAKERS,
    Convert,
    Sent,
    Values,
    cast_to,
    in_utc,
    microseconds,
    sent_to,
)


def sent_as(kind: pa.DataType) -> Sent | str:
    """How values of this type are bound, or why they can't be."""
    sent = sent_to("oracle", kind)
    return sent if isinstance(sent, str) else sent.then(_BOUND_AS.get(sent.family))


def _integers(values: Values) -> Values:
    return values if pa.types.is_decimal(values.type) else values.cast(pa.int64())


_BOUND_AS: Mapping[str, Convert] = {
    "bool": cast_to(pa.int8()),
    "integer": _integers,
    "float": cast_to(pa.float64()),
    "text": cast_to(pa.large_string()),
    "binary": cast_to(pa.large_binary()),
    "date": cast_to(pa.timestamp("s")),
    "timestamp": in_utc,
    "duration": microseconds,
}


def mismatch(sent: Sent, data_type: str, scale: int | None) -> str:
    """Why a column can't take it, or nothing."""
    if data_type not in TAKERS[sent.family].oracle:
        return f"{sent.ddl} can't become {data_type} without loss"
    if sent.family == "float" and scale == 0 and data_type == "NUMBER":
        return f"{sent.ddl} can't become a whole number without loss"
    if sent.family == "decimal" and scale is not None and scale < sent.scale:
        return f"{sent.ddl} has more digits behind the point than the column's {scale}"
    return ""
