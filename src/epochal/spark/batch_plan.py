"""
The rows of a micro-batch by the plan of its query, instead of by an RDD.

Spark hands a batch over as an RDD of finished rows. What is put on top of it is compiled for
itself, takes each row apart, and makes another one. Here the last stage of the query's plan is
opened, so that one compiled loop goes from the source's columns to the rows that are written:

    handed over    write ── hash ── RDD ── (columns to rows ── read)
    opened         write ── (hash ── columns to rows) ── read

Only projections and filters are planned again. Below them are the query's own operators, as they
are: from these Spark reads how many rows a query has taken in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from epochal.contract import Sink
from epochal.kit.sink_base import Shaped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_COMPILED_STAGE = "WholeStageCodegen"
_BELOW_STAGE = "InputAdapter"
_OPENED = frozenset({"ColumnarToRow", "Filter", "Project"})
NOT_ADAPTIVE = {"spark.sql.adaptive.enabled": "false"}
"""
Of the session, while jobs read a batch whose plan is opened: adaptive planning, which begins where
a job moves rows, would wait for what is below to be computed by a job of its own.
"""


def opens_plans(sink: Sink) -> bool:
    """Whether what a sink does to rows moves none, so that its jobs need no adaptive planning."""
    return not (
        callable(sink.select)
        or getattr(sink, "moves_rows", False)
        or (isinstance(sink, Shaped) and sink.shape.cluster_by is not None)
    )


def opened(batch: DataFrame, query: StreamingQuery, epoch: int) -> DataFrame:
    """The same rows; the batch itself where its plan does not end in such a stage."""
    from epochal.spark.jvm_expressions import UNAVAILABLE  # noqa: PLC0415  needs pyspark

    try:
        return _opened(batch, query, epoch)
    except UNAVAILABLE:  # another release
        return batch


def _opened(batch: DataFrame, query: StreamingQuery, epoch: int) -> DataFrame:
    spark: Any = batch.sparkSession
    execution = query._jsq.streamingQuery().lastExecution()
    if execution.currentBatchId() != epoch:
        return batch
    stage = execution.executedPlan()
    if not stage.nodeName().startswith(_COMPILED_STAGE) or stage.subqueriesAll().nonEmpty():
        return batch
    above, node = [], stage.child()
    while node.nodeName() in _OPENED:
        above.append(node)
        node = node.child()
    if node.nodeName() != _BELOW_STAGE:
        return batch
    parts = _parts(spark._jvm)
    # A leaf, so that a copy of the plan, which runs, has the same operators below it.
    plan = parts.make_leaf(0, node.child(), None)
    for one in reversed(above):
        plan = one.withNewChildren(parts.to_seq([plan]))
    # The columns of the batch by the numbers that they have in the plan.
    relation = batch._jdf.queryExecution().analyzed()
    numbers = parts.numbers.apply(relation.output().zip(plan.output()))
    rows = parts.of_rows(
        spark._jsparkSession, parts.make_planned(relation.rewriteAttrs(numbers), plan)
    )
    made: Any = type(batch)
    return made(rows, spark)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What such a frame is made of, in one JVM."""

    make_leaf: Any
    make_planned: Any
    """A leaf of a logical plan that has its physical plan already."""
    numbers: Any
    of_rows: Any
    to_seq: Any


@lru_cache(maxsize=1)
def _parts(jvm: Any) -> _Parts:
    """Kept: a class of the JVM is found by one call for each part of its name."""
    sql = jvm.org.apache.spark.sql
    adaptive = sql.execution.adaptive
    return _Parts(
        make_leaf=adaptive.ResultQueryStageExec,
        make_planned=adaptive.LogicalQueryStage,
        numbers=getattr(getattr(sql.catalyst.expressions, "AttributeMap$"), "MODULE$"),
        of_rows=sql.classic.Dataset.ofRows,
        to_seq=jvm.PythonUtils.toSeq,
    )
