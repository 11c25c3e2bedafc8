"""The declaration of a sink in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pyarrow as pa

from epochal.contract import Limits, Task
from epochal.errors import Misconfigured
from epochal.kit.sink_base import SinkBase
from epochal.sinks.memory.committer import MemoryCommitter
from epochal.sinks.memory.place import Place
from epochal.sinks.memory.writer import MemoryWriter
from epochal.terms import EpochNumber, Identity, Json, SinkName

_OUTPUT_MODES = {"append": frozenset({"append", "update"}), "complete": frozenset({"complete"})}


@dataclass(frozen=True, kw_only=True)
class Memory(SinkBase):
    """
    Rows in the driver's memory, for tests and laptops: they are gone when the driver is.

    `mode="append"` keeps every epoch; of a query in update mode that is a changelog, each row a new
    version. `mode="complete"` shows the newest epoch only, for Spark's complete mode.

    The rows belong to this object: two sinks of one name share nothing, and a pickled copy reaches
    the rows of the original. A task in another process on the same machine does that by loopback.
    """

    kind: ClassVar[str] = "memory"

    name: SinkName = SinkName("memory")
    mode: Literal["append", "complete"] = "append"
    _place: Place = field(init=False, repr=False, compare=False, default_factory=Place)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in _OUTPUT_MODES:
            raise Misconfigured(f"Memory(mode={self.mode!r})", "append or complete")

    @property
    def target(self) -> str:
        return "the driver's process"

    @property
    def output_modes(self) -> frozenset[str]:
        return _OUTPUT_MODES[self.mode]

    def describe(self) -> Mapping[str, Json]:
        return {"kind": self.kind, "target": self.target, "mode": self.mode}

    def writer(self, task: Task) -> MemoryWriter:
        return MemoryWriter(task, self._place.store())

    def committer(self, identity: Identity, limits: Limits) -> MemoryCommitter:  # noqa: ARG002
        return MemoryCommitter(identity, self._place.store(), replaces=self.mode == "complete")

    def rows(self) -> pa.Table:
        """All visible rows, in the order in which their epochs were committed."""
        return self._place.store().rows()

    def epochs(self) -> list[EpochNumber]:
        """The epochs whose rows are visible, in the order in which they were committed."""
        return self._place.store().epochs()
