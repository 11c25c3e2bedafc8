"""The promises of `contract`: on H2 behind a stand-in, and on a real server where one is named.

EPOCHAL_ORACLE_DSN=oracle://user:password@host:1521/service brings the real one in; the user needs
what grants() prints.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import oracledb
import pytest
from kit.sql.conformance import TableConformance
from sinks.oracle.conftest import SECRET

from epochal.sinks.oracle import Oracle
from epochal.sinks.oracle.client import connect
from epochal.testing.conformance import Target
from epochal.testing.trial import Trial

ON_H2 = MappingProxyType(
    {
        "reach other processes": "H2 and the stand-in are in the process of the tests",
        "be unreachable": "the stand-in has no connection that could break",
        "refuse rows": "the stand-in has H2's error codes, not Oracle's",
    }
)
REAL = os.environ.get("EPOCHAL_ORACLE_DSN", "")


class _Conformance(TableConformance):
    def test_values_arrive_as_they_were(self, trial: Trial) -> None:
        """To Oracle the empty string is null: the only value that comes out as another one."""
        rows = [(1, "grüß dich, 世界 🌍"), (2, None), (4, "tab\tquote\"comma,newline\nback\\'\r\n")]
        trial.commit(0, trial.prepare(0, trial.rows([*rows, (3, ""), (5, "x" * 1_000_000)])))
        assert trial.seen() == Counter([*rows, (3, None), (5, "x" * 1_000_000)])


class _OnH2(_Conformance):
    @pytest.fixture(autouse=True)
    def _at(self, orders) -> None:
        self._place = orders

    def make(self, tmp_path: Path) -> Target:
        place = self._place
        return Target(
            sink=place.sink(**self.options),
            visible=lambda: [{"id": key, "name": name} for key, name in place.rows()],
            leftovers=place.leftovers,
            secrets=[SECRET],
            misconfigured={"a missing table": place.sink("nowhere", **self.options)},
            cannot=ON_H2,
        )


class TestStagedOnH2(_OnH2):
    options = MappingProxyType({"strategy": "staged"})


class TestPreparedOnH2(_OnH2):
    options = MappingProxyType({"strategy": "prepared"})


class _OnOracle(_Conformance):
    @pytest.fixture(autouse=True)
    def _at(self) -> Iterator[None]:
        self._sink = Oracle(REAL, table="epochal_conformance", **self.options)
        self._admin = connect(self._sink.server)
        self._ask(
            "CREATE TABLE epochal_conformance (id NUMBER(19), name CLOB,"
            " CHECK (DBMS_LOB.SUBSTR(name, 10) <> 'refused'))"
        )
        yield
        for name in ("epochal_conformance", "epochal_ledger"):
            self._ask(f"DROP TABLE {name} PURGE")
        self._admin.close()

    def _ask(self, statement: str) -> list[Any]:
        with self._admin.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def make(self, tmp_path: Path) -> Target:
        return Target(
            sink=self._sink,
            visible=self._rows,
            leftovers=self._leftovers,
            refused=(2, "refused"),
            misconfigured={"a missing table": replace(self._sink, table="nowhere")},
            cannot={"be unreachable": "not tried on a server of somebody else"},
        )

    def _rows(self) -> list[dict[str, Any]]:
        oracledb.defaults.fetch_lobs = False
        found = self._ask("SELECT id, name FROM epochal_conformance")
        return [{"id": key, "name": name} for key, name in found]

    def _leftovers(self) -> list[Any]:
        return self._ask("SELECT table_name FROM user_tables WHERE table_name LIKE 'ep%'")


if REAL:

    class TestStagedOnOracle(_OnOracle):
        options = MappingProxyType({"strategy": "staged"})

    class TestPreparedOnOracle(_OnOracle):
        options = MappingProxyType({"strategy": "prepared"})
