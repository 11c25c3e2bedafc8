"""Transactional ids and consumer groups of one sink, and the pool of ids that tasks share.

    <prefix>epochal-<uid>-g<generation>-c<claim>-e<epoch>-s<sink>-p<partition>-t<attempt>
                                                           one attempt, once
    <prefix>epochal-<uid>-s<sink>-g<generation>-c<claim>-slot<n>
                                                           first attempts, from epoch to epoch
    <prefix>epochal-<uid>-s<sink>-ledger                   the driver's own: it claims each epoch
    <prefix>epochal-<uid>-s<sink>-check                    started by `check`, never written to
    <prefix>epochal-<uid>-s<sink>-resend-e<epoch>-<n>      rows sent again from the spool
    <prefix>epochal-ledger-<life>-<uid>                    the ledger: a consumer group
    <prefix>epochal-ledger-<life>-<uid>-claim              which epoch was claimed last: another one
    <prefix>epochal-ledger-<life>-<uid>-resend-p<n>        which rows were sent again: another one

**Why a pool.** Brokers remember a transactional id for a week (transactional.id.expiration.ms). An
id per attempt, with 8 tasks every 10 seconds, would be half a million ids. So the first attempt of
partition n uses slot n, from epoch to epoch. The pool is as large as the last epoch had tasks.

**Why InitProducerId for every transaction.** A broker knows a transaction by producer id and
producer epoch. If two transactions of a slot had the same pair, a late EndTxn of the first would
end the second:

    driver                                               task, on slot 0
    InitProducerId(slot0) → producer 9, epoch 4
                                                         writes epoch 7 as (9, 4)
    decides epoch 7; EndTxn(slot0, 9, 4, commit)
    …the reply is lost, this process stalls; its successor commits (9, 4) as well, and settles 7
    InitProducerId(slot0) → (9, 5)
                                                         writes epoch 8 as (9, 5)
    …the stalled process repeats EndTxn(slot0, 9, 4)     PRODUCER_FENCED; (9, 5) stays open

If epoch 8 were written as (9, 4) too, the last line would commit rows without a decision (I1). In
the newer transaction protocol the broker raises the epoch at every EndTxn and returns it, so the
next transaction needs no InitProducerId of its own: `SlotPool.ended` keeps the pair.

**Why a retry takes a fresh id.** Attempt 0 of a task can still be running, or its receipt may win,
when attempt 1 starts. InitProducerId on the same id would abort attempt 0's transaction, which a
decision may name; writing with the same pair would put the rows of both attempts into one
transaction, and a commit would show them twice (I6). So only the attempt that is marked as the
first (`Task.is_first`) uses the slot; every other uses an id made of its own handle, once.

**Why generation and claim are part of a slot's name.** A stalled driver of generation 1 that wakes
up runs InitProducerId on its pool. Under shared names that would abort what the tasks of generation
2 have prepared; so it only reaches slots of its own. Two drivers with copies of one log have the
same generation, and different claims.

**What is never started again.** A slot whose transaction an unsettled decision names: it is left
out of the pool (`held`) until that epoch is settled, and its task takes a fresh id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from epochal.errors import EpochalError
from epochal.kafka.client import Client
from epochal.kafka.codes import Code
from epochal.kafka.messages.end_txn import EndTxnResponse
from epochal.sinks.kafka.receipts import OpenTransaction
from epochal.sinks.kafka.transactions import ProducerStart, start_producers
from epochal.terms import Claim, Generation, Handle, Identity, Receipt, Uid, handle_prefix

_SLOTS_MAX = 1024
_SLOT = re.compile(
    r"epochal-(?P<uid>[a-z2-7]{12})-s(?P<sink>[0-9a-f]{8})-g(?P<generation>\d{1,10})"
    r"-c(?P<claim>[a-z2-7]{8})-slot(?P<slot>\d{1,7})"
)
_LIFE_DIGITS = 16
_RESEND = "-resend-p"
_CLAIM = "-claim"


@dataclass(frozen=True, slots=True)
class Slot:
    """One id of a driver's pool."""

    generation: Generation
    claim: Claim
    number: int


