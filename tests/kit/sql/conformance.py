"""The conformance suite for tables of databases, with the options of one strategy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from epochal.testing.conformance import SinkConformance

REFUSED = (2, "refused")
CHECK = "CHECK (name <> 'refused')"
"""The constraint that refuses that row."""


class TableConformance(SinkConformance):
    options: Mapping[str, Any] = MappingProxyType({})
    cannot: Mapping[Any, str] = MappingProxyType({})
