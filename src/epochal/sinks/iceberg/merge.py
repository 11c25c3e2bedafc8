"""The upsert mode: an epoch's rows replace those of the same key, in one snapshot.

Copy on write: a file that holds such a row is read, and what stays of it is written again. Files
are found by their bounds and partitions first and by their keys then, so that of a table that is
laid out by its key few are read. All this is done by the driver, and again after every conflict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    LessThanOrEqual,
    Reference,
)
from pyiceberg.expressions.literals import Literal, literal
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import UUIDType

from epochal.errors import RowRejected
from epochal.sinks.iceberg.partitions import SortKey, order_by
from epochal.sinks.iceberg.types import ColumnMatch, null_rows
from epochal.sinks.iceberg.writer import Attempt
from epochal.terms import EpochNumber, quantity

if TYPE_CHECKING:
    from epochal.sinks.iceberg.sink import Iceberg

_ROW = "epochal row"


@dataclass(slots=True)
class Merged:
    add: list[DataFile] = field(default_factory=list)
    remove: list[DataFile] = field(default_factory=list)
    has_own_files: bool = False


def require_mergeable(
    sink: Iceberg, table: Table, epoch: EpochNumber, files: Sequence[DataFile]
) -> None:
    """Refuse rows without a key, and rows of one key of which none is the last."""
    rows = _read(table, files, [*sink.keys, *sink.order_by])
    nulls = null_rows(rows, list(sink.keys))
    if nulls:
        raise RowRejected(
            f"epoch {epoch}: {quantity(nulls, 'row')} with a null in {', '.join(sink.keys)}",
            f'where="{sink.keys[0]} IS NOT NULL" leaves them out',
        )
    if sink.order_by or not _has_doubles(rows, sink.keys):
        return
    raise RowRejected(
        f"epoch {epoch} has several rows of one {', '.join(sink.keys)}, and nothing decides "
        "which one stays",
        'order_by="updated_at" keeps the highest',
    )


def merged(sink: Iceberg, table: Table, files: Sequence[DataFile], attempt: Attempt) -> Merged:
    """The files to add and to remove, so that every key of these files is in the table once."""
    result = Merged(add=list(files))
    keys = _read(table, files, [*sink.keys])
    if _has_doubles(keys, sink.keys):
        attempt.write(_fitted(table, _last_of_each(_read(table, files, None), sink)))
        result.add = []
    for task in _candidates(sink, table, keys):
        stays = _staying(table, task, keys, sink.keys)
        if stays is None:
            continue
        result.remove.append(task.file)
        attempt.write(_fitted(table, stays))
    written = attempt.finish()
    result.add += written
    result.has_own_files = bool(written)
    return result


def _candidates(sink: Iceberg, table: Table, keys: pa.Table) -> Iterator[FileScanTask]:
    if table.metadata.snapshot_by_name(sink.branch) is None:
        return
    bounds: BooleanExpression = AlwaysTrue()
    for name in sink.keys:
        if isinstance(table.schema().find_type(name), UUIDType):
            continue  # writers of Iceberg differ in how they order them
        ends = pc.min_max(keys.column(name)).as_py()
        try:
            least, most = literal(ends["min"]), literal(ends["max"])
        except TypeError:
            # A type without literals is not searched by its bounds: its files are all looked at.
            continue
        term = Reference(name)
        bounds = And(bounds, _between(term, least, most))
    scan = table.scan(row_filter=bounds)
    yield from (scan if sink.branch == "main" else scan.use_ref(sink.branch)).plan_files()


def _between(term: Reference, least: Literal[Any], most: Literal[Any]) -> BooleanExpression:
    # By place: pydantic's fields hide from mypy what the constructors really take.
    return And(GreaterThanOrEqual(term, least), LessThanOrEqual(term, most))  # type: ignore[arg-type,call-arg]


def _staying(
    table: Table, task: FileScanTask, keys: pa.Table, names: Sequence[str]
) -> pa.Table | None:
    """The rows of a file that no key of the epoch replaces; None where it holds none of them."""
    there = _scanned(table, [task], list(names))
    numbered = there.append_column(_ROW, pa.array(range(there.num_rows), type=pa.int64()))
    alike = keys.cast(there.schema)
    hit = numbered.join(alike, keys=list(names), join_type="left semi").column(_ROW)
    if not len(hit):
        return None
    whole = _scanned(table, [task], None)
    leaves = pc.is_in(numbered.column(_ROW), value_set=hit.combine_chunks())
    return whole.filter(pc.invert(leaves))


def _last_of_each(rows: pa.Table, sink: Iceberg) -> pa.Table:
    """Of several rows of one key the highest by `order_by`; the later written, where equal."""
    plain = _comparable(rows)
    rising = order_by([SortKey(column=plain.column(name)) for name in sink.order_by])
    keys = plain.select(list(sink.keys)).take(rising)
    ranked = keys.append_column(_ROW, pa.array(range(rows.num_rows), type=pa.int64()))
    last = ranked.group_by(list(sink.keys)).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
    return rows.take(rising.take(last))


def _comparable(rows: pa.Table) -> pa.Table:
    """The same with UUIDs as their bytes: Arrow neither joins nor groups by UUIDs."""
    for place, column in enumerate(rows.schema):
        if column.type == pa.uuid():
            stored = rows.column(place).cast(column.type.storage_type)
            rows = rows.set_column(place, column.name, stored)
    return rows


def _has_doubles(rows: pa.Table, keys: Sequence[str]) -> bool:
    return bool(rows.group_by(list(keys)).aggregate([]).num_rows < rows.num_rows)


def _fitted(table: Table, rows: pa.Table) -> pa.Table:
    return ColumnMatch(rows.schema, table.schema()).cast(rows)


def _read(table: Table, files: Sequence[DataFile], columns: list[str] | None) -> pa.Table:
    return _scanned(table, [FileScanTask(file) for file in files], columns)


def _scanned(table: Table, tasks: Sequence[FileScanTask], columns: list[str] | None) -> pa.Table:
    """Rows of these files; of some columns only, in types by which rows can be compared."""
    schema = table.schema() if columns is None else table.schema().select(*columns)
    rows = ArrowScan(
        table_metadata=table.metadata,
        io=table.io,
        projected_schema=schema,
        row_filter=AlwaysTrue(),
    ).to_table(tasks=tasks)
    return rows if columns is None else _comparable(rows)
