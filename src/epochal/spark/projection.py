"""The rows and columns of a batch that a sink takes (`where`, `select`)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from epochal.contract import Rows, Sink
from epochal.errors import Misconfigured
from epochal.kit.sink_base import Shape, Shaped
from epochal.spark.error_text import analysis_message, not_logged

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType


def project(sink: Sink, batch: Rows) -> DataFrame:
    """The sink's own rows: `where` first, then `select`, then its `shape`."""
    part = _selected(sink, batch)
    return _shaped(sink, part, sink.shape) if isinstance(sink, Shaped) else part


def project_unordered(sink: Sink, batch: Rows) -> DataFrame:
    """The same rows, in any order and partition: for sums."""
    part = _selected(sink, batch)
    if not isinstance(sink, Shaped):
        return part
    return _shaped(sink, part, replace(sink.shape, cluster_by=None, order_by=()))


def _selected(sink: Sink, batch: Rows) -> DataFrame:
    part: DataFrame = batch
    if sink.where is not None:
        part = _analysed(sink, f"where={sink.where!r}", part, partial(part.where, sink.where))
    if callable(sink.select):
        part = _analysed(sink, "the function of select=", part, partial(sink.select, part))
    elif sink.select is not None:
        wanted = (sink.select,) if isinstance(sink.select, str) else tuple(sink.select)
        analyse = partial(part.selectExpr, *wanted)
        part = _analysed(sink, f"select={sink.select!r}", part, analyse)
    return part


def _shaped(sink: Sink, part: DataFrame, shape: Shape) -> DataFrame:
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    try:
        with not_logged():
            placed = part
            if shape.cluster_by is not None:
                placed = placed.repartition(functions.expr(shape.cluster_by))
            if shape.order_by:
                placed = placed.sortWithinPartitions(*map(_ordering, shape.order_by))
            return placed.selectExpr(*(f"{one.sql} AS {one.name}" for one in shape.select))
    except PySparkException:
        # Each alone, to name the one that is refused.
        for one in shape.select:
            _analysed(sink, one.option, part, partial(part.selectExpr, one.sql))
        for text in shape.order_by:
            _analysed(sink, f"order_by={text!r}", part, lambda: part.sort(_ordering(text)))  # noqa: B023  called at once
        raise


def _analysed(
    sink: Sink, option: str, part: DataFrame, analyse: Callable[[], DataFrame]
) -> DataFrame:
    """What Spark makes of an option; or its refusal as ours, with the columns there are."""
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

    try:
        with not_logged():
            return analyse()
    except PySparkException as error:
        raise Misconfigured(
            f"sink {sink.name!r}: {option}: {analysis_message(error)}",
            f"the columns here are {', '.join(part.columns)}",
        ) from None


def _ordering(text: str) -> Column:
    """`a`, `a ASC` or `a DESC`: Spark's `expr` reads no direction."""
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    expression, _, direction = text.strip().rpartition(" ")
    if expression and direction.upper() in ("ASC", "DESC"):
        column = functions.expr(expression)
        return column.desc() if direction.upper() == "DESC" else column.asc()
    return functions.expr(text)


def empty_like(frame: DataFrame) -> DataFrame:
    """A batch without rows that has the stream's columns, to try a selection on."""
    return frame.sparkSession.createDataFrame([], frame.schema)


def arrow_schema(sink: Sink, schema: StructType) -> pa.Schema:
    """The Arrow schema in which a sink's rows arrive in its tasks."""
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

    names = [field.name for field in schema.fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Misconfigured(
            f"sink {sink.name!r} would get two columns named {', '.join(twice)}",
            "name its columns apart: select=[…] on the sink, or .alias(…) in the query",
        )
    if not names:
        raise Misconfigured(
            f"sink {sink.name!r} would get rows without columns", "select at least one"
        )
    try:
        return _to_arrow(schema)
    except (TypeError, PySparkException) as error:
        raise Misconfigured(
            f"sink {sink.name!r}: a column has a type that Arrow can't carry: {error}",
            "leave it out or cast it: select=[…] on the sink",
        ) from None


def _to_arrow(schema: StructType) -> pa.Schema:
    """Spark's own translation, with timestamps in UTC. The parameter differs by release."""
    from pyspark.sql.pandas import types  # noqa: PLC0415  this package is importable without it

    if "timezone" in inspect.signature(types.to_arrow_schema).parameters:
        return types.to_arrow_schema(schema, timezone="UTC")
    return types.to_arrow_schema(schema)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def for_tasks(sink: Sink) -> Sink:
    """
    The sink as tasks need it: without a selection that is a function.

    Such a function is called on the driver only, and what it closes over often can't be pickled.
    """
    if not callable(sink.select):
        return sink
    light = copy.copy(sink)
    try:
        object.__setattr__(light, "select", None)
    except AttributeError:
        return sink
    return light
