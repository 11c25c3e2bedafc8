"""
Which query plans keep nothing from one epoch to the next.

A replayed epoch of such a plan may be skipped. All others must be evaluated, as their state stores
and watermarks advance only when the batch is. So this is a list of what is known to be stateless,
never of what has state: a node of a later Spark that is not on it costs time, not rows.
"""

from __future__ import annotations

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


def _children(plan: Any) -> list[Any]:
    children = plan.children()
    return [children.apply(at) for at in range(children.size())]
