"""The least privileges that each sink needs, as statements of its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from epochal.config.resolve_target import Reached
from epochal.coordinator.targets import by_name
from epochal.errors import Misconfigured
from epochal.reports.model import GrantsReport


@runtime_checkable
class Granting(Protocol):
    """A sink that knows which privileges it needs."""

    def grants(self) -> Sequence[str] | str: ...


def grants(reached: Reached) -> GrantsReport:
    """Return the grants of every sink. No target is queried."""
    statements: dict[str, Sequence[str]] = {}
    unknown: dict[str, str] = {}
    for name, sink in by_name(reached.require_sinks()).items():
        if not isinstance(sink, Granting):
            unknown[name] = "nothing to grant: this kind of sink needs no privileges"
            continue
        try:
            found = sink.grants()
            statements[name] = [found] if isinstance(found, str) else list(found)
        except Misconfigured as error:
            unknown[name] = f"{error.message}; {error.hint}"
    return GrantsReport(pipeline=reached.pipeline or "", sinks=statements, unknown=unknown)