@dataclass(frozen=True, slots=True)
class TransactionalIds:
    """All names that one sink of one pipeline uses at a cluster."""

    prefix: str
    identity: Identity

    @property
    def prefix_of_pipeline(self) -> str:
        """Of every transactional id of the pipeline, also of its other sinks."""
        return self.prefix + handle_prefix(self.identity.uid)

    @property
    def _prefix_of_sink(self) -> str:
        return f"{self.prefix_of_pipeline}s{self.identity.tag}"

    def slot(self, number: int) -> str:
        who = self.identity
        return f"{self._prefix_of_sink}-g{who.generation}-c{who.claim}-slot{number}"

    @property
    def ledger(self) -> str:
        return f"{self._prefix_of_sink}-ledger"

    @property
    def check(self) -> str:
        return f"{self._prefix_of_sink}-check"

    def resend(self, epoch: int, number: int) -> str:
        return f"{self._prefix_of_sink}-resend-e{epoch}-{number}"

    @property
    def group(self) -> str:
        """The consumer group that is the ledger of this uid."""
        return f"{self._prefix_of_ledgers}{self.identity.uid}"

    @property
    def claim_group(self) -> str:
        """The consumer group that has the newest claimed epoch of this uid."""
        return f"{self.group}{_CLAIM}"

    def resend_group(self, partition: int) -> str:
        return f"{self.group}{_RESEND}{partition}"

    @property
    def _prefix_of_ledgers(self) -> str:
        """Of the ledgers of this pipeline and sink, under any uid: see I10."""
        named = f"{self.identity.pipeline}\0{self.identity.sink}".encode()
        return f"{self.prefix}epochal-ledger-{hashlib.sha256(named).hexdigest()[:_LIFE_DIGITS]}-"

    def uid_of(self, group: str) -> Uid | None:
        """The uid whose ledger a group is; None where it is no ledger of this pipeline and sink."""
        found = group.removeprefix(self._prefix_of_ledgers)
        is_ours = found != group and re.fullmatch(r"[a-z2-7]{12}", found)
        return Uid(found) if is_ours else None

    def is_own_group(self, group: str) -> bool:
        """Whether a group is the ledger of this uid, or has its claims or what it sent again."""
        is_named = group in (self.group, self.claim_group)
        return is_named or group.startswith(f"{self.group}{_RESEND}")

    def has(self, transactional_id: str) -> bool:
        """Whether an id belongs to this very sink, whatever it is used for."""
        is_named = transactional_id.startswith(f"{self._prefix_of_sink}-")
        return is_named or self.parse(transactional_id) is not None

    def parse(self, transactional_id: str) -> Handle | Slot | None:
        """The attempt or slot of this very sink that an id names; None for any other id."""
        text = transactional_id.removeprefix(self.prefix)
        handle = Handle.parse(text)
        if handle is not None:
            is_mine = (handle.uid, handle.sink) == (self.identity.uid, self.identity.tag)
            return handle if is_mine else None
        found = _SLOT.fullmatch(text)
        if found is None or (found["uid"], found["sink"]) != (self.identity.uid, self.identity.tag):
            return None
        generation, claim = Generation(int(found["generation"])), Claim(found["claim"])
        return Slot(generation, claim, int(found["slot"]))


def slot_id(prefix: str, handle: Handle) -> str:
    """The slot of a task's partition, as `TransactionalIds.slot` names it on the driver."""
    of_sink = f"{prefix}{handle_prefix(handle.uid)}s{handle.sink}"
    return f"{of_sink}-g{handle.generation}-c{handle.claim}-slot{handle.partition}"


class SlotPool:
    """The slots of one driver. As many as the last epoch had tasks; none in the first epoch."""

    def __init__(self, ids: TransactionalIds) -> None:
        self._ids = ids
        self._size = 0
        self._unused: dict[int, tuple[int, int]] = {}
        """Slots with a producer epoch that no task has been given yet."""

    def ready(
        self, client: Client, *, timeout_ms: int, held: Collection[str]
    ) -> Mapping[int, tuple[int, int]]:
        """A new producer id and epoch for each slot that is not held; failed ones are left out."""
        found, self._unused = self._unused, {}
        missing = [
            number
            for number in range(self._size)
            if number not in found and self._ids.slot(number) not in held
        ]
        starts = [
            ProducerStart(transactional_id=self._ids.slot(number), timeout_ms=timeout_ms)
            for number in missing
        ]
        answers = start_producers(client, starts) if starts else []
        for number, answer in zip(missing, answers, strict=True):
            if not isinstance(answer, EpochalError) and answer.error_code == Code.NONE:
                found[number] = (answer.producer_id, answer.producer_epoch)
        return {number: found[number] for number in sorted(found)}

    def fit(self, receipts: Sequence[Receipt]) -> None:
        """Take the size of the pool from the tasks of an epoch."""
        if receipts:
            most = 1 + max(receipt.handle.partition for receipt in receipts)
            self._size = min(most, _SLOTS_MAX)

    def ended(self, txn: OpenTransaction, answer: EndTxnResponse) -> None:
        """Keep the producer epoch that the newer protocol returns with an acknowledged commit."""
        named = self._ids.parse(txn.transactional_id)
        is_mine = isinstance(named, Slot) and named.claim == self._ids.identity.claim
        if is_mine and txn.is_v2 and answer.producer_id >= 0 and isinstance(named, Slot):
            self._unused[named.number] = (answer.producer_id, answer.producer_epoch)

    def forget(self) -> None:
        """Run InitProducerId on every slot before it is used again."""
        self._unused.clear()
