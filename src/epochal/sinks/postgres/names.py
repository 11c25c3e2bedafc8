"""How a handle is written as the name of a staging table, and how tables are named by people.

An identifier of PostgreSQL ends at 63 bytes, shorter than the longest handle. Numbers are therefore
in base 36, and the two parts of fixed width, uid and sink, stand without a separator:

    ep abcdefghijkl 0a1b2c3 _ 1 _ 2s _ 0 _ 1f
       uid          sink      generation, epoch, partition, attempt

Every handle fits, parses back, and is listed by a prefix that holds uid and sink (I6).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from epochal.errors import Misconfigured
from epochal.terms import EpochNumber, Generation, Handle, Identity, SinkTag, Uid

IDENTIFIER_BYTES_MAX = 63
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SINK_WIDTH = 7
_STAGING = re.compile(
    r"ep(?P<uid>[a-z2-7]{12})(?P<sink>[0-9a-z]{7})"
    r"_(?P<generation>[0-9a-z]+)_(?P<epoch>[0-9a-z]+)_(?P<partition>[0-9a-z]+)_(?P<attempt>[0-9a-z]+)"
)
_PART = re.compile(r'"((?:[^"]|"")+)"|([^".]+)')


def staging_name(handle: Handle) -> str:
    numbers = (handle.generation, handle.epoch, handle.partition, handle.attempt)
    return "_".join([_stem(handle.uid, handle.sink), *map(_base36, numbers)])


def staging_prefix(identity: Identity) -> str:
    """How every staging table of one sink of one pipeline begins."""
    return f"{_stem(identity.uid, identity.tag)}_"


def parse_staging_name(name: str) -> Handle | None:
    """The handle written in a table's name, or None where the name is not one of ours."""
    found = _STAGING.fullmatch(name)
    if found is None:
        return None
    handle = Handle(
        uid=Uid(found["uid"]),
        generation=Generation(int(found["generation"], 36)),
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
    """A table as its owner spells it: nothing is folded to lower case."""

    schema: str | None
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}" if self.schema else self.table


def parse_table(text: str) -> TableName:
    """`orders`, `public.orders` or `"my schema"."or.ders"`, each part exactly as it is written."""
    parts, rest = [], text
    while found := _PART.match(rest):
        parts.append(found[1].replace('""', '"') if found[1] else found[2])
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
        require_identifier(part, "table")
    return TableName(parts[0] if len(parts) == 2 else None, parts[-1])


def require_identifier(name: str, what: str) -> str:
    if not name or len(name.encode()) > IDENTIFIER_BYTES_MAX or "\0" in name:
        raise Misconfigured(
            f"{what} {name!r} can't be a name in PostgreSQL: it has {len(name.encode())} bytes, "
            f"and 1 to {IDENTIFIER_BYTES_MAX} are allowed",
            "rename it, for columns in select=",
        )
    return name
