"""A coordinator in a simulated world, one call at a time."""

from dataclasses import dataclass, field

import pytest

from epochal.coordinator import Coordinator, Environment
from epochal.errors import OutcomeUnknown
from epochal.protocol.admission import Position, Start
from epochal.terms import Claim, EpochNumber, Limits, Offsets, SinkName, Uid
from epochal.testing.driver import one_after_the_other
from proof.behaviour import OwnClock
from proof.calls import SimLog, SimSink
from proof.world import Source, World

UNANSWERED = OutcomeUnknown("no answer")
ONLY = SinkName("x")
QUICK = Limits(decide_retry_max_s=5.0, commit_retry_max_s=5.0, retry_backoff_ms=(100, 500, 2000))


@dataclass
class Bench:
    """A world, and what is to go wrong in it: verb → what to raise, before or after the effect."""

    world: World
    sinks: tuple[str, ...]
    limits: Limits = QUICK
    calls: list = field(default_factory=list)
    before: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)
    clock: OwnClock = field(default_factory=OwnClock)
    watched: list = field(default_factory=list)

    def send(self, call):
        self.calls.append(call)
        self._raise_next(self.before, call)
        self.world.issue(call)
        answer = self.world.land(call)
        self._raise_next(self.after, call)
        return answer

    def _raise_next(self, troubles, call):
        waiting = troubles.get((call.name, call.verb)) or troubles.get(call.verb)
        if waiting:
            error = waiting.pop(0)
            if error is not None:
                raise error

    def coordinator(self, name="A", *, gates=(), sinks=None, limits=None):
        spent = iter(f"{name}{at}" for at in range(10**6))
        return Coordinator(
            log=SimLog(self.send, name),
            sinks=[
                SimSink(name=SinkName(sink), send=self.send, actor=name)
                for sink in sinks or self.sinks
            ],
            gates=gates,
            limits=limits or self.limits,
            environment=Environment(
                clock=self.clock,
                random=lambda: 0.0,
                nonce=lambda: next(spent),
                new_uid=lambda: Uid(name.lower() * 12),
                new_claim=lambda: Claim(name.lower() * 8),
                parallel=one_after_the_other,
                on_step=lambda step, epoch: self.watched.append((step, epoch)),
            ),
        )

    def start(self, sinks=None, position=None, **more):
        return Start(
            pipeline="p",
            location="/chk",
            sinks={SinkName(sink): {"target": "t"} for sink in sinks or self.sinks},
            query_id="q",
            position=position or Position(),
            **more,
        )

    def started(self, name="A", **more):
        coordinator = self.coordinator(name, **more)
        coordinator.start(self.start())
        return coordinator

    def offsets(self, epoch):
        return Offsets(digest=f"offsets-{epoch}", text=f"of {epoch}")

    def begin(self, coordinator, epoch=0):
        return coordinator.begin(EpochNumber(epoch), query_id="q", offsets=self.offsets(epoch))

    def prepare(self, coordinator, epoch=0, *, attempt=1, sinks=None):
        from epochal.contract import Task

        receipts = {}
        for sink in coordinator._sinks.values():
            if sinks is not None and sink.name not in sinks:
                continue
            prepared = []
            for partition, rows in enumerate(self.world.source.epochs[epoch]):
                handle = coordinator.identity(sink.name).handle(
                    EpochNumber(epoch), partition=partition, attempt=attempt
                )
                writer = sink.writer(Task(handle=handle, schema=None))
                writer.write(rows)
                prepared.append(writer.prepare())
            receipts[sink.name] = tuple(prepared)
        return receipts

    def conclude(self, coordinator, receipts, epoch=0):
        coordinator.conclude(
            receipts, offsets=lambda: self.offsets(epoch), began_with=self.offsets(epoch)
        )

    def epoch(self, coordinator, epoch=0):
        self.begin(coordinator, epoch)
        coordinator.preparing()
        self.conclude(coordinator, self.prepare(coordinator, epoch), epoch)

    def verbs(self, *names):
        return [
            f"{call.name}.{call.verb}" if call.name else call.verb
            for call in self.calls
            if call.verb in names
        ]

    def visible(self, sink="x"):
        target = self.world.targets[SinkName(sink)]
        return sorted(row for rows in target.visible.values() for row in rows)


@pytest.fixture
def bench():
    return Bench(World(Source.of((1, 1), (), (2,)), [ONLY]), ("x",))


@pytest.fixture
def bench2():
    names = (SinkName("x"), SinkName("y"))
    return Bench(World(Source.of((1, 1), (1,)), names), names)
