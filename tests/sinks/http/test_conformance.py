"""Both modes keep what the contract promises, on real servers."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
from kit.spool.spooled import left_in
from sinks.http.conftest import TOKEN
from sinks.http.left import left_at

from epochal.sinks.http import Http
from epochal.sinks.http.sink import IDEMPOTENCY_KEY, TWO_PHASE
from epochal.testing.conformance import SinkConformance, Target

_numbers = itertools.count()


class _TwoPhase(SinkConformance):
    format = "ndjson"

    @pytest.fixture(autouse=True)
    def _at(self, receiver) -> None:
        self._receiver = receiver

    def make(self, tmp_path: Path) -> Target:
        receiver = self._receiver
        name = f"{self.format} {next(_numbers)}"
        # Small parts: what is large goes in several.
        sink = Http(receiver.url, token=TOKEN, name=name, format=self.format, part_bytes=200_000)

        return Target(
            sink=sink,
            visible=lambda: receiver.rows(name),
            leftovers=lambda: left_at(receiver, name),
            secrets=[TOKEN],
            unreachable=lambda: nullcontext(
                Http("http://127.0.0.1:1", token=TOKEN, name=name, retries_max=0)
            ),
            misconfigured={"a wrong token": Http(receiver.url, token="wrong", name=name)},
            cannot=TWO_PHASE.cannot,
        )


class TestTwoPhaseJson(_TwoPhase):
    format = "ndjson"


class TestTwoPhaseArrow(_TwoPhase):
    format = "arrow"


class TestIdempotencyKey(SinkConformance):
    @pytest.fixture(autouse=True)
    def _at(self, service) -> None:
        self._service = service

    def make(self, tmp_path: Path) -> Target:
        spool = tmp_path / "spool"
        url = self._service.url.replace("//", "//user:hunter2@") + "?secret=hunter3"
        return Target(
            sink=Http(url, mode="idempotency-key", spool=spool, headers={"X-Key": "hunter4"}),
            visible=self._service.rows,
            leftovers=lambda: left_in(spool),
            secrets=["hunter2", "hunter3", "hunter4"],
            cannot=IDEMPOTENCY_KEY.cannot,
        )
