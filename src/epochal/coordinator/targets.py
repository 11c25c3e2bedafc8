"""
The targets of a pipeline as one driver holds them: a committer each, asked at the same time.

A committer's calls never overlap. One that has not answered in the time given still works on
something, so from then on this driver calls none of them any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from epochal.contract import Begin, Committer, Limits, Sink
from epochal.coordinator.acting import Acts, acts_of
from epochal.coordinator.rejecting import check_schemas
from epochal.coordinator.starting import identity_of
from epochal.coordinator.waiting import Result, StillRunning, Together
from epochal.protocol.state import State
from epochal.terms import Ability, Json, SinkName

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("epochal")


class Targets:
    def __init__(
        self,
        sinks: Mapping[SinkName, Sink],
        *,
        alone: Collection[SinkName],
        limits: Limits,
        together: Together,
        let_go: Callable[[], None],
    ) -> None:
        """`let_go` is told when a target hangs and is not called any more."""
        self._sinks = sinks
        self._alone = alone
        self._limits = limits
        self._ask_together = together
        self._let_go = let_go
        self._handouts: dict[SinkName, Json] = {}
        self.committers: dict[SinkName, Committer] = {}
        self.acts: Acts = {}

    def open(self, state: State) -> None:
        """A committer for each sink, under this state's identity."""
        self.close()
        for name, sink in self._sinks.items():
            self.committers[name] = sink.committer(identity_of(state, name), self._limits)
        self.acts = acts_of(self._sinks, self.committers, alone=self._alone)

    def close(self) -> None:
        for name, committer in self.committers.items():
            try:
                committer.close()
            except Exception as error:  # noqa: BLE001  the others are to be closed all the same
                logger.warning("sink %s could not be closed: %s", name, error)
        self.committers = {}

    def check(self, schemas: Mapping[SinkName, pa.Schema]) -> Sequence[Ability]:
        told = check_schemas(self._sinks, self.committers, schemas)
        return [
            ability
            for name, committer in self.committers.items()
            for ability in committer.check(told.get(name))
        ]

    def begin(self, begins: Mapping[SinkName, Begin]) -> None:
        """Ask for what the tasks of an epoch need."""
        self._handouts = {sink: self.committers[sink].begin(one) for sink, one in begins.items()}

    def handout(self, sink: SinkName) -> Json:
        return self._handouts.get(sink)

    def at_once(self, jobs: Sequence[Callable[[], None]], *, give_up_s: float) -> None:
        """Ask several sinks at the same time; the first error is raised once all have answered."""
        slow_s = min(give_up_s, self._limits.commit_timeout_s)
        for error in self.together(jobs, slow_s=slow_s, give_up_s=give_up_s):
            if error is not None:
                raise error

    def together(
        self, jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
    ) -> Sequence[Result]:
        try:
            results = self._ask_together(jobs, slow_s=slow_s, give_up_s=give_up_s)
        except BaseException:
            # Interrupted while it waited: the calls themselves go on.
            self._leave_alone()
            raise
        if any(isinstance(result, StillRunning) for result in results):
            self._leave_alone()
        return results

    def _leave_alone(self) -> None:
        self._let_go()
        self.committers = {}
