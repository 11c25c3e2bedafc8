"""Names: of staging tables, which hold a handle, and of tables, as users write them.

The shortest limit on identifiers is PostgreSQL's 63 bytes (an XID has 64), less than the longest
handle has. Numbers are therefore in base 36, and the three parts of fixed width, uid, sink and
claim, have no separator:

    ep abcdefghijkl 0a1b2c3 k7q2m4xz _ 1 _ 2s _ 0 _ 1f
       uid          sink    claim      generation, epoch, partition, attempt

All 63 bytes are used: 29 before the first separator, then up to 7, 9, 5 and 9 digits. The claim's
eight characters were taken from the numbers of epochs and attempts, which end at fourteen decimal
digits instead of the nineteen of a 64-bit counter: at a thousand epochs per second that is three
thousand years.

Every handle fits, parses back, and is listed by a prefix that holds uid and sink (I6).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from epochal.errors import Misconfigured
from epochal.terms import Claim, EpochNumber, Generation, Handle, Identity, SinkTag, Uid

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SINK_WIDTH = 7
_STAGING = re.compile(
    r"ep(?P<uid>[a-z2-7]{12})(?P<sink>[0-9a-z]{7})(?P<claim>[a-z2-7]{8})"
    r"_(?P<generation>[0-9a-z]+)_(?P<epoch>[0-9a-z]+)_(?P<partition>[0-9a-z]+)_(?P<attempt>[0-9a-z]+)"
)


def staging_name(handle: Handle) -> str:
    numbers = (handle.generation, handle.epoch, handle.partition, handle.attempt)
    return "_".join([f"{_stem(handle.uid, handle.sink)}{handle.claim}", *map(_base36, numbers)])


def staging_prefix(identity: Identity) -> str:
    """The beginning of the names of all staging tables of one sink of one pipeline."""
    return _stem(identity.uid, identity.tag)


def parse_staging_name(name: str) -> Handle | None:
    """The handle written in a table's name, or None where the name is not one of ours."""
    found = _STAGING.fullmatch(name)
    if found is None:
        return None
    handle = Handle(
        uid=Uid(found["uid"]),
        generation=Generation(int(found["generation"], 36)),
        claim=Claim(found["claim"]),
        epoch=EpochNumber(int(found["epoch"], 36)),
        sink=SinkTag(f"{int(found['sink'], 36):08x}"),
        partition=int(found["partition"], 36),
        attempt=int(found["attempt"], 36),
    )
    return handle if staging_name(handle) == name else None


def _stem(uid: Uid, sink: SinkTag) -> str:
    return f"ep{uid}{_base36(int(sink, 16)).rjust(_SINK_WIDTH, '0')}"


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"


@dataclass(frozen=True, slots=True)
class TableName:
    """A table as the user wrote it."""

    schema: str | None
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}" if self.schema else self.table

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.table,) if self.schema is None else (self.schema, self.table)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRule:
    """What one database allows as a name, and how it quotes one."""

    database: str
    length_max: int
    unit: str = "bytes"
    quotes: str = '"'
    folds: bool = False
    """Whether a name without quotes means the same in capitals."""

    def require(self, name: str, what: str) -> str:
        length = len(name.encode()) if self.unit == "bytes" else len(name)
        if not name or length > self.length_max or "\0" in name:
            raise Misconfigured(
                f"{what} {name!r} can't be a name in {self.database}: it has {length} {self.unit}, "
                f"and 1 to {self.length_max} are allowed",
                "rename it, for columns in select=",
            )
        return name

    def quote(self, *parts: str) -> str:
        mark = self.quotes
        return ".".join(f"{mark}{part.replace(mark, mark * 2)}{mark}" for part in parts)

    def parse_table(self, text: str) -> TableName:
        """`orders`, `shop.orders`, or with quotes around parts that hold a dot."""
        mark = self.quotes
        part_of_name = re.compile(rf"{mark}((?:[^{mark}]|{mark}{mark})+){mark}|([^{mark}.]+)")
        parts, rest = [], text
        while found := part_of_name.match(rest):
            if found[1]:
                parts.append(found[1].replace(mark * 2, mark))
            else:
                parts.append(found[2].upper() if self.folds else found[2])
            rest = rest[found.end() :]
            if not rest.startswith("."):
                break
            rest = rest[1:]
        if rest or text.endswith(".") or not 1 <= len(parts) <= 2:
            raise Misconfigured(
                f"table={text!r} is not the name of a table",
                "table, schema.table, or with quotes around a part that holds a dot",
            )
        for part in parts:
            self.require(part, "table")
        return TableName(parts[0] if len(parts) == 2 else None, parts[-1])
