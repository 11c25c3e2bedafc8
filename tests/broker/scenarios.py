"""Conversations with a broker, written as lines: the same lines from ours and from Apache Kafka.

Producer ids, offsets of time and member ids differ between brokers and are left out; error codes,
epochs, offsets and states are not.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable
from typing import Any

import google_crc32c
import pyarrow as pa
from wire import Transaction, fetch, values

from epochal.errors import TryAgain
from epochal.kafka import batches, errors
from epochal.kafka.batches import Columns, Producer
from epochal.kafka.client import Ask, Client, group_coordinator
from epochal.kafka.cluster import Controller, Coordinator, Leader
from epochal.kafka.codes import Code
from epochal.kafka.compression import Compression
from epochal.kafka.messages import add_partitions_to_txn as addp
from epochal.kafka.messages import (
    alter_partition_reassignments,
    alter_replica_log_dirs,
    create_acls,
    create_topics,
    delete_records,
    describe_acls,
    describe_client_quotas,
    describe_cluster,
    describe_log_dirs,
    describe_topic_partitions,
    describe_user_scram_credentials,
    elect_leaders,
    join_group,
    list_offsets,
    list_partition_reassignments,
    metadata,
    offset_delete,
)
from epochal.kafka.messages import fetch as fetching
from epochal.kafka.messages import offset_commit as committing
from epochal.kafka.messages import offset_fetch as offsets
from epochal.kafka.messages import produce as producing
from epochal.kafka.messages import txn_offset_commit as txn_offsets
from epochal.kafka.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from epochal.kafka.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from epochal.kafka.messages.delete_groups import DeleteGroupsRequest
from epochal.kafka.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from epochal.kafka.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from epochal.kafka.messages.describe_groups import DescribeGroupsRequest
from epochal.kafka.messages.describe_producers import DescribeProducersRequest, TopicRequest
from epochal.kafka.messages.describe_transactions import DescribeTransactionsRequest
from epochal.kafka.messages.end_txn import EndTxnRequest
from epochal.kafka.messages.heartbeat import HeartbeatRequest
from epochal.kafka.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.leave_group import LeaveGroupRequest, MemberIdentity
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment

NOW_MS = int(time.time() * 1000)
"""Not a fixed time: records older than a week are deleted by any broker, sooner or later."""


class Transcript:
    """Asks, and writes down what came back."""

    def __init__(self, client: Client, topic: str) -> None:
        self.client = client
        self.topic = topic
        self.lines: list[str] = []

    def say(self, about: str, *values: object) -> None:
        shown = [errors.code_name(one) if isinstance(one, Code) else str(one) for one in values]
        self.lines.append(f"{about}: {' '.join(shown)}")

    def once(self, request: Any, to: Any, version: int | None = None) -> Any:
        ask: Ask[Any] = Ask(request=request, to=to, version_max=version)
        for _ in range(600):
            try:
                pending = self.client.submit(ask)
            except TryAgain:  # who is in charge is not known yet
                time.sleep(0.05)
            else:
                return pending.result()
        raise AssertionError(f"nobody is in charge of {to}")

    def warm_up(self) -> None:
        """A new topic, and the first look for a coordinator, take a moment to be known."""
        part = list_offsets.ListOffsetsPartition(partition_index=0, timestamp=-1)
        request = list_offsets.ListOffsetsRequest(
            replica_id=-1,
            topics=[list_offsets.ListOffsetsTopic(name=self.topic, partitions=[part])],
        )
        self.client.ask(
            request,
            Leader(self.topic, 0),
            code_of=lambda answer: answer.topics[0].partitions[0].error_code,
        )
        self.client.ask(DescribeGroupsRequest(groups=["nobody"]), group_coordinator("nobody"))
        time.sleep(0.2)

    def until(self, ask: Callable[[], Any], code_of: Callable[[Any], int]) -> Any:
        """Again while the coordinator is busy or not there yet."""
        deadline = time.monotonic() + 60
        while True:
            answer = ask()
            if not errors.is_transient(code_of(answer)) or time.monotonic() > deadline:
                return answer
            time.sleep(0.05)

    def listed(self, timestamp: int, isolation: int = 0) -> None:
        part = list_offsets.ListOffsetsPartition(partition_index=0, timestamp=timestamp)
        request = list_offsets.ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=[list_offsets.ListOffsetsTopic(name=self.topic, partitions=[part])],
        )
        (response,) = self.once(request, Leader(self.topic, 0), 8).topics[0].partitions
        self.say(f"at {timestamp}", Code(response.error_code), response.offset, response.timestamp)

    def delete(self, offset: int) -> None:
        part = delete_records.DeleteRecordsPartition(partition_index=0, offset=offset)
        topic = delete_records.DeleteRecordsTopic(name=self.topic, partitions=[part])
        request = delete_records.DeleteRecordsRequest(topics=[topic], timeout_ms=5_000)
        (response,) = self.once(request, Leader(self.topic, 0)).topics[0].partitions
        self.say(f"delete to {offset}", Code(response.error_code), response.low_watermark)

    # Transactions

    def init(
        self, name: str | None, *, timeout_ms: int = 60_000, pid: int = -1, epoch: int = -1
    ) -> Any:
        request = InitProducerIdRequest(
            transactional_id=name,
            transaction_timeout_ms=timeout_ms,
            producer_id=pid,
            producer_epoch=epoch,
        )
        return self.once(request, Coordinator(name or "nobody"))

    def begun(self, name: str, **options: Any) -> Transaction:
        answer = self.until(lambda: self.init(name, **options), lambda a: a.error_code)
        assert answer.error_code == 0, answer
        return Transaction(name, answer.producer_id, answer.producer_epoch)

    def add(self, txn: Transaction, *places: tuple[str, int], version: int = 3) -> list[Code]:
        topics: dict[str, list[int]] = {}
        for topic, partition in places or ((self.topic, 0),):
            topics.setdefault(topic, []).append(partition)
        request = addp.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=txn.transactional_id,
            v3_and_below_producer_id=txn.producer_id,
            v3_and_below_producer_epoch=txn.producer_epoch,
            v3_and_below_topics=[
                addp.AddPartitionsToTxnTopic(name=name, partitions=parts)
                for name, parts in topics.items()
            ],
        )
        answer = self.once(request, Coordinator(txn.transactional_id), version)
        found = {
            (topic.name, part.partition_index): Code(part.partition_error_code)
            for topic in answer.results_by_topic_v3_and_below
            for part in topic.results_by_partition
        }
        return [found[place] for place in places or ((self.topic, 0),)]

    def added(self, txn: Transaction, version: int = 3) -> Code:
        return self.until(lambda: self.add(txn, version=version), lambda codes: codes[0])[0]

    def end(self, txn: Transaction, *, commit: bool, version: int) -> Any:
        request = EndTxnRequest(
            transactional_id=txn.transactional_id,
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            committed=commit,
        )
        to = Coordinator(txn.transactional_id)
        return self.until(lambda: self.once(request, to, version), lambda a: a.error_code)

    def ended(self, txn: Transaction, *, commit: bool, version: int) -> Code:
        return Code(self.end(txn, commit=commit, version=version).error_code)

    def settle(self, txn: Transaction) -> str:
        """Wait until markers are written; the state and epoch then."""
        request = DescribeTransactionsRequest(transactional_ids=[txn.transactional_id])
        for _ in range(200):
            (response,) = self.once(request, Coordinator(txn.transactional_id)).transaction_states
            if not response.transaction_state.startswith("Prepare"):
                break
            time.sleep(0.05)
        return f"{response.transaction_state} epoch {response.producer_epoch}"

    # Records

    def batch(
        self,
        *rows: bytes,
        txn: Transaction | None = None,
        sequence: int = 0,
        is_transactional: bool = True,
        timestamp_ms: int = NOW_MS,
    ) -> bytes:
        who = batches.ANYBODY
        if txn is not None:
            who = Producer(
                producer_id=txn.producer_id,
                producer_epoch=txn.producer_epoch,
                base_sequence=sequence,
                is_transactional=is_transactional,
            )
        columns = Columns(value=pa.array(list(rows) or [b"row"], pa.binary()))
        return b"".join(batches.encode(columns, default_timestamp_ms=timestamp_ms, producer=who))

    def produce(
        self,
        records: bytes | None,
        *,
        name: str | None = None,
        version: int | None = 11,
        acks: int = -1,
        topic: str | None = None,
        partition: int = 0,
    ) -> Any:
        part = producing.PartitionProduceData(index=partition, records=records)
        request = producing.ProduceRequest(
            transactional_id=name,
            acks=acks,
            timeout_ms=10_000,
            topic_data=[
                producing.TopicProduceData(name=topic or self.topic, partition_data=[part])
            ],
        )
        answer = self.once(request, Leader(self.topic, 0), version)
        return answer.responses[0].partition_responses[0]

    def produced(self, records: bytes | None, **options: Any) -> Code:
        def ask() -> Any:
            return self.produce(records, **options)

        answer = ask()
        for _ in range(100):
            # What a client of this version asks again while a marker is being written.
            if answer.error_code not in (Code.CONCURRENT_TRANSACTIONS, Code.NOT_ENOUGH_REPLICAS):
                break
            time.sleep(0.05)
            answer = ask()
        return Code(answer.error_code)


def fresh() -> str:
    return f"txn-{uuid.uuid4().hex[:12]}"


def ends_of_a_transaction(t: Transcript) -> None:
    for version in (0, 1, 2, 3, 4, 5):

        def opened(version: int = version) -> Transaction:
            txn = t.begun(fresh())
            assert t.added(txn) == Code.NONE
            assert t.produced(t.batch(txn=txn), name=txn.transactional_id) == Code.NONE
            return txn

        for commit in (True, False):
            txn = opened()
            t.say(f"v{version} end {commit}", t.ended(txn, commit=commit, version=version))
            t.say("state", t.settle(txn))
            t.say("again", t.ended(txn, commit=commit, version=version))
            t.say("otherwise", t.ended(txn, commit=not commit, version=version))
            t.say("state", t.settle(txn))
        txn = t.begun(fresh())
        for commit in (True, False):
            t.say(f"v{version} empty {commit}", t.ended(txn, commit=commit, version=version))
        t.say("state", t.settle(txn))
        txn = opened()
        wrong_id = Transaction(txn.transactional_id, txn.producer_id + 1, txn.producer_epoch)
        wrong_epoch = Transaction(txn.transactional_id, txn.producer_id, txn.producer_epoch + 5)
        nobody = Transaction(fresh(), 1, 0)
        unnamed = Transaction("", 1, 0)
        for about, who in (("pid", wrong_id), ("epoch", wrong_epoch), ("unknown", nobody)):
            t.say(f"v{version} wrong {about}", t.ended(who, commit=True, version=version))
        if version >= 2:
            t.say("no id", t.ended(unnamed, commit=True, version=version))
        newer = t.begun(txn.transactional_id)
        t.say("epochs", newer.producer_epoch - txn.producer_epoch)
        t.say(f"v{version} fenced", t.ended(txn, commit=True, version=version))
        assert t.added(newer) == Code.NONE
        t.say(f"v{version} of a zombie", t.ended(txn, commit=False, version=version))
        t.say("state", t.settle(newer))


def epochs_by_protocol(t: Transcript) -> None:
    name = fresh()
    txn = t.begun(name)
    for number in range(3):
        records = t.batch(b"newer %d" % number, txn=txn)
        t.say("produce v12", t.produced(records, name=name, version=12))
        answer = t.end(txn, commit=number != 1, version=5)
        t.say("end v5", Code(answer.error_code), "epoch", answer.producer_epoch)
        txn = Transaction(name, answer.producer_id, answer.producer_epoch)
        t.say("state", t.settle(txn))
    again = t.begun(name)
    t.say("init", again.producer_epoch)
    # Sequences go on over transactions of the older protocol, and start again with the newer one's.
    for number in range(2):
        assert t.added(again) == Code.NONE
        records = t.batch(b"older", txn=again, sequence=number)
        t.say("produce v11", t.produced(records, name=name))
        t.say("end v4", t.ended(again, commit=True, version=4))
        t.say("state", t.settle(again))
    found, _ = fetch(t.client, t.topic, committed=True)
    t.say("rows", values(found))
    t.say("epochs of markers", [b.producer_epoch for b in found if b.is_control])


def names_of_producers(t: Transcript) -> None:
    for timeout_ms in (0, -1, 900_000, 900_001):
        t.say(f"timeout {timeout_ms}", Code(t.init(fresh(), timeout_ms=timeout_ms).error_code))
    t.say("empty id", Code(t.init("").error_code))
    idempotent = t.init(None)
    t.say("no id", Code(idempotent.error_code), idempotent.producer_epoch)
    name = fresh()
    txn = t.begun(name)
    t.say("first", txn.producer_epoch)
    for about, pid, epoch in (
        ("same", txn.producer_id, txn.producer_epoch),
        ("repeated", txn.producer_id, txn.producer_epoch),
        ("newest", txn.producer_id, txn.producer_epoch + 1),
        ("too old", txn.producer_id, txn.producer_epoch),
        ("of the future", txn.producer_id, 77),
        ("other pid", txn.producer_id + 1000, 0),
        ("no epoch", txn.producer_id, -1),
        ("no pid", -1, 0),
    ):
        answer = t.init(name, pid=pid, epoch=epoch)
        t.say(f"init {about}", Code(answer.error_code), answer.producer_epoch)
    unknown = t.until(lambda: t.init(fresh(), pid=5, epoch=3), lambda a: a.error_code)
    t.say("unknown id with epoch", Code(unknown.error_code), unknown.producer_epoch)


def going_on_after_a_timeout(t: Transcript) -> None:
    name = fresh()
    txn = t.begun(name, timeout_ms=4_000)
    t.say("produce v12", t.produced(t.batch(txn=txn), name=name, version=12))
    for _ in range(600):
        state = t.settle(txn)
        if not state.startswith("Ongoing"):
            break
        time.sleep(0.05)
    t.say("state", state)
    pid, epoch = txn.producer_id, txn.producer_epoch
    for about in ("the first time", "again"):
        answer = t.until(lambda: t.init(name, pid=pid, epoch=epoch), lambda a: a.error_code)
        t.say(f"init {about}", Code(answer.error_code), answer.producer_epoch)
        t.say("state", t.settle(txn))


def fencing_an_open_transaction(t: Transcript) -> None:
    for version in (4, 5):
        name = fresh()
        txn = t.begun(name)
        assert t.added(txn) == Code.NONE
        assert t.produced(t.batch(txn=txn), name=name) == Code.NONE
        t.say("init over an open one", Code(t.init(name).error_code))
        t.say("state", t.settle(txn))
        t.say(f"commit v{version} before the next init", t.ended(txn, commit=True, version=version))
        t.say("produce", t.produced(t.batch(txn=txn, sequence=1), name=name))
        t.say("add", *t.add(txn))
        newer = t.begun(name)
        t.say("epoch", newer.producer_epoch)
        t.say(f"commit v{version} after it", t.ended(txn, commit=True, version=version))
        t.say("produce", t.produced(t.batch(txn=txn, sequence=1), name=name))
        t.say("add v0", *t.add(txn, version=0))
        t.say("add v3", *t.add(txn, version=3))
        t.say("produce v12", t.produced(t.batch(txn=txn, sequence=1), name=name, version=12))
        t.say("of the newer", t.produced(t.batch(b"n", txn=newer), name=name, version=12))
        t.say("state", t.settle(newer))


def timeouts(t: Transcript) -> None:
    opened = []
    for version in (3, 5):
        name = fresh()
        txn = t.begun(name, timeout_ms=5_000)
        assert t.added(txn) == Code.NONE
        assert t.produced(t.batch(txn=txn), name=name) == Code.NONE
        opened.append((version, name, txn))
    for version, name, txn in opened:
        for _ in range(600):
            if t.settle(txn).startswith("CompleteAbort"):
                break
            time.sleep(0.05)
        t.say("state", t.settle(txn))
        t.say("produce", t.produced(t.batch(txn=txn, sequence=1), name=name))
        t.say("produce v12", t.produced(t.batch(txn=txn, sequence=1), name=name, version=12))
        t.say("add", *t.add(txn))
        t.say(f"commit v{version}", t.ended(txn, commit=True, version=version))
        t.say(f"abort v{version}", t.ended(txn, commit=False, version=version))
        t.say("next", t.begun(name).producer_epoch)


def adding_partitions(t: Transcript) -> None:
    txn = t.begun(fresh())
    t.say("unknown topic", *t.add(txn, (t.topic, 0), ("nowhere", 0), (t.topic, 99)))
    t.say("state", t.settle(txn))
    t.say("known", t.added(txn))
    t.say("again", t.added(txn))
    wrong_pid = Transaction(txn.transactional_id, txn.producer_id + 1, txn.producer_epoch)
    wrong_epoch = Transaction(txn.transactional_id, txn.producer_id, 9)
    for version in (0, 1, 2, 3):
        t.say(f"v{version} wrong pid", *t.add(wrong_pid, version=version))
        t.say(f"v{version} wrong epoch", *t.add(wrong_epoch, version=version))
        nobody = Transaction(fresh(), 1, 0)
        t.say(f"v{version} unknown id", *t.add(nobody, version=version))
    t.say("no id", *t.add(Transaction("", 1, 0)))


def sequences(t: Transcript) -> None:
    pid = t.init(None).producer_id
    one = Transaction("", pid, 0)

    def send(about: str, sequence: int, *rows: bytes, who: Transaction = one) -> None:
        records = t.batch(*(rows or (b"x",)), txn=who, sequence=sequence, is_transactional=False)
        answer = t.produce(records)
        t.say(about, Code(answer.error_code), answer.base_offset)

    send("first", 0)
    send("second", 1, b"a", b"b")
    send("second again", 1, b"a", b"b")
    send("other content", 1, b"c", b"d")
    send("other length", 1, b"a")
    send("gap", 5)
    send("older", 0)
    for number in range(3, 10):
        send("next", number)
    send("too old a duplicate", 0)
    send("fifth newest again", 5)
    older = Transaction("", pid, 0)
    newer = Transaction("", pid, 1)
    send("new epoch, not at zero", 4, who=newer)
    send("new epoch", 0, who=newer)
    send("old epoch", 10, who=older)
    unknown = Transaction("", t.init(None).producer_id, 0)
    send("unknown producer, not at zero", 7, who=unknown)
    send("unknown producer goes on", 8, who=unknown)
    send("unknown producer, gap", 10, who=unknown)
    wrapping = Transaction("", t.init(None).producer_id, 0)
    send("near the end of numbers", (1 << 31) - 2, b"a", b"b", who=wrapping)
    send("and on from zero", 0, who=wrapping)


def broken_batches(t: Transcript) -> None:
    good = t.batch(b"fine")
    crc = bytearray(good)
    crc[-1] ^= 1
    t.say("bad checksum", t.produced(bytes(crc)))
    t.say("nothing", t.produced(b""))
    t.say("two batches", t.produced(good + good))
    t.say("cut", t.produced(good[:-3]))
    t.say("too large", t.produced(t.batch(b"x" * 1_100_000)))
    magic = bytearray(good)
    magic[16] = 1
    t.say("older format", t.produced(bytes(magic)))
    t.say("control", t.produced(_with_attributes(good, 0x20)))
    t.say("unknown topic", t.produced(good, topic="nowhere"))
    t.say("unknown partition", t.produced(good, partition=99))
    t.say("acks 2", t.produced(good, acks=2))
    t.say("far future", t.produced(t.batch(timestamp_ms=int(time.time() * 1000) + 9_000_000)))
    counted = bytearray(good)
    struct.pack_into(">i", counted, 57, 7)
    t.say("wrong count", t.produced(_sealed(counted)))
    t.say("fine", t.produced(good))


def _with_attributes(batch: bytes, bits: int) -> bytes:
    changed = bytearray(batch)
    struct.pack_into(">h", changed, 21, bits)
    return _sealed(changed)


def _sealed(batch: bytearray) -> bytes:
    struct.pack_into(">I", batch, 17, google_crc32c.value(bytes(batch[21:])))
    return bytes(batch)


def writing_without_a_transaction(t: Transcript) -> None:
    name = fresh()
    txn = t.begun(name)
    for version in (8, 10, 11):
        t.say(f"v{version} not added", t.produced(t.batch(txn=txn), name=name, version=version))
    t.say("no transactional id", t.produced(t.batch(txn=txn)))
    wrong = Transaction(name, txn.producer_id + 1000, 0)
    nobody = Transaction(fresh(), txn.producer_id, 0)
    for version in (11, 12):
        t.say(f"v{version} other pid", t.produced(t.batch(txn=wrong), name=name, version=version))
        who = nobody.transactional_id
        t.say(f"v{version} unknown id", t.produced(t.batch(txn=nobody), name=who, version=version))
        old = Transaction(name, txn.producer_id, txn.producer_epoch + 3)
        t.say(f"v{version} other epoch", t.produced(t.batch(txn=old), name=name, version=version))
    assert t.added(txn) == Code.NONE
    t.say("added", t.produced(t.batch(txn=txn), name=name))
    plain = t.batch(txn=txn, sequence=1, is_transactional=False)
    t.say("plain within", t.produced(plain))
    t.say("gap within", t.produced(t.batch(txn=txn, sequence=5), name=name))
    t.say("end", t.ended(txn, commit=True, version=4))
    t.say("state", t.settle(txn))
    t.say("after the end", t.produced(t.batch(txn=txn, sequence=1), name=name, version=11))
    t.say("duplicate after the end", t.produced(t.batch(txn=txn), name=name, version=11))


def offsets_in_transactions(t: Transcript) -> None:
    group = f"group-{uuid.uuid4().hex[:8]}"

    def commit(
        txn: Transaction, version: int, *, topic: str | None = None, generation: int = -1
    ) -> Code:
        part = txn_offsets.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=4)
        request = txn_offsets.TxnOffsetCommitRequest(
            transactional_id=txn.transactional_id,
            group_id=group,
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            generation_id=generation,
            member_id="nobody" if generation >= 0 else "",
            topics=[
                txn_offsets.TxnOffsetCommitRequestTopic(name=topic or t.topic, partitions=[part])
            ],
        )

        def ask() -> Any:
            return t.once(request, group_coordinator(group), version)

        answer = t.until(ask, lambda a: 0 if topic else a.topics[0].partitions[0].error_code)
        return Code(answer.topics[0].partitions[0].error_code)

    def stable() -> tuple[Code, int]:
        asked = offsets.OffsetFetchRequest(
            groups=[
                offsets.OffsetFetchRequestGroup(
                    group_id=group,
                    topics=[offsets.OffsetFetchRequestTopics(name=t.topic, partition_indexes=[0])],
                )
            ],
            require_stable=True,
        )
        (found,) = t.once(asked, group_coordinator(group)).groups
        part = found.topics[0].partitions[0]
        return Code(part.error_code), part.committed_offset

    def adding(txn: Transaction, version: int) -> Code:
        request = AddOffsetsToTxnRequest(
            transactional_id=txn.transactional_id,
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            group_id=group,
        )
        to = Coordinator(txn.transactional_id)
        answer = t.until(lambda: t.once(request, to, version), lambda a: a.error_code)
        return Code(answer.error_code)

    txn = t.begun(fresh())
    for version in (3, 4):
        t.say(f"v{version} not added", commit(txn, version))
    zombie = Transaction(txn.transactional_id, txn.producer_id, 9)
    for version in (0, 1, 2, 3):
        t.say(f"adding v{version} as a zombie", adding(zombie, version))
    t.say("adding", adding(txn, 3))
    t.say("committing", commit(txn, 3))
    t.say("unknown topic", commit(txn, 3, topic="nowhere"))
    t.say("as a zombie", commit(zombie, 3))
    t.say("unknown generation", commit(txn, 3, generation=3))
    t.say("pending", *stable())
    t.say("end", t.ended(txn, commit=True, version=4))
    t.say("state", t.settle(txn))
    t.say("committed", *stable())
    newer = t.begun(fresh())
    t.say("v5", commit(newer, 5))
    t.say("pending", *stable())
    t.say("abort", t.ended(newer, commit=False, version=5))
    t.say("state", t.settle(newer))
    t.say("committed", *stable())


def reading(t: Transcript) -> None:
    for number in range(4):
        assert t.produced(t.batch(b"%d" % number, timestamp_ms=NOW_MS + 10 * number)) == Code.NONE

    def read(about: str, offset: int, *, topic: str | None = None, partition: int = 0) -> None:
        part = fetching.FetchPartition(
            partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20
        )
        request = fetching.FetchRequest(
            max_wait_ms=10,
            min_bytes=1,
            max_bytes=1 << 20,
            topics=[fetching.FetchTopic(topic=topic or t.topic, partitions=[part])],
        )
        answer = t.once(request, Leader(t.topic, 0))
        (response,) = answer.responses[0].partitions
        t.say(about, Code(response.error_code), response.high_watermark, bool(response.records))

    for offset in (0, 3, 4, 5, -1):
        read(f"from {offset}", offset)
    read("unknown topic", 0, topic="nowhere")
    read("unknown partition", 0, partition=77)

    for timestamp in (-1, -2, -3, -4, 0, NOW_MS, NOW_MS + 5, NOW_MS + 30, NOW_MS + 31):
        t.listed(timestamp)
    txn = t.begun(fresh())
    assert t.produced(t.batch(txn=txn), name=txn.transactional_id, version=12) == Code.NONE
    t.listed(-1)
    t.listed(-1, 1)

    for offset in (2, 1, 99, -5):
        t.delete(offset)
    read("from 0", 0)
    read("from 2", 2)
    t.listed(-2)
    t.delete(-1)
    read("from 5", 5)
    # The transaction is still open, and has no record any more.
    t.listed(-1, 1)
    t.say("end", t.ended(txn, commit=True, version=5))
    t.say("state", t.settle(txn))
    t.listed(-1, 1)


def times_after_deletions(t: Transcript) -> None:
    times = pa.array([NOW_MS - 300, NOW_MS - 100, NOW_MS - 200], pa.int64())
    columns = Columns(value=pa.array([b"a", b"b", b"c"], pa.binary()), timestamp_ms=times)
    together = b"".join(batches.encode(columns, default_timestamp_ms=NOW_MS))
    assert t.produced(together) == Code.NONE
    assert t.produced(t.batch(timestamp_ms=NOW_MS - 50)) == Code.NONE
    for deleted in (0, 1, 2, 3):
        t.delete(deleted)
        for timestamp in (-2, 0, NOW_MS - 250, NOW_MS - 150, NOW_MS - 60, NOW_MS):
            t.listed(timestamp)


def times_of_the_broker(t: Transcript) -> None:
    stamped = create_topics.CreatableTopicConfig(
        name="message.timestamp.type", value="LogAppendTime"
    )
    wanted = create_topics.CreatableTopic(
        name=f"stamped-{fresh()}", num_partitions=1, replication_factor=1, configs=[stamped]
    )
    (made,) = t.once(create_topics.CreateTopicsRequest(topics=[wanted]), Controller()).topics
    t.say("made", Code(made.error_code))
    for topic in (t.topic, wanted.name):
        for timestamp_ms in (5, int(time.time() * 1000) + 7_200_000, 1 << 60):
            records = t.batch(timestamp_ms=timestamp_ms)
            for _ in range(100):
                code = t.produced(records, topic=topic)
                if code != Code.UNKNOWN_TOPIC_OR_PARTITION:
                    break
                time.sleep(0.05)
            t.say("a clock ahead", code)


def topics(t: Transcript) -> None:  # noqa: PLR0915  one long conversation
    name = f"made-{uuid.uuid4().hex[:8]}"

    def make(about: str, wanted: str, *, rehearse: bool = False, **options: Any) -> None:
        asked = {"num_partitions": 1, "replication_factor": 1, **options}
        request = create_topics.CreateTopicsRequest(
            topics=[create_topics.CreatableTopic(name=wanted, **asked)],
            timeout_ms=10_000,
            validate_only=rehearse,
        )
        (response,) = t.once(request, Controller()).topics
        t.say(
            about, Code(response.error_code), response.num_partitions, response.replication_factor
        )

    config = create_topics.CreatableTopicConfig
    make("rehearsed", name, rehearse=True)
    make("made", name)
    make("made again", name)
    make("no name", "")
    make("bad name", "a/../b")
    make("dots", "..")
    make("long name", "x" * 250)
    make("no partitions", f"{name}-1", num_partitions=0)
    make("default partitions", f"{name}-2", num_partitions=-1)
    make("three replicas", f"{name}-3", replication_factor=3)
    make("unknown config", f"{name}-4", configs=[config(name="no.such", value="1")])
    make("bad config", f"{name}-5", configs=[config(name="retention.ms", value="soon")])
    make("config", f"{name}-6", configs=[config(name="retention.ms", value="1000")])
    resource = DescribeConfigsResource(
        resource_type=2, resource_name=f"{name}-6", configuration_keys=["retention.ms"]
    )
    request = DescribeConfigsRequest(resources=[resource])
    # A broker knows a new topic a moment after the controller has made it.
    (response,) = t.until(
        lambda: t.once(request, Controller()), lambda a: a.results[0].error_code
    ).results
    (row,) = response.configs
    t.say("described", row.name, row.value, row.config_source, row.config_type)
    resource = DescribeConfigsResource(resource_type=2, resource_name="nowhere")
    (response,) = t.once(DescribeConfigsRequest(resources=[resource]), Controller()).results
    t.say("of an unknown topic", Code(response.error_code))

    def alter(about: str, topic: str, key: str, value: str | None, operation: int = 0) -> None:
        change = AlterableConfig(name=key, config_operation=operation, value=value)
        wanted = AlterConfigsResource(resource_type=2, resource_name=topic, configs=[change])
        request = IncrementalAlterConfigsRequest(resources=[wanted])
        (response,) = t.once(request, Controller()).responses
        t.say(about, Code(response.error_code))

    alter("set", name, "retention.ms", "5000")
    alter("set badly", name, "retention.ms", "-7")
    alter("unknown", name, "nothing.like.it", "1")
    alter("of nobody", "nowhere", "retention.ms", "5000")
    alter("deleted", name, "retention.ms", None, 1)

    def grow(about: str, topic: str, count: int) -> None:
        wanted = CreatePartitionsTopic(name=topic, count=count, assignments=None)
        request = CreatePartitionsRequest(topics=[wanted], timeout_ms=10_000)
        (response,) = t.once(request, Controller()).results
        t.say(about, Code(response.error_code))

    grow("grown", name, 3)
    grow("the same", name, 3)
    grow("fewer", name, 1)
    grow("of nobody", "nowhere", 3)
    for about, wanted in (("deleted", name), ("deleted again", name), ("nobody", "nowhere")):
        request = DeleteTopicsRequest(topics=[DeleteTopicState(name=wanted)], timeout_ms=10_000)
        (gone,) = t.once(request, Controller()).responses
        t.say(about, Code(gone.error_code))


def groups(t: Transcript) -> None:  # noqa: PLR0915  one long conversation
    group = f"group-{uuid.uuid4().hex[:8]}"
    to = group_coordinator(group)

    def join(member: str = "", *, version: int = 9, session_ms: int = 10_000, **more: Any) -> Any:
        asked = {
            "group_id": group,
            "session_timeout_ms": session_ms,
            "rebalance_timeout_ms": 10_000,
            "member_id": member,
            "protocol_type": "consumer",
            "protocols": [join_group.JoinGroupRequestProtocol(name="range", metadata=b"m")],
            **more,
        }
        return t.once(join_group.JoinGroupRequest(**asked), to, version)

    def beat(member: str, generation: int) -> Code:
        request = HeartbeatRequest(group_id=group, generation_id=generation, member_id=member)
        return Code(t.once(request, to).error_code)

    def commit(member: str, generation: int, topic: str | None = None) -> Code:
        part = committing.OffsetCommitRequestPartition(partition_index=0, committed_offset=3)
        request = committing.OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member,
            topics=[committing.OffsetCommitRequestTopic(name=topic or t.topic, partitions=[part])],
        )
        return Code(t.once(request, to).topics[0].partitions[0].error_code)

    t.until(lambda: join("stranger"), lambda a: a.error_code)
    t.say("a stranger joins", Code(join("stranger").error_code))
    t.say("a stranger's heartbeat", beat("stranger", 1))
    t.say("a stranger's commit", commit("stranger", 1))
    t.say("session too short", Code(join(session_ms=10).error_code))
    t.say("no protocols", Code(join(protocols=[]).error_code))
    t.say("no group", Code(join(group_id="").error_code))
    invited = join()
    t.say("invited", Code(invited.error_code), bool(invited.member_id))
    member = invited.member_id
    joined = join(member)
    is_leader = joined.leader == member
    t.say("joined", Code(joined.error_code), joined.generation_id, is_leader, len(joined.members))
    t.say("heartbeat", beat(member, 1))
    t.say("commit before the sync", commit(member, 1))
    unspoken = SyncGroupRequest(group_id=group, generation_id=1, member_id=member)
    t.say("sync without a protocol", Code(t.once(unspoken, to).error_code))
    t.say("the same in v4", Code(t.once(SyncGroupRequest(group_id="x"), to, 4).error_code))
    for generation in (7, 1, 1):
        request = SyncGroupRequest(
            group_id=group,
            generation_id=generation,
            member_id=member,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[SyncGroupRequestAssignment(member_id=member, assignment=b"all")],
        )
        answer = t.once(request, to)
        t.say(f"sync {generation}", Code(answer.error_code), answer.assignment)
    t.say("heartbeat", beat(member, 1), beat(member, 2))
    t.say("commit", commit(member, 1), commit(member, 2), commit(member, 1, "nowhere"))
    t.say("commit from outside", commit("", -1))
    (response,) = t.once(DescribeGroupsRequest(groups=[group]), to).groups
    t.say("described", response.group_state, response.protocol_type, response.protocol_data)
    t.say("assigned", [one.member_assignment for one in response.members])
    (gone,) = t.once(DeleteGroupsRequest(groups_names=[group]), to).results
    t.say("deleted with members", Code(gone.error_code))
    other = join(protocols=[join_group.JoinGroupRequestProtocol(name="other", metadata=b"")])
    t.say("another protocol", Code(other.error_code))
    for who in ("stranger", member, member):
        request = LeaveGroupRequest(group_id=group, members=[MemberIdentity(member_id=who)])
        answer = t.once(request, to)
        codes = [Code(one.error_code) for one in answer.members]
        t.say("left", Code(answer.error_code), *codes)
    (response,) = t.once(DescribeGroupsRequest(groups=[group]), to).groups
    t.say("described", response.group_state)
    t.say("commit of a free group", commit("", -1))
    (gone,) = t.once(DeleteGroupsRequest(groups_names=[group]), to).results
    t.say("deleted", Code(gone.error_code))
    (gone,) = t.once(DeleteGroupsRequest(groups_names=[group]), to).results
    t.say("deleted again", Code(gone.error_code))
    (response,) = t.once(DescribeGroupsRequest(groups=[group]), to, 5).groups
    t.say("described v5", Code(response.error_code), response.group_state)
    (response,) = t.once(DescribeGroupsRequest(groups=[group]), to, 6).groups
    t.say("described v6", Code(response.error_code), response.group_state)


def static_members(t: Transcript) -> None:
    group = f"group-{uuid.uuid4().hex[:8]}"
    to = group_coordinator(group)

    def join(member: str, instance: str, version: int = 9) -> Any:
        request = join_group.JoinGroupRequest(
            group_id=group,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=10_000,
            member_id=member,
            group_instance_id=instance,
            protocol_type="consumer",
            protocols=[join_group.JoinGroupRequestProtocol(name="range", metadata=b"m")],
        )
        return t.once(request, to, version)

    first = t.until(lambda: join("", "one"), lambda a: a.error_code)
    t.say("joined", Code(first.error_code), first.generation_id, len(first.members))
    request = SyncGroupRequest(
        group_id=group,
        generation_id=1,
        member_id=first.member_id,
        group_instance_id="one",
        protocol_type="consumer",
        protocol_name="range",
        assignments=[SyncGroupRequestAssignment(member_id=first.member_id, assignment=b"all")],
    )
    t.say("synced", Code(t.once(request, to).error_code))
    again = join("", "one")
    t.say("again", Code(again.error_code), again.generation_id, again.skip_assignment)
    t.say("a new id", again.member_id != first.member_id, again.leader == again.member_id)
    beat = HeartbeatRequest(
        group_id=group, generation_id=1, member_id=first.member_id, group_instance_id="one"
    )
    t.say("the older process", Code(t.once(beat, to).error_code))
    beat.member_id = again.member_id
    t.say("the newer process", Code(t.once(beat, to).error_code))
    request.member_id = again.member_id
    request.assignments = []
    answer = t.once(request, to)
    t.say("synced again", Code(answer.error_code), answer.assignment)
    older = join("", "one", 5)
    t.say("v5", Code(older.error_code), older.generation_id, older.leader == older.member_id)
    t.say("joins with an old id", Code(join(first.member_id, "one").error_code))
    leaving = LeaveGroupRequest(
        group_id=group, members=[MemberIdentity(member_id="", group_instance_id="one")]
    )
    answer = t.once(leaving, to)
    t.say("left", Code(answer.error_code), *(Code(one.error_code) for one in answer.members))
    answer = t.once(leaving, to)
    t.say("left again", *(Code(one.error_code) for one in answer.members))


def looking_at_transactions(t: Transcript) -> None:
    name = fresh()
    txn = t.begun(name)
    assert t.produced(t.batch(txn=txn), name=name, version=12) == Code.NONE

    def described(who: str) -> None:
        request = DescribeTransactionsRequest(transactional_ids=[who])
        (response,) = t.once(request, Coordinator(name)).transaction_states
        named = [topic.partitions for topic in response.topics]
        t.say("described", Code(response.error_code), response.transaction_state, named)

    described(name)
    described("never-heard-of")
    for about, options in (
        ("all states", {"transactional_id_pattern": name}),
        ("ongoing", {"state_filters": ["Ongoing"], "transactional_id_pattern": f"{name[:-2]}.*"}),
        ("empty", {"state_filters": ["Empty"], "transactional_id_pattern": name}),
        ("unknown state", {"state_filters": ["Sleeping"]}),
        ("both", {"state_filters": ["Sleeping", "Ongoing"], "transactional_id_pattern": name}),
        ("long ones", {"duration_filter": 100_000, "transactional_id_pattern": name}),
        ("part of the name", {"transactional_id_pattern": name[:-2]}),
        ("no regex", {"transactional_id_pattern": "(("}),
    ):
        answer = t.once(ListTransactionsRequest(**options), Coordinator(name))
        states = [one.transaction_state for one in answer.transaction_states]
        t.say(about, Code(answer.error_code), states, answer.unknown_state_filters)
    for topic, index in ((t.topic, 0), ("nowhere", 0), (t.topic, 99)):
        asked = TopicRequest(name=topic, partition_indexes=[index])
        answer = t.once(DescribeProducersRequest(topics=[asked]), Leader(t.topic, 0))
        part = answer.topics[0].partitions[0]
        response = [
            (one.producer_epoch, one.last_sequence, one.current_txn_start_offset)
            for one in part.active_producers
        ]
        t.say("producers", Code(part.error_code), response)
    t.ended(txn, commit=True, version=5)
    t.settle(txn)
    described(name)


def what_tools_ask(t: Transcript) -> None:
    """Requests of admin clients and consoles, most of which one broker has little to say to."""
    here = Controller()
    acls = describe_acls.DescribeAclsRequest(
        resource_type_filter=1,
        pattern_type_filter=1,
        operation=1,
        permission_type=1,
        resource_name_filter=None,
        principal_filter=None,
        host_filter=None,
    )
    t.say("acls", Code(t.once(acls, here).error_code))
    creation = create_acls.AclCreation(
        resource_type=2,
        resource_name="t",
        principal="User:a",
        host="*",
        operation=3,
        permission_type=3,
    )
    made = t.once(create_acls.CreateAclsRequest(creations=[creation]), here)
    t.say("acl made", *(Code(one.error_code) for one in made.results))
    quotas = t.once(describe_client_quotas.DescribeClientQuotasRequest(components=[]), here)
    t.say("quotas", Code(quotas.error_code), quotas.entries)
    user = describe_user_scram_credentials.UserName(name="nobody")
    request = describe_user_scram_credentials.DescribeUserScramCredentialsRequest(users=[user])
    t.say("scram", *(Code(one.error_code) for one in t.once(request, here).results))
    moves = t.once(list_partition_reassignments.ListPartitionReassignmentsRequest(), here)
    t.say("moves", Code(moves.error_code), moves.topics)
    for replicas in (None, [1], [7], []):
        wanted = alter_partition_reassignments.ReassignableTopic(
            name=t.topic,
            partitions=[
                alter_partition_reassignments.ReassignablePartition(
                    partition_index=index, replicas=replicas
                )
                for index in (0, 9)
            ],
        )
        moving = alter_partition_reassignments.AlterPartitionReassignmentsRequest(topics=[wanted])
        (answer,) = t.once(moving, here).responses
        t.say(f"move to {replicas}", *(Code(one.error_code) for one in answer.partitions))
    places = elect_leaders.TopicPartitions(topic=t.topic, partitions=[0, 9])
    election = elect_leaders.ElectLeadersRequest(topic_partitions=[places])
    (answer,) = t.once(election, here).replica_election_results
    found = sorted((one.partition_id, one.error_code) for one in answer.partition_result)
    t.say("elections", *found)
    everywhere = elect_leaders.ElectLeadersRequest(topic_partitions=None)
    mine = [
        one for one in t.once(everywhere, here).replica_election_results if one.topic == t.topic
    ]
    t.say("election of all", *(one.partition_result for one in mine))
    topic = alter_replica_log_dirs.AlterReplicaLogDirTopic(name=t.topic, partitions=[0])
    folder = alter_replica_log_dirs.AlterReplicaLogDir(path="/nowhere", topics=[topic])
    moved = t.once(alter_replica_log_dirs.AlterReplicaLogDirsRequest(dirs=[folder]), here)
    t.say("other folder", Code(moved.results[0].partitions[0].error_code))
    sizes = describe_log_dirs.DescribeLogDirsRequest(
        topics=[describe_log_dirs.DescribableLogDirTopic(topic=t.topic, partitions=[0, 1])]
    )
    (folder_now,) = t.once(sizes, here).results
    t.say("folder", [(one.name == t.topic, len(one.partitions)) for one in folder_now.topics])
    asked = [describe_topic_partitions.TopicRequest(name=name) for name in (t.topic, "no-such")]
    pages = describe_topic_partitions.DescribeTopicPartitionsRequest(
        topics=asked, response_partition_limit=1
    )
    page = t.once(pages, here)
    for one in page.topics:
        about = (
            one.partitions and one.partitions[0].replica_nodes,
            one.topic_authorized_operations,
        )
        t.say("topic page", one.name == t.topic, Code(one.error_code), len(one.partitions), *about)
    cursor = page.next_cursor
    t.say("cursor", cursor and (cursor.topic_name == t.topic, cursor.partition_index))


def deleting_offsets(t: Transcript) -> None:
    group = fresh()

    def deleted(name: str, topic: str, partition: int = 0) -> None:
        part = offset_delete.OffsetDeleteRequestPartition(partition_index=partition)
        request = offset_delete.OffsetDeleteRequest(
            group_id=name,
            topics=[offset_delete.OffsetDeleteRequestTopic(name=topic, partitions=[part])],
        )
        answer = t.until(lambda: t.once(request, group_coordinator(name)), lambda a: a.error_code)
        parts = [Code(p.error_code) for one in answer.topics for p in one.partitions]
        t.say("delete offsets", Code(answer.error_code), *parts)

    deleted(group, t.topic)
    part = committing.OffsetCommitRequestPartition(partition_index=0, committed_offset=7)
    request = committing.OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[committing.OffsetCommitRequestTopic(name=t.topic, partitions=[part])],
    )
    answer = t.until(
        lambda: t.once(request, group_coordinator(group), 9),
        lambda a: a.topics[0].partitions[0].error_code,
    )
    t.say("committed", Code(answer.topics[0].partitions[0].error_code))
    deleted(group, "no-such-topic")
    deleted(group, t.topic, 9)
    txn = t.begun(fresh())
    pending = txn_offsets.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=9)
    asked = txn_offsets.TxnOffsetCommitRequest(
        transactional_id=txn.transactional_id,
        group_id=group,
        producer_id=txn.producer_id,
        producer_epoch=txn.producer_epoch,
        topics=[txn_offsets.TxnOffsetCommitRequestTopic(name=t.topic, partitions=[pending])],
    )
    answer = t.until(
        lambda: t.once(asked, group_coordinator(group), 5),
        lambda a: a.topics[0].partitions[0].error_code,
    )
    t.say("pending", Code(answer.topics[0].partitions[0].error_code))
    deleted(group, t.topic)
    deleted(group, t.topic)
    t.say("end", t.ended(txn, commit=True, version=5))
    t.say("state", t.settle(txn))
    wanted = offsets.OffsetFetchRequestTopics(name=t.topic, partition_indexes=[0])
    named = offsets.OffsetFetchRequestGroup(group_id=group, topics=[wanted])
    request_left = offsets.OffsetFetchRequest(groups=[named], require_stable=True)
    (left,) = t.once(request_left, group_coordinator(group)).groups
    t.say("left", left.topics[0].partitions[0].committed_offset)


def compacted_topics(t: Transcript) -> None:
    wanted = create_topics.CreatableTopic(
        name=f"compacted-{fresh()}",
        num_partitions=1,
        replication_factor=1,
        configs=[create_topics.CreatableTopicConfig(name="cleanup.policy", value="compact")],
    )
    (made,) = t.once(create_topics.CreateTopicsRequest(topics=[wanted]), Controller()).topics
    t.say("made", Code(made.error_code))
    for compression in (Compression.NONE, Compression.GZIP, Compression.ZSTD):
        for keys in ([b"k", b"l"], [b"k", None, b"l", None]):
            columns = Columns(
                key=pa.array(keys, pa.binary()),
                value=pa.array([b"v"] * len(keys), pa.binary()),
            )
            parts = batches.encode(columns, default_timestamp_ms=NOW_MS, compression=compression)
            records = b"".join(bytes(part) for part in parts)
            for _ in range(100):
                answer = t.produce(records, topic=wanted.name)
                if answer.error_code != Code.UNKNOWN_TOPIC_OR_PARTITION:
                    break
                time.sleep(0.05)
            reasons = [one.batch_index for one in answer.record_errors]
            t.say("produce", Code(answer.error_code), answer.base_offset, reasons)


def allowed_operations(t: Transcript) -> None:
    wanted = metadata.MetadataRequest(
        topics=[metadata.MetadataRequestTopic(name=t.topic)],
        include_topic_authorized_operations=True,
    )
    (topic,) = t.once(wanted, Controller()).topics
    t.say("of a topic", topic.topic_authorized_operations)
    cluster = describe_cluster.DescribeClusterRequest(include_cluster_authorized_operations=True)
    t.say("of the cluster", t.once(cluster, Controller()).cluster_authorized_operations)
    group = fresh()
    request = DescribeGroupsRequest(groups=[group], include_authorized_operations=True)
    answer = t.until(
        lambda: t.once(request, group_coordinator(group), 5), lambda a: a.groups[0].error_code
    )
    t.say("of a group", answer.groups[0].authorized_operations)


ALL = (
    what_tools_ask,
    deleting_offsets,
    compacted_topics,
    allowed_operations,
    ends_of_a_transaction,
    epochs_by_protocol,
    names_of_producers,
    going_on_after_a_timeout,
    fencing_an_open_transaction,
    timeouts,
    adding_partitions,
    sequences,
    broken_batches,
    writing_without_a_transaction,
    offsets_in_transactions,
    reading,
    times_after_deletions,
    times_of_the_broker,
    topics,
    groups,
    static_members,
    looking_at_transactions,
)
