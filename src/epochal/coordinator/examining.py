"""
Everything that can still say no to an epoch, before it is decided (I3).

The receipts must be this driver's own, the sinks rehearse what they prepared, the rows that some of
them refuse are prepared at others, and the gates are asked. Where a sink prepares late, what the
others have prepared is examined before it does; nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from epochal.contract import Deadline, Limits, Rows, SharedTransaction, Sink
from epochal.coordinator.acting import due
from epochal.coordinator.gates import Early, Gate, PreparedEpoch, run_gates
from epochal.coordinator.rejecting import Deliveries
from epochal.coordinator.starting import identity_of
from epochal.coordinator.surroundings import Surroundings
from epochal.coordinator.targets import Targets
from epochal.coordinator.tracker import Tracker
from epochal.errors import Refused, TryAgain
from epochal.protocol.invariants import require_own_receipts
from epochal.protocol.state import State
from epochal.terms import EpochNumber, Offsets, Receipts, SinkName

_MARGIN_PART = 0.1
"""How much of the time for which a target keeps rows must be left, up to `commit_timeout_s`."""


class Examiner:
    """Examines one epoch after the other."""

    def __init__(
        self,
        sinks: Mapping[SinkName, Sink],
        targets: Targets,
        *,
        gates: Iterable[Gate],
        limits: Limits,
        around: Surroundings,
        tracker: Tracker,
    ) -> None:
        self._targets = targets
        self._gates = tuple(gates)
        self._limits = limits
        self._around = around
        self._tracker = tracker
        self._rejects = Deliveries(sinks, limits=limits, around=around)
        self._rehearsed: set[SinkName] = set()
        self._gates_left: Sequence[Gate] = ()
        self._deadlines: list[tuple[Collection[SinkName], Deadline]] = []

    @property
    def refused(self) -> Receipts:
        """What the sinks of the open epoch have refused, as it was prepared elsewhere."""
        return self._rejects.receipts

    @property
    def takers(self) -> frozenset[SinkName]:
        """The sinks that get nothing but what others refuse."""
        return self._rejects.takers

    def begin(self) -> None:
        self._rehearsed = set()
        self._rejects.begin()
        self._gates_left = self._gates
        self._deadlines = []

    def examine_early(
        self, state: State, epoch: EpochNumber, receipts: Receipts, frame: Rows
    ) -> None:
        """What is prepared while others are still to come."""
        _require_own(state, epoch, receipts, receipts)
        awaited = frozenset(self._targets.committers) - receipts.keys()
        self._rehearse(state, epoch, receipts)
        self._ask_gates(epoch, Early(receipts, awaited), frame)

    def examine(self, state: State, epoch: EpochNumber, receipts: Receipts, frame: Rows) -> None:
        """All of it; afterwards nothing that depends on the rows can fail."""
        self._tracker.prepared(receipts)
        _require_own(state, epoch, receipts, self._targets.committers.keys() - self.takers)
        self._around.watch("prepared", epoch)
        self._rehearse(state, epoch, receipts)
        # Last, as only now all that the others refuse is known.
        self._rehearse(state, epoch, self.refused)
        self._tracker.prepared(self.refused)
        self._ask_gates(epoch, {**receipts, **self.refused}, frame)
        self._around.watch("gated", epoch)

    def require_time(self, epoch: EpochNumber) -> None:
        """Refuse to decide on what a target would throw away before it can be committed."""
        for sinks, deadline in self._deadlines:
            left_s = deadline.at_s - self._around.clock.monotonic()
            needed_s = min(self._limits.commit_timeout_s, deadline.kept_s * _MARGIN_PART)
            if left_s < needed_s:
                raise TryAgain(
                    f"epoch {epoch}: {max(left_s, 0):.0f} s are left of the "
                    f"{deadline.kept_s:.0f} s for which the target of {', '.join(sinks)} keeps "
                    "prepared rows: too few to decide on it",
                    deadline.hint,
                )

    def _ask_gates(self, epoch: EpochNumber, shown: Receipts, frame: Rows) -> None:
        """Ask the gates that have not passed yet."""
        self._around.watch("rehearsed", epoch)
        self._gates_left = run_gates(
            self._gates_left, PreparedEpoch(number=epoch, prepared=shown, frame=frame)
        )

    def _rehearse(self, state: State, epoch: EpochNumber, receipts: Receipts) -> None:
        asked = {sink: some for sink, some in receipts.items() if sink not in self._rehearsed}
        self._targets.at_once(
            [
                partial(self._rehearse_one, act, epoch, some)
                for act, some in due(self._targets.acts, asked)
            ],
            give_up_s=max(self._limits.commit_retry_max_s, self._limits.commit_timeout_s),
        )
        self._rehearsed.update(asked)
        for sink in asked:
            self._rejects.deliver(
                epoch,
                sink,
                self._targets.committers[sink],
                identity=partial(identity_of, state),
                handout=self._targets.handout,
            )

    def _rehearse_one(self, act: SharedTransaction, epoch: EpochNumber, receipts: Receipts) -> None:
        deadline = act.rehearse(epoch, receipts)
        if deadline is not None:
            self._deadlines.append((tuple(receipts), deadline))


def _require_own(
    state: State, epoch: EpochNumber, receipts: Receipts, sinks: Collection[SinkName]
) -> None:
    require_own_receipts(
        receipts, uid=state.uid, generation=state.generation, epoch=epoch, sinks=sinks
    )


def require_same_offsets(epoch: EpochNumber, began_with: Offsets, now: Offsets) -> None:
    if began_with.digest != now.digest:
        raise Refused(
            f"epoch {epoch}: the checkpoint's offsets changed while it was written:\n"
            f"  begun with: {began_with.text}\n  now:        {now.text}",
            "another driver works on this checkpoint: find it and stop one of the two",
        )
