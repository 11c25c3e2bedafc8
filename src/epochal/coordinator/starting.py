"""What a start makes of its sinks and of the newest record, before and while it claims."""

from __future__ import annotations

from collections.abc import Sequence

from epochal.contract import Sink
from epochal.errors import Misconfigured
from epochal.protocol.admission import Start, admit_start, newborn
from epochal.protocol.state import State, claimed
from epochal.terms import Identity, SinkName, Uid


def by_name(sinks: Sequence[Sink]) -> dict[SinkName, Sink]:
    named = {sink.name: sink for sink in sinks}
    if not named:
        raise Misconfigured("a pipeline needs at least one sink", "give it sinks=[…]")
    if len(named) != len(sinks):
        twice = sorted(
            {sink.name for sink in sinks if [s.name for s in sinks].count(sink.name) > 1}
        )
        raise Misconfigured(
            f"two sinks share the name {', '.join(twice)}: receipts and ledgers go by name",
            'give one of them a name of its own: name="…"',
        )
    return named


def identity_of(state: State, sink: SinkName) -> Identity:
    return Identity(
        pipeline=state.pipeline,
        uid=state.uid,
        sink=sink,
        generation=state.generation,
        run=state.run,
    )


def identity_changed(hoped: State, claimed_: State) -> bool:
    return (hoped.uid, hoped.generation) != (claimed_.uid, claimed_.generation)


def follow(before: State | None, start: Start, uid: Uid) -> State:
    base = newborn(start, uid) if before is None else before
    if before is not None:
        admit_start(before, start)
    return claimed(
        base, driver=start.driver, sinks=start.sinks, query_id=start.query_id, run=start.run
    )
