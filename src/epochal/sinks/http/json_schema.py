"""Which columns can travel as JSON: said at the start, not at the first row."""

from __future__ import annotations

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit import json_lines


def require_json(schema: pa.Schema) -> None:
    for column in schema:
        why = json_lines.refusal(column.type)
        if why is not None:
            raise Misconfigured(
                f"column {column.name!r}: {why}",
                f'cast it: select=["*", "cast({column.name} as string) {column.name}"]',
            )
