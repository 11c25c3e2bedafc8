"""`check`: what a receiver can promise, and which columns can be sent as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit import json_lines
from epochal.kit.sink_base import cast_hint
from epochal.sinks.http.writer import NDJSON
from epochal.terms import Ability


def check(
    about: Mapping[str, Any],
    schema: pa.Schema | None,
    *,
    url: str,
    content_type: str,
    part_bytes: int,
) -> Sequence[Ability]:
    """`about` is the receiver's description of itself: its answer to `GET /`."""
    if content_type not in about.get("formats", ()):
        raise Misconfigured(
            f"{url} takes {about.get('formats')}, not {content_type}", "another format="
        )
    most = about.get("body_bytes_max")
    if isinstance(most, int) and part_bytes > most:
        raise Misconfigured(
            f"part_bytes={part_bytes}, and {url} takes {most} per request",
            f"part_bytes={most // 2}: text is longer than the values in memory",
        )
    if schema is not None and content_type == NDJSON:
        require_json(schema)
    return [_rehearses(about), _whole_epochs()]


def require_json(schema: pa.Schema) -> None:
    for column in schema:
        why = json_lines.refusal(column.type)
        if why is not None:
            raise Misconfigured(
                f"column {column.name!r}: {why}",
                f"cast it: {cast_hint(column.name, 'string')}",
            )


def _rehearses(about: Mapping[str, Any]) -> Ability:
    can = bool(about.get("rehearses"))
    because = "POST /rehearse applies an epoch and takes it back"
    return Ability(
        name="refuses before the decision",
        granted=can,
        because=because if can else "the receiver has no rehearsal: rows it refuses stop the query",
    )


def _whole_epochs() -> Ability:
    return Ability(
        name="whole epochs for plain readers",
        granted=False,
        because="transactions of an epoch become visible one by one; its mark shows it is whole",
    )
