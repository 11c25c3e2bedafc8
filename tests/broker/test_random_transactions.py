"""Random sequences of raw transactional requests: the same answers as Apache Kafka's.

A sequence is what clients of several minds send for one transactional id: epochs of now, of before
and of the future, sequences that go on, begin again or jump, ends of both protocols, offsets, and
InitProducerId with and without an expected epoch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from conftest_tools import PROOF_KILLS
from scenarios import Transcript, fresh
from test_like_apache import answers_of_both
from wire import Transaction, fetch, values

from epochal.kafka.client import group_coordinator
from epochal.kafka.cluster import Coordinator
from epochal.kafka.codes import Code
from epochal.kafka.messages import txn_offset_commit as txn_offsets
from epochal.kafka.messages.add_offsets_to_txn import AddOffsetsToTxnRequest

STEPS = 12
SHORT, LONG = 6, 4 * PROOF_KILLS
FIRST = int(os.environ.get("EPOCHAL_FIRST_SEED", "1"))


class Producer:
    """What the clients of one transactional id know, and what they send."""

    def __init__(self, t: Transcript, seed: int) -> None:
        self._t = t
        self._chance = random.Random(seed)
        self._name = fresh()
        self._known: list[Transaction] = [t.begun(self._name)]
        """The newest last."""
        self._group = fresh()
        self._sequences: dict[tuple[int, int], int] = {}
        self._rows = 0
        self._was_unverified = False

    def step(self) -> None:
        actions: Sequence[Callable[[], None]] = (
            self._init,
            self._init_expecting,
            self._add,
            self._produce,
            self._produce,
            self._produce,
            self._offsets,
            self._end,
            self._end,
        )
        self._chance.choice(actions)()
        self._t.say("state", self._t.settle(self._known[-1]))

    def _who(self, *, may_be_next: bool = True) -> Transaction:
        kind = self._chance.random()
        if kind < 0.72:
            return self._known[-1]
        if kind < 0.9 or not may_be_next:
            return self._chance.choice(self._known)
        newest = self._known[-1]
        return Transaction(self._name, newest.producer_id, newest.producer_epoch + 1)

    def _learn(self, answer: Any) -> str:
        if answer.error_code == Code.NONE and answer.producer_id >= 0:
            given = Transaction(self._name, answer.producer_id, answer.producer_epoch)
            is_same = given.producer_id == self._known[-1].producer_id
            self._known.append(given)
            return f"epoch {given.producer_epoch} of {'the same' if is_same else 'a new'} id"
        return ""

    def _init(self) -> None:
        t = self._t
        answer = t.until(lambda: t.init(self._name), lambda a: a.error_code)
        t.say("init", Code(answer.error_code), self._learn(answer))

    def _init_expecting(self) -> None:
        t, who = self._t, self._who()
        pid, epoch = who.producer_id, who.producer_epoch
        answer = t.until(lambda: t.init(self._name, pid=pid, epoch=epoch), lambda a: a.error_code)
        t.say(f"init expecting {epoch}", Code(answer.error_code), self._learn(answer))

    def _add(self) -> None:
        who = self._who()
        self._t.say(f"add {who.producer_epoch}", self._t.added(who))

    def _produce(self) -> None:
        # Not of an epoch that is still to come: Apache Kafka refuses it as we do, and then refuses
        # the next batch of the transaction that is open as well.
        t, who = self._t, self._who(may_be_next=False)
        at = (who.producer_id, who.producer_epoch)
        sequence = self._sequences.get(at, 0)
        if self._chance.random() < 0.2 and not self._was_unverified:
            sequence = self._chance.choice((0, sequence + 3, 5, max(sequence - 1, 0)))
        version = self._chance.choice((11, 12))
        self._rows += 1
        row = b"row %d" % self._rows
        code = t.produced(
            t.batch(row, txn=who, sequence=sequence), name=self._name, version=version
        )
        # Apache Kafka keeps a note of such a batch, and forgets the first sequence's rule by it.
        self._was_unverified |= code is Code.TRANSACTION_ABORTABLE
        if code is Code.NONE:
            self._sequences[at] = sequence + 1
        t.say(f"produce v{version} epoch {who.producer_epoch} sequence {sequence}", code)

    def _offsets(self) -> None:
        t, who = self._t, self._who()
        version = self._chance.choice((3, 5))
        if version == 3:
            asked = AddOffsetsToTxnRequest(
                transactional_id=self._name,
                producer_id=who.producer_id,
                producer_epoch=who.producer_epoch,
                group_id=self._group,
            )
            to = Coordinator(self._name)
            answer = t.until(lambda: t.once(asked, to, 3), lambda a: a.error_code)
            t.say(f"add offsets {who.producer_epoch}", Code(answer.error_code))
        part = txn_offsets.TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=self._rows
        )
        request = txn_offsets.TxnOffsetCommitRequest(
            transactional_id=self._name,
            group_id=self._group,
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            topics=[txn_offsets.TxnOffsetCommitRequestTopic(name=t.topic, partitions=[part])],
        )

        def code_of(answer: Any) -> int:
            return int(answer.topics[0].partitions[0].error_code)

        to_group = group_coordinator(self._group)
        answer = t.until(lambda: t.once(request, to_group, version), code_of)
        t.say(f"commit offsets v{version} {who.producer_epoch}", Code(code_of(answer)))

    def _end(self) -> None:
        t, who = self._t, self._who()
        version = self._chance.choice((4, 5, 5))
        is_commit = self._chance.random() < 0.6
        answer = t.end(who, commit=is_commit, version=version)
        about = f"end v{version} {who.producer_epoch} {'commit' if is_commit else 'abort'}"
        t.say(about, Code(answer.error_code), self._learn(answer))


def sequence_of(seed: int) -> Callable[[Transcript], None]:
    def sequence(t: Transcript) -> None:
        producer = Producer(t, seed)
        for _ in range(STEPS):
            producer.step()
        producer._init()
        found, _ = fetch(t.client, t.topic, committed=True)
        t.say("rows", values(found))

    return sequence


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SHORT))
def test_a_random_sequence_is_answered_as_apache_kafka_does(broker, apache, seed) -> None:
    ours, theirs = answers_of_both(broker.address(), apache.address(), sequence_of(seed))
    assert ours == theirs, f"EPOCHAL_FIRST_SEED={seed}"


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(1_000, 1_000 + LONG))
def test_hundreds_of_random_sequences_agree_to_their_end(broker, apache, seed) -> None:
    ours, theirs = answers_of_both(broker.address(), apache.address(), sequence_of(seed))
    assert ours == theirs, f"seed {seed}"
