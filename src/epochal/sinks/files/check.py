"""The checks of a Files sink before the first row: of the columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit.hive_partitions import check_columns
from epochal.sinks.files.formats import FORMATS


def check_schema(schema: pa.Schema, form: str, partition_by: Sequence[str]) -> None:
    """Refuse columns that can't be written, with the column's name."""
    if not schema.names:
        raise Misconfigured("the rows have no columns", "select at least one")
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise Misconfigured(
            f"columns {twice} appear more than once", 'rename one: select=["a", "b as other"]'
        )
    check_columns(schema, partition_by)
    _check_types(pa.schema([column for column in schema if column.name not in partition_by]), form)


def _check_types(schema: pa.Schema, name: str) -> None:
    """Refuse columns that the format can't hold."""
    for field in schema:
        why = FORMATS[name].refusal(field.type)
        if why is not None:
            raise Misconfigured(
                f"column {field.name!r} can't be written as {name}: {why}",
                'leave it out or cast it: select=["…"]; or take another format: '
                + ", ".join(FORMATS),
            )
