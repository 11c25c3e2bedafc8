"""The ledger: a consumer group whose committed offset is the newest epoch that is proven.

Every transaction of an epoch commits the epoch's number to the group, under partition 0 of the
sink's topic, so rows and proof become visible in one act:

    task 0: rows, rows, TxnOffsetCommit(group, 7)   ┐
    task 1: rows, TxnOffsetCommit(group, 7)         ┘ EndTxn of each; the group is then at 7

Before it ends the first of them, the driver claims the epoch: it writes the number, with the claim
of the epoch's handles, to another group, in a transaction of its own. The id of that is the same
for all drivers of the pipeline, and InitProducerId on it fences the others. So what is read after
it can't be changed by a driver that wakes up late, nor by one that works with a copy of the log:

    driver A: InitProducerId(ledger) → (20, 3)      …stalls before it claims 7
    driver B: InitProducerId(ledger) → (20, 4); reads 6; claims 7 as x9…; ends its transactions
    driver A: claims 7 as (20, 3)                   PRODUCER_FENCED
    driver A: InitProducerId(ledger) → (20, 5); reads 7 by x9…

Are the handles of A's own decision of that claim? Then B carried the same decision out. Otherwise
B has a copy of the log: A ends none of its transactions, and the rows of 7 are in the topic once.

An epoch without rows has no other transaction (I8): its claim is its proof.

Brokers forget a group some time after its last commit (offsets.retention.minutes, a week by
default); from then on it proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from epochal.errors import TryAgain
from epochal.kafka.client import Client, group_coordinator
from epochal.kafka.errors import require_ok
from epochal.kafka.messages.list_groups import ListGroupsRequest
from epochal.kafka.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
)
from epochal.sinks.kafka.errors import TopicGone, TransactionEnded, require_rights
from epochal.sinks.kafka.receipts import OpenTransaction
from epochal.sinks.kafka.transactional_ids import TransactionalIds
from epochal.sinks.kafka.transactions import GroupOffsets, add_offsets, commit_one, start_one
from epochal.terms import Claim, EpochNumber, Mark, Receipt, Uid, claims_of, owner_of

_ATTEMPTS_MAX = 5
_MANY_GROUPS_FROM = 8
"""The version of OffsetFetch that takes a list of groups."""


def ledger_entry(topic: str, epoch: EpochNumber, metadata: str) -> GroupOffsets:
    return {topic: {0: (int(epoch), metadata)}}


def ledger_metadata(run: str | None) -> str:
    """Committed together with the number: which run the epoch belongs to."""
    return json.dumps({"run": run})


def groups(client: Client) -> set[str]:
    """Every consumer group that this principal may see; each broker lists its own."""
    answers = client.ask_every_broker(ListGroupsRequest(), "listing groups")
    return {group.group_id for answer in answers for group in answer.groups}


class Ledger:
    def __init__(self, ids: TransactionalIds, topic: str) -> None:
        self._ids = ids
        self._topic = topic
        self._producer: tuple[int, int] | None = None
        self._claimed: tuple[EpochNumber, str] | None = None
        """As read or written under `_producer`: until that is fenced, by nobody else."""

    def newest(self, client: Client) -> list[Mark]:
        """The newest epoch per uid of this pipeline and sink, as far as brokers remember."""
        return [
            Mark(uid=uid, epoch=epoch, run=run)
            for uid, group in self._groups(client)
            for epoch, run in self._read(client, group)
        ]

    def owner(self, client: Client, epoch: EpochNumber) -> str | None:
        """The claim under which an epoch is carried out; None where it is not the newest."""
        claimed = self._read_claim(client)
        return claimed[1] if claimed is not None and claimed[0] == epoch else None

    def at(self, client: Client, group: str) -> EpochNumber | None:
        """The epoch that is committed to a group."""
        found = self._read(client, group)
        return found[0][0] if found else None

    def ready(self, client: Client, timeout_ms: int) -> tuple[int, int]:
        """
        The producer of the driver's own transaction. Asked before the decision too: that the
        brokers refuse this id or this timeout must not come out after it (I3).
        """
        if self._producer is None:
            self._producer = start_one(client, self._ids.ledger, timeout_ms)
            self._claimed = self._read_claim(client)
        return self._producer

    def claim(
        self,
        client: Client,
        epoch: EpochNumber,
        receipts: Sequence[Receipt],
        proves: Sequence[tuple[str, GroupOffsets]] = (),
        *,
        timeout_ms: int,
    ) -> bool:
        """
        Claim an epoch for these receipts, with what else is to be committed in one transaction.
        False where it is claimed for others, or a later one is.
        """
        mine, decided = owner_of(receipts, self._ids.identity), claims_of(receipts)
        for _ in range(_ATTEMPTS_MAX):
            try:
                producer = self.ready(client, timeout_ms)
                number, owner = self._claimed or (-1, "")
                if number > epoch or (number == epoch and owner not in {*decided} - {mine}):
                    return number == epoch and (owner == mine or not receipts)
                self._write(client, producer, epoch, mine, proves)
            except TransactionEnded:
                self._producer = None
            except TopicGone:
                # No reader sees rows of a topic that is gone: there is nothing to exclude. The
                # transaction that was begun is aborted by starting its id again.
                self._producer = None
                self.ready(client, timeout_ms)
                return True
            else:
                self._claimed = (epoch, mine)
                return True
        raise TryAgain(
            f"the ledger of epoch {epoch} can't be written: another driver fences it every time"
        )

    def _write(
        self,
        client: Client,
        producer: tuple[int, int],
        epoch: EpochNumber,
        claim: Claim,
        proves: Sequence[tuple[str, GroupOffsets]],
    ) -> None:
        is_v2 = client.transaction_version() >= 2
        txn = OpenTransaction(
            transactional_id=self._ids.ledger,
            producer_id=producer[0],
            producer_epoch=producer[1],
            is_v2=is_v2,
        )
        entry = ledger_entry(self._topic, epoch, claim)
        for group, offsets in ((self._ids.claim_group, entry), *proves):
            add_offsets(client, txn, group, offsets)
        # Kept for the next epoch only if this commit is acknowledged.
        self._producer = None
        answer = commit_one(client, txn, f"claiming epoch {epoch}")
        self._producer = (answer.producer_id, answer.producer_epoch) if is_v2 else producer

    def _groups(self, client: Client) -> list[tuple[Uid, str]]:
        """Every ledger of this pipeline and sink, under any uid."""
        listed = {group: self._ids.uid_of(group) for group in groups(client)}
        found = {group: uid for group, uid in listed.items() if uid is not None}
        found.setdefault(self._ids.group, self._ids.identity.uid)
        return [(uid, group) for group, uid in sorted(found.items())]

    def _read_claim(self, client: Client) -> tuple[EpochNumber, str] | None:
        found = self._committed(client, self._ids.claim_group)
        return None if found is None else (found[0], found[1] or "")

    def _read(self, client: Client, group: str) -> list[tuple[EpochNumber, str | None]]:
        found = self._committed(client, group)
        return [] if found is None else [(found[0], _run(found[1]))]

    def _committed(self, client: Client, group: str) -> tuple[EpochNumber, str | None] | None:
        """The number that is committed to a group, and its metadata."""
        if client.supported_versions(OffsetFetchRequest.API_KEY)[1] >= _MANY_GROUPS_FROM:
            wanted = OffsetFetchRequestGroup(group_id=group, topics=None)
            request = OffsetFetchRequest(groups=[wanted])
        else:
            request = OffsetFetchRequest(group_id=group, topics=None)
        answer = client.ask(request, group_coordinator(group), code_of=_code)
        require_rights(_code(answer), group=("Describe", group))
        require_ok(_code(answer), f"reading the ledger {group}")
        topics = answer.groups[0].topics if answer.groups else answer.topics
        for topic in topics:
            for part in topic.partitions:
                if topic.name == self._topic and part.committed_offset >= 0:
                    return EpochNumber(part.committed_offset), part.metadata
        return None


def _code(answer: OffsetFetchResponse) -> int:
    return answer.groups[0].error_code if answer.groups else answer.error_code


def _run(metadata: str | None) -> str | None:
    try:
        known = json.loads(metadata or "{}")
    except ValueError:
        return None
    run = known.get("run") if isinstance(known, dict) else None
    return run if isinstance(run, str) else None
