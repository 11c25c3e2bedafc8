"""
What a query plan is known to do without: state, and shuffles.

A replayed epoch of a plan that keeps nothing from one epoch to the next may be skipped. All others
must be evaluated, as their state stores and watermarks advance only when the batch is. And only
where a stage reads no shuffle is a task's attempt number its own: a stage whose input was lost runs
again, and counts from zero. So these are lists of what is known to be harmless, never of what is
not: a node of a later Spark that is not on them costs time, not rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATELESS = frozenset(
    {
        "DeserializeToObject",
        "Filter",
        "Generate",
        "MapElements",
        "MapInArrow",
        "MapInPandas",
        "MapPartitions",
        "Project",
        "PythonMapInArrow",
        "Repartition",
        "RepartitionByExpression",
        "ResolvedHint",
        "SerializeFromObject",
        "StreamingRelation",
        "StreamingRelationV2",
        "SubqueryAlias",
        "TypedFilter",
        "Union",
        "View",
    }
)

_NARROW = _STATELESS - {"Repartition", "RepartitionByExpression"} | {
    "DataSourceV2Relation",
    "LocalRelation",
    "LogicalRelation",
    "Range",
}
_BATCH = "LogicalRDD"
"""How Spark shows a micro-batch, and a checkpointed frame: what is below it can't be seen."""


def is_narrow(frame: DataFrame) -> bool:
    """Whether a query provably moves no row from one partition to another."""
    return _moves_nothing(frame._jdf.queryExecution().analyzed(), _NARROW)


def is_narrow_above_batch(frame: DataFrame) -> bool:
    """The same of what was asked of a micro-batch."""
    return _moves_nothing(frame._jdf.queryExecution().analyzed(), _NARROW | {_BATCH})


def is_row_by_row_above_batch(frame: DataFrame) -> bool:
    """Whether what was asked of a micro-batch provably takes each of its rows by itself."""
    return _moves_nothing(frame._jdf.queryExecution().analyzed(), _STATELESS | {_BATCH})


def _moves_nothing(plan: Any, narrow: Collection[str]) -> bool:
    return plan.nodeName() in narrow and all(
        _moves_nothing(child, narrow) for child in _children(plan)
    )


def is_stateless(frame: DataFrame) -> bool:
    """Whether a streaming query provably keeps neither state nor a watermark."""
    return _keeps_nothing(frame._jdf.queryExecution().analyzed())


def _keeps_nothing(plan: Any) -> bool:
    if not plan.isStreaming():
        return True
    children = _children(plan)
    is_known = plan.nodeName() in _STATELESS or (
        # With one streaming side each row is looked up on its own; with two, both sides are kept.
        plan.nodeName() == "Join" and sum(child.isStreaming() for child in children) == 1
    )
    return is_known and all(_keeps_nothing(child) for child in children)


def leaves(frame: DataFrame) -> list[Any]:
    """What a query reads, as nodes of its plan."""
    found = frame._jdf.queryExecution().analyzed().collectLeaves()
    return [found.apply(at) for at in range(found.size())]


def _children(plan: Any) -> list[Any]:
    children = plan.children()
    return [children.apply(at) for at in range(children.size())]
