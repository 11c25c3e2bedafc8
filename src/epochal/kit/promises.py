"""Promises: what a kind of sink promises its readers, and what it can't do, as data.

The tables of docs/concepts/promises.md are made from it, and the conformance suite leaves out what
is declared in `cannot`, for the reason that is given there. Each of our sinks has a `promises.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Cannot: TypeAlias = Literal[
    "refuse rows",
    "be unreachable",
    "be misconfigured",
    "bound memory",
    "reach other processes",
    "name lost rows",
]
"""
refuse rows             no row that fits the schema is refused by its content
be unreachable          there is nothing between the sink and its target that could fail
be misconfigured        there is nothing that `check` could find
bound memory            a writer's memory grows with its rows
reach other processes   only the process that declared the sink reaches the target
name lost rows          a lost attempt looks like one that was committed long ago
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """One row in each table: one sink, in one of its strategies."""

    sink: str
    """As the docs name it."""
    at_one_instant: str
    """How much becomes visible at once."""
    readers_must: str = "nothing"
    proof: str
    """What the ledger is."""
    append: str = "yes"
    by_key: str = ""
    deletes: str = ""
    output_modes: str = "append"
    limits: Sequence[str] = ()
    cannot: Mapping[Cannot, str] = field(default_factory=dict)
    """What the conformance suite does not ask for, each with the reason."""
