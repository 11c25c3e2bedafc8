"""The conformance suite for databases, whose tasks work by what the driver hands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from epochal.contract import Task
from epochal.terms import Handle
from epochal.testing.conformance import SinkConformance
from epochal.testing.trial import Trial


class HandingTrial(Trial):
    """Every task gets what the driver hands out, as in a pipeline."""

    def task(self, handle: Handle, handout: Any = None) -> Task:
        whose = {"uid": handle.uid, "generation": handle.generation}
        return super().task(handle, handout or self.committer(**whose).begin(handle.epoch))


class TableConformance(SinkConformance):
    options: Mapping[str, Any] = MappingProxyType({})

    @pytest.fixture
    def trial(self, tmp_path: Path) -> Iterator[Trial]:
        trial = HandingTrial(self.make(tmp_path))
        yield trial
        trial.close()
