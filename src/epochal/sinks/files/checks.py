"""What must be true of the columns before the first row is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.sinks.files.formats import check_types
from epochal.sinks.files.partitions import check_columns


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
    check_types(pa.schema([column for column in schema if column.name not in partition_by]), form)
