"""From rows to records: which column becomes a record's key, value, headers, time, partition.

On Spark the sink's expressions are evaluated in the JVM, and what crosses to a task are the columns
named here. Without Spark the same is made from plain columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Shape
from epochal.errors import Misconfigured
from epochal.kafka.batches import Columns
from epochal.kafka.record_headers import HEADERS
from epochal.sinks.kafka.values import as_text, column_of, require_text
from epochal.terms import Json

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka

_PREFIX = "__epochal_"
KEY, VALUE, HEADER = f"{_PREFIX}key", f"{_PREFIX}value", f"{_PREFIX}headers"
TOPIC, PARTITION, TIMESTAMP = f"{_PREFIX}topic", f"{_PREFIX}partition", f"{_PREFIX}timestamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Rows as records, and where each wants to go; None leaves that to the sink."""

    columns: Columns
    topic: pa.Array | None = None
    partition: pa.Array | None = None


def shape_of(sink: Kafka) -> Shape:
    """What Spark evaluates before rows cross to the tasks."""
    wanted = [f"{sink.made_of.sql()} AS {VALUE}"]
    for expression, name in _optional(sink):
        wanted.append(f"{expression} AS {name}")
    order = (sink.order_by,) if isinstance(sink.order_by, str) else tuple(sink.order_by)
    return Shape(select=tuple(wanted), cluster_by=sink.key if order else None, order_by=order)


def _optional(sink: Kafka) -> list[tuple[str, str]]:
    given = (
        (sink.key, KEY),
        (sink.headers, HEADER),
        (sink.topic_from, TOPIC),
        (sink.partition, PARTITION),
        (sink.timestamp, TIMESTAMP),
    )
    return [(expression, name) for expression, name in given if expression is not None]


def value_type(sink: Kafka, schema: pa.Schema) -> pa.DataType:
    """The type of the column that values are encoded from."""
    if VALUE in schema.names:
        return schema.field(VALUE).type
    return sink.made_of.gather(pa.RecordBatch.from_pylist([], schema)).type


def records_of(sink: Kafka, rows: pa.RecordBatch, handed: Json = None) -> Records:
    if VALUE in rows.schema.names:
        crossing = {name: rows.column(name) for name in rows.schema.names}
    else:
        crossing = {name: column_of(rows, expression) for expression, name in _optional(sink)}
        crossing[VALUE] = sink.made_of.gather(rows)
    key, partition = crossing.get(KEY), crossing.get(PARTITION)
    return Records(
        columns=Columns(
            value=sink.made_of.encode(crossing[VALUE], handed),
            key=None if key is None else as_text(key),
            timestamp_ms=crossing.get(TIMESTAMP),
            headers=crossing.get(HEADER),
        ),
        topic=crossing.get(TOPIC),
        partition=None if partition is None else pc.cast(partition, pa.int32()),
    )


def check_schema(sink: Kafka, schema: pa.Schema) -> None:
    """Refuse columns whose types can't be what they are meant for."""
    is_shaped = VALUE in schema.names
    if sink.order_by and not is_shaped:
        raise Misconfigured(
            "Kafka: order_by= sorts on Spark; rows of a session keep the order they are written in",
            "leave order_by out, and write the rows in order",
        )
    if is_shaped:
        names = {name: name for name in schema.names}
    else:
        sink.made_of.check(schema)
        names = {name: expression for expression, name in _optional(sink)}
    if KEY in names:
        require_text(schema, names[KEY], "key")
    _require(schema, names.get(PARTITION), "partition", pa.types.is_integer, "an integer")
    _require(
        schema,
        names.get(TIMESTAMP),
        "timestamp",
        lambda kind: pa.types.is_timestamp(kind) or pa.types.is_integer(kind),
        "a timestamp, or milliseconds since 1970",
    )
    _require(schema, names.get(TOPIC), "topic_from", pa.types.is_string, "text")
    _require(
        schema, names.get(HEADER), "headers", _is_headers, "an array of struct<key, value> or a map"
    )


def _is_headers(kind: pa.DataType) -> bool:
    try:
        pa.array([], kind).cast(HEADERS)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError):
        return False
    return True


def _require(schema: pa.Schema, name: str | None, what: str, accepts, wanted: str) -> None:  # type: ignore[no-untyped-def]
    if name is None:
        return
    if name not in schema.names:
        raise Misconfigured(
            f"Kafka: {what}={name!r} is none of the columns {', '.join(schema.names)}",
            "name a column; SQL expressions are evaluated on Spark only",
        )
    kind = schema.field(name).type
    if not accepts(kind):
        raise Misconfigured(f"Kafka: {what} must be {wanted}, and {name!r} is {kind}")
