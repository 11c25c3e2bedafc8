"""
`Rehearsal`: every check of a prepared epoch that can still refuse it, before the decision (I3).

The receipts must be this driver's own, the sinks rehearse what they prepared, rows that some of
them reject are prepared at others, and the gates are asked. Where a sink prepares last
(`Sink.prepares_last`), the others are rehearsed before it does, and nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from epochal.contract import Deadline, Rows, Sink
from epochal.coordinator.environment import Environment
from epochal.coordinator.gates import Early, Gate, PreparedEpoch, run_gates
from epochal.coordinator.rejected_rows import RejectedRows
from epochal.coordinator.targets import Targets, identity_of
from epochal.coordinator.tracker import Tracker
from epochal.errors import Refused, TryAgain
from epochal.protocol.invariants import require_own_receipts
from epochal.protocol.state import State
from epochal.terms import EpochNumber, Limits, Offsets, Receipts, SinkName

_MARGIN_PART = 0.1
"""How much of the time for which a target keeps rows must be left, up to `commit_timeout_s`."""


class Rehearsal:
    """Examines one epoch after the other."""

    def __init__(
        self,
        sinks: Mapping[SinkName, Sink],
        targets: Targets,
        *,
        gates: Iterable[Gate],
        limits: Limits,
        environment: Environment,
        tracker: Tracker,
        note_late: Callable[[], None],
    ) -> None:
        self._targets = targets
        self._gates = tuple(gates)
        self._limits = limits
        self._environment = environment
        self._tracker = tracker
        self._rejected_rows = RejectedRows(
            sinks, limits=limits, environment=environment, note_late=note_late
        )
        self._rehearsed: set[SinkName] = set()
        self._gates_left: Sequence[Gate] = ()
        self._deadlines: list[tuple[Collection[SinkName], Deadline]] = []

    @property
    def rejected(self) -> Receipts:
        """Rows that sinks of the open epoch rejected, as they were prepared at other sinks."""
        return self._rejected_rows.receipts

    @property
    def reject_sinks(self) -> frozenset[SinkName]:
        return self._rejected_rows.reject_sinks

    def begin(self) -> None:
        self._rehearsed = set()
        self._rejected_rows.begin()
        self._gates_left = self._gates
        self._deadlines = []

    def examine_early(
        self, state: State, epoch: EpochNumber, receipts: Receipts, frame: Rows
    ) -> None:
        """Examine what is prepared while other sinks are still to come."""
        _require_own(state, epoch, receipts, receipts)
        awaited = frozenset(self._targets.committers) - receipts.keys()
        self._rehearse(state, epoch, receipts)
        self._ask_gates(epoch, Early(receipts, awaited), frame)

    def examine(self, state: State, epoch: EpochNumber, receipts: Receipts, frame: Rows) -> None:
        """Examine the whole epoch; afterwards nothing that depends on the rows can fail."""
        self._tracker.prepared(receipts)
        _require_own(state, epoch, receipts, self._targets.committers.keys() - self.reject_sinks)
        self._environment.on_step("prepared", epoch)
        self._rehearse(state, epoch, receipts)
        # Last, as only now all rejected rows are known.
        self._rehearse(state, epoch, self.rejected)
        self._tracker.prepared(self.rejected, is_rejected=True)
        self._ask_gates(epoch, {**receipts, **self.rejected}, frame)
        self._environment.on_step("gated", epoch)

    def examine_again(self, epoch: EpochNumber, groups: Sequence[Receipts]) -> None:
        """Examine a decided epoch in which lost receipts were replaced, before that is recorded."""
        self._deadlines = [*self._targets.rehearse_all(epoch, groups).items()]
        self.require_time(epoch)

    def confirm(self, epoch: EpochNumber, receipts: Receipts) -> None:
        """Have targets show that they still hold what was rehearsed; the decision is next."""
        self._targets.confirm_all(epoch, self._targets.groups(receipts))

    def require_time(self, epoch: EpochNumber) -> None:
        """Refuse to decide on rows that a target would drop before they can be committed."""
        for sinks, deadline in self._deadlines:
            left_s = deadline.at_s - self._environment.clock.monotonic()
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
        self._environment.on_step("rehearsed", epoch)
        self._gates_left = run_gates(
            self._gates_left, PreparedEpoch(number=epoch, prepared=shown, frame=frame)
        )

    def _rehearse(self, state: State, epoch: EpochNumber, receipts: Receipts) -> None:
        due = {sink: some for sink, some in receipts.items() if sink not in self._rehearsed}
        deadlines = self._targets.rehearse_all(epoch, self._targets.groups(due))
        self._deadlines += deadlines.items()
        self._rehearsed.update(due)
        for sink in due:
            self._rejected_rows.deliver(
                epoch,
                sink,
                self._targets.committers[sink],
                identity=partial(identity_of, state),
                handout=self._targets.handout,
            )


def _require_own(
    state: State, epoch: EpochNumber, receipts: Receipts, sinks: Collection[SinkName]
) -> None:
    require_own_receipts(
        receipts,
        uid=state.uid,
        generation=state.generation,
        claim=state.claims[0],
        epoch=epoch,
        sinks=sinks,
    )


def require_same_offsets(epoch: EpochNumber, began_with: Offsets, now: Offsets) -> None:
    if began_with.digest != now.digest:
        raise Refused(
            f"epoch {epoch}: the checkpoint's offsets changed while it was written:\n"
            f"  begun with: {began_with.text}\n  now:        {now.text}",
            "another driver works on this checkpoint: find it and stop one of the two",
        )
