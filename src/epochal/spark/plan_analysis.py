"""
Analysis of query plans: does a query keep state, and does it move rows between partitions?

A replayed epoch of a plan that keeps nothing from one epoch to the next may be skipped. All others
must be evaluated, as their state stores and watermarks advance only when the batch is. And a task's
attempt number is its own only where no stage reads a shuffle: a stage whose input was lost runs
again, and counts from zero.

Both are answered by lists of plan nodes that are known to be harmless, never of those that are not:
a node of a later Spark that is not on a list costs time, not rows.

Spark Connect shows a plan only as text, a node per line. A line that a text within the query brings
counts as a node, which is on no list. So text can hide nothing: it makes a query count as one with
state.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochal.spark.versions import is_connect

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
BATCH = frozenset({"LogicalRDD", "LogicalQueryStage"})
"""A micro-batch or a checkpointed frame in a plan: Spark hides what is below it."""
_SHOWN = re.compile(
    r"\n== Analyzed Logical Plan ==\n[^\n]*\n(?P<nodes>.*?)\n\n== Optimized Logical Plan ==\n"
    r".*\n== Physical Plan ==\n",
    re.DOTALL,
)
_HEADING = "\n== Optimized Logical Plan ==\n"
_NODE = re.compile(r"[ :+-]*~?(?P<name>\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What is proven of a query's plan; False where it is not."""

    is_stateless: bool
    """It keeps neither state nor a watermark."""
    is_narrow: bool
    """Computing a batch moves no row from one partition to another."""


UNKNOWN_PLAN = PlanFacts(is_stateless=False, is_narrow=False)


def facts_of(frame: DataFrame) -> PlanFacts:
    if is_connect(frame.sparkSession):
        return facts_in(_explained(frame))
    return PlanFacts(is_stateless=is_stateless(frame), is_narrow=is_narrow(frame))


def is_narrow(frame: DataFrame) -> bool:
    """Whether a query provably moves no row from one partition to another."""
    return _moves_nothing(frame._jdf.queryExecution().analyzed(), _NARROW)


def is_narrow_above_batch(frame: DataFrame) -> bool:
    """The same of operations on a micro-batch."""
    if is_connect(frame.sparkSession):
        nodes = _nodes_in(_explained(frame))
        return bool(nodes) and nodes <= _NARROW | BATCH
    return _moves_nothing(frame._jdf.queryExecution().analyzed(), _NARROW | BATCH)


def is_row_by_row_above_batch(frame: DataFrame) -> bool:
    """Whether operations on a micro-batch provably handle each of its rows by itself."""
    return _moves_nothing(frame._jdf.queryExecution().analyzed(), _STATELESS | BATCH)


def facts_in(explained: str) -> PlanFacts:
    """The same of a plan as `DataFrame.explain(extended=True)` prints it; no join counts."""
    nodes = _nodes_in(explained)
    return PlanFacts(
        is_stateless=bool(nodes) and nodes <= _STATELESS,
        is_narrow=bool(nodes) and nodes <= _NARROW,
    )


def _explained(frame: Any) -> str:
    return str(frame._explain_string(extended=True))


def _nodes_in(explained: str) -> frozenset[str]:
    """The names of a plan's nodes; none where the text is not whole, or can't be read."""
    found = _SHOWN.search(f"\n{explained}")
    if found is None or explained.count(_HEADING) != 1:
        return frozenset()
    names = [_NODE.match(line) for line in found["nodes"].split("\n")]
    return frozenset("" if name is None else name["name"] for name in names)


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
        # With one streaming side each row is looked up on its own; with two, Spark keeps both.
        plan.nodeName() == "Join" and sum(child.isStreaming() for child in children) == 1
    )
    return is_known and all(_keeps_nothing(child) for child in children)


def leaves(frame: DataFrame) -> list[Any]:
    """The nodes of a plan that read: sources and tables."""
    found = frame._jdf.queryExecution().analyzed().collectLeaves()
    return [found.apply(at) for at in range(found.size())]


def _children(plan: Any) -> list[Any]:
    children = plan.children()
    return [children.apply(at) for at in range(children.size())]
