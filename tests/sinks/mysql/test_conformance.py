"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from epochal.contract import Task
from epochal.sinks.memory import Memory
from epochal.terms import Handle
from epochal.testing.conformance import SinkConformance, Target
from epochal.testing.trial import Trial

SECRET = "hunter2-s3cret"


class HandingTrial(Trial):
    """Every task gets what the driver hands out, as in a pipeline."""

    def task(self, handle: Handle, handout: Any = None) -> Task:
        whose = {"uid": handle.uid, "generation": handle.generation}
        return super().task(handle, handout or self.committer(**whose).begin(handle.epoch))


class _Conformance(SinkConformance):
    options: Mapping[str, Any] = MappingProxyType({})
    key = ""

    @pytest.fixture(autouse=True)
    def _at(self, place) -> None:
        self._place = place

    def make(self, tmp_path: Path) -> Target:
        place = self._place
        place.sql(f"CREATE TABLE {place.schema}.orders (id bigint {self.key}, name longtext)")
        place.sql(f"CREATE OR REPLACE USER etl IDENTIFIED BY '{SECRET}'")
        place.sql("GRANT ALL ON *.* TO etl")
        url = place.url(user=f"etl:{SECRET}")
        return Target(
            sink=place.sink(url=url, **self.options),
            visible=lambda: [{"id": key, "name": name} for key, name in place.rows()],
            leftovers=place.leftovers,
            secrets=[SECRET],
        )

    @pytest.fixture
    def trial(self, tmp_path: Path) -> Iterator[Trial]:
        trial = HandingTrial(self.make(tmp_path))
        yield trial
        trial.close()


class TestStagedAppend(_Conformance):
    options = MappingProxyType({"strategy": "staged"})


class TestStagedWithRejects(_Conformance):
    options = MappingProxyType({"on_reject": Memory(name="refused")})


class TestPreparedAppend(_Conformance):
    options = MappingProxyType({"strategy": "prepared"})


class TestUpsert(_Conformance):
    options = MappingProxyType({"mode": "upsert", "keys": ["id"]})
    key = "PRIMARY KEY"
