"""
The simulation of a cloned machine: two drivers with copies of one log, at the same targets.

One side is simulated as usual. At some call its log and its checkpoint are copied, as a snapshot of
a volume copies them; from then on two sides go on, each with its own log, checkpoint and trouble,
and share nothing but the targets. Each is judged by all rules of one log, and both together:

- no epoch is carried out by both at one target, so a reader sees no row twice;
- neither takes an epoch of the other for its own (I4), nor aborts what the other prepared (I5);
- at rest, a side whose last driver stopped cleanly has all its rows at the targets, once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

from epochal.errors import Refused, Unsettled
from epochal.protocol.state import State
from epochal.terms import Claim, Handle, Receipt, SinkName, Uid
from epochal.testing.crash import Breach
from proof.calls import TARGET, Call
from proof.judge import Judge, plain_row
from proof.simulation import Simulation
from proof.world import Target, World

_CALLS_MAX = 20_000


@dataclass(eq=False)
class Sides:
    """What both judges know."""

    common: frozenset[Claim]
    """Claims made before the copy: by drivers that both sides take for their predecessors."""
    prepared: dict[str, str] = field(default_factory=dict)
    """What was prepared after it, by the side that did."""
    judges: list[SideJudge] = field(default_factory=list)

    def is_common(self, name: str) -> bool:
        handle = Handle.parse(name)
        return handle is not None and handle.claim in self.common


class SideJudge(Judge):
    """The judge of one side: it looks past what the other side has prepared."""

    __slots__ = ("_sides", "side")
    side: str
    _sides: Sides

    @classmethod
    def after(cls, judge: Judge, side: str, sides: Sides) -> SideJudge:
        """Goes on from the judge of the log before it was copied."""
        mine = cls()
        judge.copy_into(mine)
        mine.side, mine._sides = side, sides
        sides.judges.append(mine)
        return mine

    def landing(self, world: World, call: Call) -> None:
        super().landing(world, call)
        if call.room != TARGET:
            return
        if call.verb == "prepare" and self._is_others(str(call.args[0])):
            raise Breach("I6", f"{call}: the other side has prepared under this handle")
        if call.verb == "prepare":
            self._sides.prepared[str(call.args[0])] = self.side
        elif call.verb == "abort":
            names = _named_in(call)
            for name in names:
                if self._is_others(name) and not self._sides.is_common(name):
                    raise Breach("I5", f"{call}: {name} is the other side's")
            self._of_a_driver_before_the_copy(names)

    def _is_others(self, name: str) -> bool:
        return self._sides.prepared.get(name, self.side) != self.side

    def _of_a_driver_before_the_copy(self, names: Sequence[str]) -> None:
        """
        A driver that was alive when its log was copied looks like a dead one from the copy, which
        aborts what it left. To the driver it is as if the target had thrown it away.
        """
        for judge in self._sides.judges:
            if judge is not self:
                Judge.expired(judge, names)

    def expired(self, handles: Sequence[str]) -> None:
        for judge in self._sides.judges:
            Judge.expired(judge, handles)

    def partly(self, world: World) -> None:
        """No row twice, and no epoch by both sides."""
        for sink, target in world.targets.items():
            sides: dict[int, set[str]] = {}
            for name in target.visible:
                side, handle = self._sides.prepared.get(name), Handle.parse(name)
                if side is not None and handle is not None:
                    sides.setdefault(handle.epoch, set()).add(side)
            both = sorted(epoch for epoch, seen in sides.items() if len(seen) > 1)
            if both:
                raise Breach("I1", f"{sink}: both sides carried out {both}")
            self._no_row_twice(world, sink)

    def concluded(
        self, world: World, error: BaseException | None, *, is_deterministic: bool
    ) -> None:
        """A side that is told why it can't go on is where a person is needed."""
        if error is None:
            self.at_rest(world)
        elif isinstance(error, Refused) or (isinstance(error, Unsettled) and not is_deterministic):
            self.partly(world)
        else:
            raise Breach("I4", f"{self.side} ends with {error!r}")

    def at_rest(self, world: World) -> None:
        """The last driver of this side stopped cleanly."""
        self.partly(world)
        if self.truth is None or self.truth.unsettled is not None:
            raise Breach("I4", "at rest, and the log is not")
        for sink in self.truth.sinks:
            lost = self._wanted(world) - self._seen(world, sink)
            if lost:
                raise Breach("I4", f"{sink} lost {sorted(lost)}")

    def _no_row_twice(self, world: World, sink: SinkName) -> None:
        twice = self._seen(world, sink) - self._wanted(world)
        if twice:
            raise Breach("I1", f"{sink} shows {sorted(twice)} more than once")

    def _seen(self, world: World, sink: SinkName) -> Counter[str]:
        rows = world.targets[sink].visible.values()
        return Counter(plain_row(row) for some in rows for row in some)

    def _wanted(self, world: World) -> Counter[str]:
        epochs = range(len(world.source.epochs))
        return Counter(str(row) for epoch in epochs for row in world.source.rows(epoch))

    def _is_proven(self, target: Target, key: tuple[Uid, int], named: Collection[str]) -> bool:
        """The other side may have gone past the epoch and pruned its proof: its rows are there."""
        uid, epoch = key
        is_pruned = epoch < target.pruned.get(uid, 0)
        return (is_pruned and target.committed.issuperset(named)) or super()._is_proven(
            target, key, named
        )

    def idle(self, world: World, sinks: Collection[SinkName]) -> None:
        for sink in sinks:
            left = world.targets[sink].prepared.keys() - self._named.keys()
            if mine := sorted(name for name in left if not self._is_others(name)):
                raise Breach("I5", f"idle after a sweep, and {sink} holds {mine}")

    def _nothing_left(self, world: World, call: Call, after: State) -> None:
        for sink in after.sinks:
            left = world.targets[sink].prepared.keys() - self._named.keys() - self._latecomers
            mine = {name for name in left if not self._is_others(name)}
            if mine:
                raise Breach("I5", f"{call}: stopped, and {sink} holds {mine}")


