"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest
from kit.sql.conformance import CHECK, REFUSED, TableConformance

from epochal.sinks.memory import Memory
from epochal.testing.conformance import Target

SECRET = "hunter2-s3cret"


class _Conformance(TableConformance):
    key = ""

    @pytest.fixture(autouse=True)
    def _at(self, place) -> None:
        self._place = place

    def make(self, tmp_path: Path) -> Target:
        place = self._place
        place.sql(
            f"CREATE TABLE {place.schema}.orders (id bigint {self.key}, name longtext {CHECK})"
        )
        place.sql(f"CREATE OR REPLACE USER etl IDENTIFIED BY '{SECRET}'")
        place.sql("GRANT ALL ON *.* TO etl")
        url = place.url(user=f"etl:{SECRET}")
        options = {"url": url, **self.options}
        return Target(
            sink=place.sink(**options),
            visible=lambda: [{"id": key, "name": name} for key, name in place.rows()],
            leftovers=place.leftovers,
            secrets=[SECRET],
            refused=REFUSED,
            unreachable=lambda: nullcontext(
                place.sink(**{**options, "url": "mysql://etl:x@127.0.0.1:1/shop"})
            ),
            misconfigured={
                "a missing table": place.sink("nowhere", **options),
                "a wrong password": place.sink(**{**options, "url": url.replace(SECRET, "wrong")}),
            },
            cannot=self.cannot,
        )


class TestStagedAppend(_Conformance):
    options = MappingProxyType({"strategy": "staged"})


class TestStagedWithRejects(_Conformance):
    options = MappingProxyType({"on_reject": Memory(name="refused")})
    cannot = MappingProxyType({"refuse rows": "refused rows go to another sink"})


class TestPreparedAppend(_Conformance):
    options = MappingProxyType({"strategy": "prepared"})


class TestUpsert(_Conformance):
    options = MappingProxyType({"mode": "upsert", "keys": ["id"]})
    key = "PRIMARY KEY"
