"""
Rows as bytes: what a sink may ask of the engine, so that its tasks have only to pass them on.

To hand the columns of a row from the engine over to a task costs more than to encode them. A sink
whose target reads rows in a form of its own says how one is laid out; an engine that can do so lays
every row out, and its tasks get one column of bytes in place of all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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
    """What goes before a value."""
    null: bytes
    """What stands for none."""


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
Packing: TypeAlias = tuple[Piece, ...]
"""What a row is made of, in order."""
