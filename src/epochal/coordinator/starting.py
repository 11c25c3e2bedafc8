"""What a start makes of its sinks and of the newest record, before and while it claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epochal.contract import Sink
from epochal.errors import Misconfigured
from epochal.protocol.admission import Start, admit_start, newborn
from epochal.protocol.state import State, claimed
from epochal.terms import Identity, Json, SinkName, Uid


def by_name(sinks: Sequence[Sink]) -> dict[SinkName, Sink]:
    """All sinks of a pipeline: those declared, then those that get the rows these refuse."""
    if not sinks:
        raise Misconfigured("a pipeline needs at least one sink", "give it sinks=[…]")
    every = [*sinks, *_taking_rejects(sinks)]
    named = {sink.name: sink for sink in every}
    if len(named) != len(every):
        names = [sink.name for sink in every]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise Misconfigured(
            f"two sinks share the name {', '.join(twice)}: receipts and ledgers go by name",
            'give one of them a name of its own: name="…"',
        )
    return named


def _taking_rejects(sinks: Sequence[Sink]) -> list[Sink]:
    """Each once, also where several sinks name the same one."""
    found: list[Sink] = []
    for sink in sinks:
        taker = sink.rejects_to
        if taker is None or taker in found:
            continue
        if taker.where is not None or taker.select is not None:
            raise Misconfigured(
                f"sink {taker.name!r} gets the rows that {sink.name!r} refuses, and has where= or "
                "select=, which are for the rows of the query",
                "leave them out: refused rows have columns of their own",
            )
        if taker.rejects_to is not None:
            raise Misconfigured(
                f"sink {taker.name!r} gets the rows that {sink.name!r} refuses, and would refuse "
                "some of them in turn",
                "a sink for rejected rows takes all of them: text columns without constraints",
            )
        found.append(taker)
    return found


def described(sinks: Sequence[Sink]) -> dict[SinkName, Mapping[str, Json]]:
    """All sinks of a pipeline, for the log."""
    return {name: sink.describe() for name, sink in by_name(sinks).items()}


def identity_of(state: State, sink: SinkName) -> Identity:
    return Identity(
        pipeline=state.pipeline,
        uid=state.uid,
        sink=sink,
        generation=state.generation,
        run=state.run,
        location=state.location,
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
