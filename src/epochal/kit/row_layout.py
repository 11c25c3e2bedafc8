"""
`RowLayout`: how one row is laid out as bytes, for sinks that have the engine do it.

Handing the columns of a row from the engine to a task costs more than encoding them. A sink whose
target reads rows in a format of its own describes the layout of a row in pieces; an engine that can
do so lays every row out, and its tasks get one column of bytes in place of all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from epochal.terms import Json

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same bytes in every row."""

    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """
    An integer, big-endian. A date is its days, a timestamp its microseconds since 1970, and a
    floating-point number its bits.
    """

    field: str
    width: int
    """How many bytes it takes; no fewer than the field's own."""
    plus: int = 0
    before: bytes
    """Bytes before a value."""
    null: bytes
    """Bytes for NULL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A boolean."""

    field: str
    true: bytes
    false: bytes
    null: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A string as UTF-8, or bytes: first how many there are, in four bytes, big-endian."""

    field: str
    null: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """
    A decimal of up to 18 digits, without sign and point: its digits to base 10,000, each in two
    bytes, big-endian.
    """

    field: str
    groups: int
    """How many such digits, zeros before the first included."""
    zeros: int
    """How many decimal zeros are written behind the last, so that the point is between groups."""
    before: bytes
    before_negative: bytes
    null: bytes


Piece: TypeAlias = Fixed | Number | Flag | Sized | Digits
RowLayout: TypeAlias = tuple[Piece, ...]
"""The pieces of a row, in order."""


@runtime_checkable
class LaysOutRows(Protocol):
    """A sink whose tasks can take rows as bytes, which the engine lays out where it can."""

    def row_layout(self, schema: pa.Schema, handout: Json) -> RowLayout | None:
        """
        The layout of a row, None where these rows must come as columns. Called on the driver for
        every epoch; `Task.is_packed` says whether the engine could do it.
        """
