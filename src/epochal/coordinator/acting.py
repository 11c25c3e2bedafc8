"""
Acts: what becomes visible at a target by one transaction, and so is asked for once.

Most sinks act alone. Those with one `transaction_key` act together, in the order in which they are
declared; of a decision from before one of them was added, the others still do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from epochal.contract import Committer, Deadline, SharedTransaction, SharesTransaction, Sink
from epochal.protocol.invariants import broken
from epochal.terms import EpochNumber, Receipts, SinkName

Acts: TypeAlias = Mapping[tuple[SinkName, ...], SharedTransaction]
"""Each sink is in exactly one of them."""


@dataclass(frozen=True, slots=True)
class _Alone:
    sink: SinkName
    committer: Committer

    def rehearse(self, epoch: EpochNumber, receipts: Receipts) -> Deadline | None:
        return self.committer.rehearse(epoch, receipts[self.sink])

    def commit(self, epoch: EpochNumber, receipts: Receipts) -> None:
        self.committer.commit(epoch, receipts[self.sink])


def acts_alone(committers: Mapping[SinkName, Committer]) -> Acts:
    return {(name,): _Alone(name, committer) for name, committer in committers.items()}


def acts_of(
    sinks: Mapping[SinkName, Sink],
    committers: Mapping[SinkName, Committer],
    *,
    alone: Collection[SinkName] = (),
) -> Acts:
    """Sinks of one key together, all others alone; so is what is rehearsed later than the rest."""
    by_key: dict[tuple[str, ...], list[SinkName]] = defaultdict(list)
    for name, sink in sinks.items():
        key = None if name in alone or sink.prepares_last else sink.transaction_key
        by_key[("alone", name) if key is None else ("together", key)].append(name)
    return {
        tuple(names): _Alone(names[0], committers[names[0]])
        if len(names) == 1
        else _shared([committers[name] for name in names], names)
        for names in by_key.values()
    }


def _shared(members: Sequence[Committer], names: Sequence[SinkName]) -> SharedTransaction:
    first = members[0]
    if not isinstance(first, SharesTransaction):
        raise broken("I3", f"{', '.join(names)} have one transaction_key and can't share one")
    return first.share(members)


def due(acts: Acts, receipts: Receipts) -> list[tuple[SharedTransaction, Receipts]]:
    """Which acts these receipts ask for, each with its own."""
    asked = [
        (act, {name: receipts[name] for name in names if name in receipts})
        for names, act in acts.items()
    ]
    return [(act, some) for act, some in asked if some]
