"""The merge mode: one MERGE of delta-rs by keys, from the epoch's staged rows.

Of several rows of one key the highest by `order_by` counts; where that leaves two, the epoch is
refused before the decision. A merge that changes nothing makes no version by itself, so its ledger
entry is then written alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltalake import CommitProperties, DeltaTable

from epochal.errors import RowRejected
from epochal.sinks.delta.prepared_rows import ROWS, PreparedRows, prepared_rows, quoted
from epochal.sinks.delta.table_files import TableFiles
from epochal.sinks.delta.types import columns_of
from epochal.terms import quantity

if TYPE_CHECKING:
    from epochal.sinks.delta.sink import Delta

IS_DELETE = "_epochal_is_delete"
_RANK = "_epochal_rank"
_SHOWN = 3


def winners(sink: Delta) -> str:
    """The rows that count, each with whether it deletes its key."""
    keys = ", ".join(quoted(key) for key in sink.keys)
    order = ", ".join(f"{quoted(name)} DESC NULLS LAST" for name in sink.order_by)
    ranked = f"rank() OVER (PARTITION BY {keys}{f' ORDER BY {order}' if order else ''})"
    condition = f"coalesce(({sink.delete_when}), false)" if sink.delete_when else "false"
    return (
        f"SELECT * FROM (SELECT *, {condition} AS {IS_DELETE}, {ranked} AS {_RANK}"  # noqa: S608
        f" FROM {ROWS}) WHERE {_RANK} = 1"
    )


def require_one_winner(sink: Delta, rows: PreparedRows, epoch: int) -> None:
    """Refuse keys that are null, and keys of which two rows claim to be the last."""
    keys = ", ".join(quoted(key) for key in sink.keys)
    nulls = " OR ".join(f"{quoted(key)} IS NULL" for key in sink.keys)
    (found,) = rows.rows(f"SELECT count(*) AS n FROM {ROWS} WHERE {nulls}")  # noqa: S608  names are quoted
    if found["n"]:
        raise RowRejected(
            f"epoch {epoch}: {quantity(found['n'], 'row')} with a null among the keys "
            f"{', '.join(sink.keys)}, and no row can be found by it",
            f'where="{sink.keys[0]} IS NOT NULL"',
        )
    twice = rows.rows(
        f"SELECT {keys}, count(*) AS n FROM ({winners(sink)}) GROUP BY {keys}"  # noqa: S608
        f" HAVING count(*) > 1 ORDER BY {keys} LIMIT {_SHOWN}"
    )
    if twice:
        shown = "; ".join(
            ", ".join(f"{key}={one[key]!r}" for key in sink.keys) + f" ({one['n']} rows)"
            for one in twice
        )
        raise RowRejected(
            f"epoch {epoch}: several rows of one key, and nothing decides which is the last: "
            f"{shown}",
            "order_by= a column that rises with every change"
            if not sink.order_by
            else "add a column to order_by that differs between them",
        )


def merge(
    sink: Delta,
    table: DeltaTable,
    table_files: TableFiles,
    files: Sequence[Mapping[str, Any]],
    properties: CommitProperties,
) -> None:
    """One MERGE on this handle, with the ledger in its commit."""
    columns = columns_of(table.schema())
    with prepared_rows(table_files, files, {}) as rows:
        source = rows.reader(winners(sink))
        written = [name for name in source.schema.names if name in columns]
        values = {_column(name): f"source.{_column(name)}" for name in written}
        changed = {key: value for key, value in values.items() if key not in _columns(sink.keys)}
        matched = " AND ".join(f"target.{key} = source.{key}" for key in _columns(sink.keys))
        merger = table.merge(
            source,
            matched,
            source_alias="source",
            target_alias="target",
            commit_properties=properties,
        ).when_matched_delete(f"source.{IS_DELETE}")
        if changed:
            merger = merger.when_matched_update(changed)
        merger.when_not_matched_insert(values, f"NOT source.{IS_DELETE}").execute()


def _columns(names: Sequence[str]) -> list[str]:
    return [_column(name) for name in names]


def _column(name: str) -> str:
    escaped = name.replace("`", "``")
    return f"`{escaped}`"
