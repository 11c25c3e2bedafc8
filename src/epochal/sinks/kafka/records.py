"""From rows to records: which column becomes a record's key, value, headers, time, partition.

On Spark the sink's expressions are evaluated in the JVM, and the columns named here cross to the
tasks. Without Spark the same columns are made from plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from epochal.errors import RowRejected
from epochal.kafka.batches import Columns
from epochal.kit.sink_base import Shape, ShapedColumn
from epochal.sinks.kafka.values import as_text, column_of
from epochal.terms import Json

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka

_PREFIX = "__epochal_"
KEY, VALUE, HEADERS = f"{_PREFIX}key", f"{_PREFIX}value", f"{_PREFIX}headers"
TOPIC, PARTITION, TIMESTAMP = f"{_PREFIX}topic", f"{_PREFIX}partition", f"{_PREFIX}timestamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Rows as records, with topic and partition of each; None leaves those to the sink."""

    columns: Columns
    topic: pa.Array | None = None
    partition: pa.Array | None = None

    def take(self, indexes: pa.Array) -> Records:
        """Some of these rows, which all go to one topic."""
        partition = None if self.partition is None else self.partition.take(indexes)
        return Records(columns=take_rows(self.columns, indexes), partition=partition)


def take_rows(rows: Columns, indexes: pa.Array) -> Columns:
    def part(column: pa.Array | None) -> pa.Array | None:
        return None if column is None else column.take(indexes)

    return Columns(
        value=rows.value.take(indexes),
        key=part(rows.key),
        timestamp_ms=part(rows.timestamp_ms),
        headers=part(rows.headers),
    )


def shape_of(sink: Kafka) -> Shape:
    """What Spark evaluates before rows cross to the tasks."""
    value = ShapedColumn(name=VALUE, sql=sink.encoding.sql(), option=f"value={sink.encoding}")
    others = [
        ShapedColumn(name=name, sql=sql, option=f"{option}={sql!r}")
        for name, (option, sql) in expressions(sink).items()
    ]
    order = (sink.order_by,) if isinstance(sink.order_by, str) else tuple(sink.order_by)
    return Shape(select=(value, *others), cluster_by=sink.key if order else None, order_by=order)


def expressions(sink: Kafka) -> dict[str, tuple[str, str]]:
    """The columns that a sink's optional expressions become, each with option and expression."""
    given = {
        KEY: ("key", sink.key),
        HEADERS: ("headers", sink.headers),
        TOPIC: ("topic_from", sink.topic_from),
        PARTITION: ("partition", sink.partition),
        TIMESTAMP: ("timestamp", sink.timestamp),
    }
    return {name: (option, sql) for name, (option, sql) in given.items() if sql is not None}


def value_type(sink: Kafka, schema: pa.Schema) -> pa.DataType:
    """The type of the column that values are encoded from."""
    if VALUE in schema.names:
        return schema.field(VALUE).type
    # Not RecordBatch.from_pylist, which imports pandas.
    nothing = [pa.nulls(0, field.type) for field in schema]
    return sink.encoding.gather(pa.RecordBatch.from_arrays(nothing, schema=schema)).type


def records_of(sink: Kafka, rows: pa.RecordBatch, encoder: Json = None) -> Records:
    """`encoder` is what the value's `ready` returned on the driver."""
    if VALUE in rows.schema.names:
        columns = {name: rows.column(name) for name in rows.schema.names}
    else:
        columns = {
            name: column_of(rows, option, sql) for name, (option, sql) in expressions(sink).items()
        }
        columns[VALUE] = sink.encoding.gather(rows)
    key, partition = columns.get(KEY), columns.get(PARTITION)
    return Records(
        columns=Columns(
            value=sink.encoding.encode(columns[VALUE], encoder),
            key=None if key is None else as_text(key),
            timestamp_ms=_times(columns.get(TIMESTAMP)),
            headers=columns.get(HEADERS),
        ),
        topic=columns.get(TOPIC),
        partition=None if partition is None else pc.cast(partition, pa.int64()),
    )


def _times(column: pa.Array | None) -> pa.Array | None:
    """Other clients send none before 1970, and brokers that rewrite batches fail on such."""
    earliest = None if column is None else pc.min(column.cast(pa.int64())).as_py()
    if earliest is not None and earliest < 0:
        raise RowRejected(
            "a row has a timestamp before 1970, which Kafka does not keep",
            "timestamp= must be a time since 1970, or null for the time of writing",
        )
    return column