def _named_in(call: Call) -> list[str]:
    _, receipts = cast("tuple[int, tuple[Receipt, ...]]", call.args)
    return [str(receipt.handle) for receipt in receipts]


def simulate_clones(seed: int, *, trace: list[str] | None = None) -> int:
    """Simulate this seed; returns the number of calls, raises `Breach`."""
    chance = random.Random(f"clones {seed}")
    original = Simulation(seed, keeps_trace=trace is not None, changes_sinks=False)
    original.run_for(chance.randrange(1, 120))
    # Two copies of an empty log are two pipelines.
    while (truth := original.world.judge.truth) is None:
        if not original.is_running:
            return original.calls
        original.step()
    sides = Sides(common=frozenset(truth.claims))
    copied = _copied(original.world)
    for side, world in (("original", original.world), ("copy", copied)):
        world.judge = SideJudge.after(world.judge, side, sides)
    copy = Simulation(seed, keeps_trace=trace is not None, changes_sinks=False, copy_of=copied)
    both = [original, copy]
    try:
        copy.step()
        while any(one.is_running for one in both) and sum(one.calls for one in both) < _CALLS_MAX:
            chance.choice([one for one in both if one.is_running]).step()
        chance.shuffle(both)
        for one in both:
            one.calm_down()
    finally:
        if trace is not None:
            trace += sorted([*original.trace, *copy.trace])
    return original.calls + copy.calls


def _copied(world: World) -> World:
    """The same log and checkpoint a second time; the targets are the same."""
    copy = World(world.source, list(world.targets))
    copy.log, copy.checkpoint = world.log.copy(), world.checkpoint.copy()
    copy.targets, copy.judge = world.targets, world.judge
    return copy
