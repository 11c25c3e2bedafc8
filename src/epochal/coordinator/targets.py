"""
`Targets`: the sinks of a pipeline with their committers, as one driver holds them.

Several are asked at the same time; the calls of one committer never overlap. A committer that has
not answered in the time given still works on something, so from then on this driver calls none.

Sinks with the same `transaction_key` are one group: they are rehearsed and committed as one
transaction, in the order of their declaration. Any other sink is a group of its own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from epochal.contract import Begin, Committer, Deadline, SharedTransaction, SharesTransaction, Sink
from epochal.coordinator.environment import Environment
from epochal.coordinator.rejected_rows import check_schemas, reject_sinks
from epochal.coordinator.retry import Result, StillRunning
from epochal.errors import Misconfigured
from epochal.protocol.invariants import broken
from epochal.protocol.state import State
from epochal.terms import Ability, EpochNumber, Identity, Json, Limits, Receipt, Receipts, SinkName

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("epochal")


class Targets:
    def __init__(
        self,
        sinks: Mapping[SinkName, Sink],
        *,
        limits: Limits,
        environment: Environment,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_hang` is called when a target hangs and is not called any more."""
        self._sinks = sinks
        self._limits = limits
        self._parallel = environment.parallel
        self._on_hang = on_hang
        self._handouts: dict[SinkName, Json] = {}
        self.committers: dict[SinkName, Committer] = {}
        self.shared: dict[SinkName, SharedTransaction] = {}
        """The transaction of each sink that shares one with others, and of no other sink."""

    def open(self, state: State) -> None:
        """Make a committer for each sink, under this state's identity."""
        self.close()
        for name, sink in self._sinks.items():
            self.committers[name] = sink.committer(identity_of(state, name), self._limits)
        self.shared = shared_transactions(self._sinks, self.committers)

    def close(self) -> None:
        for name, committer in self.committers.items():
            try:
                committer.close()
            except Exception as error:  # noqa: BLE001  the others are to be closed all the same
                logger.warning("sink %s could not be closed: %s", name, error)
        self.committers = {}

    def check(self, schemas: Mapping[SinkName, pa.Schema]) -> Sequence[Ability]:
        schemas = check_schemas(self._sinks, self.committers, schemas)
        return [
            ability
            for name, committer in self.committers.items()
            for ability in committer.check(schemas.get(name))
        ]

    def begin(self, begins: Mapping[SinkName, Begin]) -> None:
        """Ask for what the tasks of an epoch need."""
        self._handouts = {sink: self.committers[sink].begin(one) for sink, one in begins.items()}

    def handout(self, sink: SinkName) -> Json:
        return self._handouts.get(sink)

    # Groups: receipts of sinks that are rehearsed and committed by one call

    def groups(self, receipts: Receipts) -> list[Receipts]:
        """These receipts by transaction: sinks that share one are in one group."""
        groups: dict[object, dict[SinkName, Sequence[Receipt]]] = defaultdict(dict)
        for sink, some in receipts.items():
            shared = self.shared.get(sink)
            groups[sink if shared is None else id(shared)][sink] = some
        return list(groups.values())

    def rehearse(self, epoch: EpochNumber, group: Receipts) -> Deadline | None:
        sink = next(iter(group))
        if sink in self.shared:
            return self.shared[sink].rehearse(epoch, group)
        return self.committers[sink].rehearse(epoch, group[sink])

    def commit(self, epoch: EpochNumber, group: Receipts) -> None:
        sink = next(iter(group))
        if sink in self.shared:
            self.shared[sink].commit(epoch, group)
        else:
            self.committers[sink].commit(epoch, group[sink])

    # Several at the same time

    def at_once(self, jobs: Sequence[Callable[[], None]], *, give_up_s: float) -> None:
        """Ask several sinks at the same time; the first error is raised once all have answered."""
        slow_s = min(give_up_s, self._limits.commit_timeout_s)
        for error in self.in_parallel(jobs, slow_s=slow_s, give_up_s=give_up_s):
            if error is not None:
                raise error

    def in_parallel(
        self, jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
    ) -> Sequence[Result]:
        """The same; returns the error of each, or None."""
        try:
            results = self._parallel(jobs, slow_s=slow_s, give_up_s=give_up_s)
        except BaseException:
            # Interrupted while it waited: the calls themselves go on.
            self._abandon()
            raise
        if any(isinstance(result, StillRunning) for result in results):
            self._abandon()
        return results

    def _abandon(self) -> None:
        self._on_hang()
        self.committers = {}
        self.shared = {}


def shared_transactions(
    sinks: Mapping[SinkName, Sink], committers: Mapping[SinkName, Committer]
) -> dict[SinkName, SharedTransaction]:
    """
    One transaction for all sinks of one `transaction_key`, where there are at least two.

    Sinks that are rehearsed later than the rest stay alone: those that prepare last, and those that
    get rejected rows.
    """
    late = reject_sinks(sinks)
    by_key: dict[str, list[SinkName]] = defaultdict(list)
    for name, sink in sinks.items():
        if sink.transaction_key is not None and name not in late and not sink.prepares_last:
            by_key[sink.transaction_key].append(name)
    shared: dict[SinkName, SharedTransaction] = {}
    for names in by_key.values():
        if len(names) > 1:
            transaction = _share([committers[name] for name in names], names)
            shared |= dict.fromkeys(names, transaction)
    return shared


def _share(members: Sequence[Committer], names: Sequence[SinkName]) -> SharedTransaction:
    first = members[0]
    if not isinstance(first, SharesTransaction):
        raise broken("I3", f"{', '.join(names)} have one transaction_key and can't share one")
    return first.share(members)


# The sinks of a pipeline by name


def by_name(sinks: Sequence[Sink]) -> dict[SinkName, Sink]:
    """All sinks of a pipeline: those declared, then those that get the rows these reject."""
    if not sinks:
        raise Misconfigured("a pipeline needs at least one sink", "give it sinks=[…]")
    every = [*sinks, *_named_by_rejects_to(sinks)]
    named = {sink.name: sink for sink in every}
    if len(named) != len(every):
        names = [sink.name for sink in every]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise Misconfigured(
            f"two sinks share the name {', '.join(twice)}: receipts and ledgers go by name",
            'give one of them a name of its own: name="…"',
        )
    return named


def _named_by_rejects_to(sinks: Sequence[Sink]) -> list[Sink]:
    """Each once, also where several sinks name the same one."""
    found: list[Sink] = []
    for sink in sinks:
        other = sink.rejects_to
        if other is None or other in found:
            continue
        if other.where is not None or other.select is not None:
            raise Misconfigured(
                f"sink {other.name!r} gets the rows that {sink.name!r} rejects, and has where= or "
                "select=, which are for the rows of the query",
                "leave them out: rejected rows have columns of their own",
            )
        if other.rejects_to is not None:
            raise Misconfigured(
                f"sink {other.name!r} gets the rows that {sink.name!r} rejects, and has rejects_to "
                "itself",
                "a sink for rejected rows takes all of them: text columns without constraints",
            )
        found.append(other)
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
