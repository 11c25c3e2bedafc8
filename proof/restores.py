"""
The simulation of a target that goes back in time: a backup is restored, or a replica takes over.

One target is copied at some calls, and at one later call it is replaced by the copy, with all that
was prepared, committed and proven then. The usual trouble goes on. The judge objects where a driver
commits an epoch there although it knows, or the log does, of an earlier one that is gone; where a
sweep aborts what a decision named; and, at rest, where rows are missing and nobody was told.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from epochal.terms import SinkName
from proof.simulation import Simulation
from proof.world import Target

_KEEP, _GO_BACK = 0.03, 0.02


@dataclass
class Restores(Simulation):
    changes_sinks: bool = False
    restored: SinkName | None = None
    _kept: dict[SinkName, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._restores = random.Random(f"restores {self.seed}")
        # What a target throws away by itself is another fault.
        self._weather = replace(self._weather, expire=0.0)

    def step(self) -> None:
        sink = self._restores.choice(self._sinks)
        if self._restores.random() < _KEEP:
            self._kept[sink] = self.world.targets[sink].copy()
        elif self.restored is None and sink in self._kept and self._restores.random() < _GO_BACK:
            self.restored = sink
            self._note(f"{sink} goes back in time")
            self.world.go_back(sink, self._kept[sink])
        super().step()


def simulate_restores(seed: int) -> Restores:
    """Simulate this seed; raises `Breach`."""
    run = Restores(seed)
    run.run()
    return run
