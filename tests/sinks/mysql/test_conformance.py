"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
from kit.sql.conformance import SECRET, TableConformance

from epochal.sinks.memory import Memory
from epochal.testing.conformance import Target


class _Conformance(TableConformance):
    @pytest.fixture(autouse=True)
    def _at(self, place) -> None:
        self._place = place

    def make(self, tmp_path: Path) -> Target:
        place = self._place
        place.make_account("etl", SECRET)
        place.sql("GRANT ALL ON *.* TO etl")
        url = place.url(user=f"etl:{SECRET}")
        nowhere = "mysql://etl:x@127.0.0.1:1/shop"
        return self.target(place, url, nowhere=nowhere, wrong=url.replace(SECRET, "wrong"))


@pytest.mark.products("mysql")
class TestStagedAppend(_Conformance):
    options = MappingProxyType({"strategy": "staged"})


class TestStagedWithRejects(_Conformance):
    options = MappingProxyType({"on_reject": Memory(name="refused")})
    cannot = MappingProxyType({"refuse rows": "refused rows go to another sink"})


class TestPreparedAppend(_Conformance):
    options = MappingProxyType({"strategy": "prepared"})


@pytest.mark.products("mysql")
class TestPreparedAppendWithKey(_Conformance):
    options = MappingProxyType({"strategy": "prepared", "lock_timeout_s": 3})
    key = "PRIMARY KEY"


@pytest.mark.products("mysql")
class TestUpsert(_Conformance):
    options = MappingProxyType({"mode": "upsert", "keys": ["id"]})
    key = "PRIMARY KEY"
