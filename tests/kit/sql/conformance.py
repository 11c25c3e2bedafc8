"""The conformance suite for tables of databases, with the options of one strategy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from epochal.testing.conformance import SinkConformance, Target

SECRET = "hunter2-s3cret"
REFUSED = (2, "refused")
CHECK = "CHECK (name <> 'refused')"
"""The constraint that refuses that row."""


class TableConformance(SinkConformance):
    options: Mapping[str, Any] = MappingProxyType({})
    cannot: Mapping[Any, str] = MappingProxyType({})
    key = ""

    def target(self, place: Any, url: str, *, nowhere: str, wrong: str = "") -> Target:
        """A table with a constraint; `nowhere` is the url of no server, `wrong` is refused."""
        place.sql(
            f"CREATE TABLE {place.schema}.orders (id bigint {self.key}, name {place.text} {CHECK})"
        )
        options = {"url": url, "pool_min": 0, **self.options}
        misconfigured = {"a missing table": place.sink("nowhere", **options)}
        if wrong:
            misconfigured["a wrong password"] = place.sink(**{**options, "url": wrong})
        return Target(
            sink=place.sink(**options),
            visible=lambda: [{"id": key, "name": name} for key, name in place.rows()],
            leftovers=place.leftovers,
            secrets=[SECRET],
            refused=REFUSED,
            unreachable=lambda: nullcontext(place.sink(**{**options, "url": nowhere})),
            misconfigured=misconfigured,
            cannot=self.cannot,
        )
