"""The ledger: a consumer group of ours whose committed offset is the newest epoch that is proven.

Every transaction of an epoch commits the epoch's number to it, so the proof and the rows become
visible by one act. An epoch without rows has no transaction: the driver then writes the number in
one of its own. Its id is one for all drivers of the pipeline, and whoever begins it fences the
others: what is read after that can't be overtaken by a driver that wakes up late.

The number stands under partition 0 of the sink's topic. Brokers forget a group that nobody has
committed to for offsets.retention.minutes (a week by default): then nothing is proven any more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from epochal.errors import EpochalError, TryAgain
from epochal.kafka import faults
from epochal.kafka.client import Client, group_coordinator
from epochal.kafka.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
)
from epochal.sinks.kafka import ending, rights
from epochal.sinks.kafka.every_broker import groups
from epochal.sinks.kafka.names import Names
from epochal.sinks.kafka.tokens import Open
from epochal.terms import EpochNumber, Mark, Uid

_TIMEOUT_MS = 60_000
_ATTEMPTS_MAX = 5
_MANY_GROUPS_FROM = 8
"""The version of OffsetFetch that asks for groups by a list."""


def word(run: str | None) -> str:
    """What stands beside the number."""
    return json.dumps({"run": run})


class Ledger:
    def __init__(self, names: Names, topic: str) -> None:
        self._names = names
        self._topic = topic
        self._producer: tuple[int, int] | None = None

    def newest(self, client: Client) -> list[Mark]:
        """The newest epoch of every life of this pipeline and sink that is still remembered."""
        return [
            Mark(uid=uid, epoch=epoch, run=run)
            for uid, group in self._groups(client)
            for epoch, run in self._read(client, group)
        ]

    def own(self, client: Client) -> EpochNumber | None:
        return self.at(client, self._names.group)

    def at(self, client: Client, group: str) -> EpochNumber | None:
        """The number that a group of ours stands at."""
        found = self._read(client, group)
        return found[0][0] if found else None

    def record(
        self, client: Client, epoch: EpochNumber, extra: Sequence[tuple[str, ending.Offsets]] = ()
    ) -> None:
        """Prove an epoch that has no transaction of its own, unless it or a later one is proven."""
        for _ in range(_ATTEMPTS_MAX):
            try:
                if self._producer is None:
                    self._producer = ending.start_one(client, self._names.ledger, _TIMEOUT_MS)
                    proven = self.own(client)
                    if proven is not None and proven >= epoch:
                        return
                self._write(client, self._producer, epoch, extra)
            except ending.Ended:
                self._producer = None
            else:
                return
        raise TryAgain(
            f"the ledger of epoch {epoch} can't be written: another driver takes it every time"
        )

    def _write(
        self,
        client: Client,
        producer: tuple[int, int],
        epoch: EpochNumber,
        extra: Sequence[tuple[str, ending.Offsets]],
    ) -> None:
        is_v2 = client.transaction_version() >= 2
        txn = Open(
            transactional_id=self._names.ledger,
            producer_id=producer[0],
            producer_epoch=producer[1],
            is_v2=is_v2,
        )
        entry = {self._topic: {0: (int(epoch), word(self._names.identity.run))}}
        for group, offsets in ((self._names.group, entry), *extra):
            ending.add_offsets(client, txn, group, offsets)
        (answer,) = ending.end(client, [txn], is_commit=True)
        # Whatever it was, the next one begins anew unless this one is known to have gone well.
        self._producer = None
        if isinstance(answer, EpochalError):
            raise answer
        ending.require_going_on(answer.error_code, txn, f"proving epoch {epoch}")
        self._producer = (answer.producer_id, answer.producer_epoch) if is_v2 else producer

    def _groups(self, client: Client) -> list[tuple[Uid, str]]:
        """Every ledger of this pipeline and sink, of whichever uid."""
        listed = {group: self._names.uid_of(group) for group in groups(client)}
        found = {group: uid for group, uid in listed.items() if uid is not None}
        found.setdefault(self._names.group, self._names.identity.uid)
        return [(uid, group) for group, uid in sorted(found.items())]

    def _read(self, client: Client, group: str) -> list[tuple[EpochNumber, str | None]]:
        if client.spoken(OffsetFetchRequest.API_KEY)[1] >= _MANY_GROUPS_FROM:
            wanted = OffsetFetchRequestGroup(group_id=group, topics=None)
            request = OffsetFetchRequest(groups=[wanted])
        else:
            request = OffsetFetchRequest(group_id=group, topics=None)
        answer = client.ask(request, group_coordinator(group), code_of=_code)
        rights.require(_code(answer), group=("Describe", group))
        faults.check(_code(answer), f"reading the ledger {group}")
        topics = answer.groups[0].topics if answer.groups else answer.topics
        for topic in topics:
            for part in topic.partitions:
                if topic.name == self._topic and part.committed_offset >= 0:
                    return [(EpochNumber(part.committed_offset), _run(part.metadata))]
        return []


def _code(answer: OffsetFetchResponse) -> int:
    return answer.groups[0].error_code if answer.groups else answer.error_code


def _run(metadata: str | None) -> str | None:
    try:
        told = json.loads(metadata or "{}")
    except ValueError:
        return None
    run = told.get("run") if isinstance(told, dict) else None
    return run if isinstance(run, str) else None
