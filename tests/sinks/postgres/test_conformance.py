"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest
from kit.sql.conformance import CHECK, REFUSED, TableConformance

from epochal.testing.conformance import Target

TESTS = Path(__file__).resolve().parents[2]
SECRET = "hunter2-s3cret"


class _Conformance(TableConformance):
    key = ""

    @pytest.fixture(autouse=True)
    def _at(self, place, monkeypatch) -> None:
        self._place = place
        # Other processes unpickle the sink, whose kind may be one of these tests.
        monkeypatch.setenv("PYTHONPATH", str(TESTS))

    def make(self, tmp_path: Path) -> Target:
        place = self._place
        place.sql(f"CREATE TABLE {place.schema}.orders (id bigint {self.key}, name text {CHECK})")
        url = place.server.url().replace("postgres@", f"postgres:{SECRET}@")
        options = {"url": url, "pool_min": 0, **self.options}
        return Target(
            sink=place.sink(**options),
            visible=lambda: [{"id": key, "name": name} for key, name in place.rows()],
            leftovers=place.leftovers,
            secrets=[SECRET],
            refused=REFUSED,
            unreachable=lambda: nullcontext(
                place.sink(**{**options, "url": "postgresql://postgres@127.0.0.1:1/postgres"})
            ),
            misconfigured={"a missing table": place.sink("nowhere", **options)},
            cannot=self.cannot,
        )


class TestStagedAppend(_Conformance):
    options = MappingProxyType({"strategy": "staged"})


class TestPreparedAppend(_Conformance):
    options = MappingProxyType({"strategy": "prepared"})


class TestUpsert(_Conformance):
    options = MappingProxyType({"mode": "upsert", "keys": ["id"]})
    key = "PRIMARY KEY"
