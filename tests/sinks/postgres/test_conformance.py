"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
from kit.sql.conformance import SECRET, TableConformance

from epochal.testing.conformance import Target

TESTS = Path(__file__).resolve().parents[2]


class _Conformance(TableConformance):
    @pytest.fixture(autouse=True)
    def _at(self, place, monkeypatch) -> None:
        self._place = place
        # Other processes unpickle the sink, whose kind may be one of these tests.
        monkeypatch.setenv("PYTHONPATH", str(TESTS))

    def make(self, tmp_path: Path) -> Target:
        url = self._place.server.url().replace("postgres@", f"postgres:{SECRET}@")
        nowhere = "postgresql://postgres@127.0.0.1:1/postgres"
        return self.target(self._place, url, nowhere=nowhere)


@pytest.mark.ways("columns", "bytes")
class TestStagedAppend(_Conformance):
    options = MappingProxyType({"strategy": "staged"})


@pytest.mark.ways("bytes")
class TestPreparedAppend(_Conformance):
    options = MappingProxyType({"strategy": "prepared"})


class TestPreparedAppendWithKey(_Conformance):
    options = MappingProxyType({"strategy": "prepared", "lock_timeout_s": 3})
    key = "PRIMARY KEY"


class TestUpsert(_Conformance):
    options = MappingProxyType({"mode": "upsert", "keys": ["id"]})
    key = "PRIMARY KEY"
