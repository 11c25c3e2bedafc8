"""Against a real Apache Kafka: rows, transactions, moves and failures."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import uuid

import confluent_kafka
import pytest
from servers.kafka import KafkaServer
from wire import (
    Transaction,
    aborted_in,
    add_partition,
    begin,
    end,
    fetch,
    produce,
    produce_code,
    produce_request,
    values,
)

from epochal.clock import SystemClock
from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka import batch_reader, errors
from epochal.kafka.batches import Marker
from epochal.kafka.client import Ask, Client, Patience, group_coordinator
from epochal.kafka.cluster import Coordinator, Leader, Node
from epochal.kafka.codes import Code
from epochal.kafka.compression import Compression
from epochal.kafka.connection import Limits
from epochal.kafka.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from epochal.kafka.messages.describe_cluster import DescribeClusterRequest
from epochal.kafka.messages.describe_producers import DescribeProducersRequest, TopicRequest
from epochal.kafka.messages.describe_transactions import DescribeTransactionsRequest
from epochal.kafka.messages.end_txn import EndTxnRequest
from epochal.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from epochal.kafka.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)


def fresh_id() -> str:
    return f"epochal-test-{uuid.uuid4().hex[:12]}"


def open_transaction(client: Client, topic: str, *rows: bytes) -> Transaction:
    txn = begin(client, fresh_id())
    if client.transaction_version() < 2:
        assert add_partition(client, txn, topic) == Code.NONE
    assert produce(client, topic, list(rows) or [b"row"], txn=txn) == Code.NONE
    return txn


def ended_with(
    client: Client, txn: Transaction, *, commit: bool, version: int | None = None
) -> str:
    return errors.code_name(end(client, txn, commit=commit, version=version).error_code)


def test_every_compression_is_taken_and_read_back_by_others(
    broker: KafkaServer, client: Client, make_topic
) -> None:
    topic = make_topic(len(Compression))
    rows: list[bytes | None] = [b"row %d " % n * 20 for n in range(2_000)] + [None, b""]
    for kind in Compression:
        assert produce(client, topic, rows, partition=kind, compression=kind) == Code.NONE
        found, _ = fetch(client, topic, partition=kind)
        assert values(found) == rows
        assert {batch.compression for batch in found} == {kind}
    reader = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.address(),
            "group.id": "reader",
            "check.crcs": True,
            # An offset that the broker refuses is an error here, and not a wait for newer rows.
            "auto.offset.reset": "error",
        }
    )
    for kind in Compression:
        reader.assign([confluent_kafka.TopicPartition(topic, kind, 0)])
        taken = reader.consume(len(rows), timeout=60)
        assert [message.error() for message in taken if message.error()] == [], kind.name
        assert [message.value() for message in taken] == rows, kind.name
    reader.close()


def test_what_librdkafka_writes_is_read(broker: KafkaServer, client: Client, make_topic) -> None:
    topic = make_topic()
    wanted = []
    for kind in Compression:
        writer = confluent_kafka.Producer(
            {"bootstrap.servers": broker.address(), "compression.type": kind.name.lower()}
        )
        for n in range(300):
            value = b"%s %d" % (kind.name.encode(), n) * 9
            writer.produce(topic, value, headers=[("h", b"1"), ("n", None)])
            wanted.append(value)
        assert writer.flush(20) == 0
    found, _ = fetch(client, topic)
    assert values(found) == wanted
    assert found[0].columns()["headers"][0].as_py()[1] == {"key": "n", "value": None}


def test_rows_of_a_transaction_are_seen_once_another_process_commits_it(
    broker: KafkaServer, client: Client, make_topic
) -> None:
    topic = make_topic()
    txn = open_transaction(client, topic, b"one", b"two")
    unseen, _ = fetch(client, topic, committed=True)
    assert values(unseen) == []
    program = textwrap.dedent(
        f"""
        from epochal.clock import SystemClock
        from epochal.kafka.client import Client
        from epochal.kafka.cluster import Coordinator
        from epochal.kafka.messages.end_txn import EndTxnRequest

        with Client({broker.address()!r}, clock=SystemClock()) as client:
            request = EndTxnRequest(
                transactional_id={txn.transactional_id!r}, producer_id={txn.producer_id},
                producer_epoch={txn.producer_epoch}, committed=True,
            )
            answer = client.ask(request, Coordinator({txn.transactional_id!r}))
        print(answer.error_code)
        """
    )
    reported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert reported.stdout.strip() == "0"
    assert ended_with(client, txn, commit=True) == "NONE"
    wait_for(lambda: values(fetch(client, topic, committed=True)[0]) == [b"one", b"two"])
    found, _ = fetch(client, topic)
    assert found[-1].marker() is Marker.COMMIT
    assert found[-1].producer_id == txn.producer_id


def wait_for(true, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def test_an_aborted_transaction_names_itself_to_readers(client: Client, make_topic) -> None:
    topic = make_topic()
    txn = open_transaction(client, topic)
    assert ended_with(client, txn, commit=False) == "NONE"
    wait_for(lambda: fetch(client, topic)[0][-1].marker() is Marker.ABORT)
    kept = open_transaction(client, topic, b"kept")
    assert ended_with(client, kept, commit=True) == "NONE"
    wait_for(lambda: len(fetch(client, topic, committed=True)[0]) == 4)
    found, answer = fetch(client, topic, committed=True)
    part = answer.responses[0].partitions[0]
    assert part.last_stable_offset == part.high_watermark == 4
    aborted = aborted_in(client, topic)
    assert aborted == [(txn.producer_id, 0)]
    assert values(found) == [b"row", b"kept"]
    assert values(list(batch_reader.committed(found, aborted))) == [b"kept"]


@pytest.mark.parametrize("version", [3, 4, 5])
def test_ending_a_transaction_again_answers_as_the_table_has_it(
    client: Client, make_topic, version: int
) -> None:
    topic = make_topic()
    committed = open_transaction(client, topic)
    assert ended_with(client, committed, commit=True, version=version) == "NONE"
    assert ended_with(client, committed, commit=True, version=version) == "NONE"
    wait_for(lambda: state_of(client, committed) == "CompleteCommit")
    assert ended_with(client, committed, commit=True, version=version) == "NONE"

    aborted = open_transaction(client, topic)
    assert ended_with(client, aborted, commit=False, version=version) == "NONE"
    wait_for(lambda: state_of(client, aborted) == "CompleteAbort")
    assert ended_with(client, aborted, commit=True, version=version) == "INVALID_TXN_STATE"

    fenced = open_transaction(client, topic)
    begin(client, fenced.transactional_id)
    assert ended_with(client, fenced, commit=True, version=version) == "PRODUCER_FENCED"

    begin(client, committed.transactional_id)
    assert ended_with(client, committed, commit=True, version=version) == "PRODUCER_FENCED"

    unknown = Transaction(fresh_id(), 12345, 0)
    assert ended_with(client, unknown, commit=True, version=version) == (
        "INVALID_PRODUCER_ID_MAPPING"
    )
    answer = end(client, open_transaction(client, topic), commit=True, version=version)
    assert (answer.producer_epoch >= 0) == (version == 5)


def state_of(client: Client, txn: Transaction) -> str:
    request = DescribeTransactionsRequest(transactional_ids=[txn.transactional_id])
    (state,) = client.ask(request, Coordinator(txn.transactional_id)).transaction_states
    assert state.error_code == 0, state
    return state.transaction_state


def test_open_transactions_are_listed_by_prefix_and_described(client: Client, make_topic) -> None:
    topic = make_topic()
    txn = open_transaction(client, topic)
    pattern = txn.transactional_id[:-3] + ".*"
    listed = []
    for node in client.nodes():
        request = ListTransactionsRequest(
            state_filters=["Ongoing"], transactional_id_pattern=pattern
        )
        listed += client.ask(request, node).transaction_states
    (found,) = listed
    assert (found.transactional_id, found.producer_id) == (txn.transactional_id, txn.producer_id)
    request = DescribeTransactionsRequest(transactional_ids=[txn.transactional_id])
    (reported,) = client.ask(request, Coordinator(txn.transactional_id)).transaction_states
    assert (reported.producer_id, reported.producer_epoch) == (txn.producer_id, txn.producer_epoch)
    assert [(part.topic, part.partitions) for part in reported.topics] == [(topic, [0])]
    asked = DescribeProducersRequest(topics=[TopicRequest(name=topic, partition_indexes=[0])])
    (described,) = client.ask(asked, Leader(topic, 0)).topics
    (active,) = described.partitions[0].active_producers
    assert (active.producer_id, active.current_txn_start_offset) == (txn.producer_id, 0)
    begin(client, txn.transactional_id)
    assert state_of(client, txn) == "Empty"
    wait_for(lambda: fetch(client, topic)[0][-1].marker() is Marker.ABORT)


def test_a_repeated_sequence_is_written_once(client: Client, make_topic) -> None:
    topic = make_topic()
    txn = begin(client, fresh_id())
    for _ in range(3):
        assert produce(client, topic, [b"a", b"b"], txn=txn, sequence=0) == Code.NONE
    assert produce(client, topic, [b"c"], txn=txn, sequence=2) == Code.NONE
    gap = produce(client, topic, [b"e"], txn=txn, sequence=9)
    assert gap == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert values(fetch(client, topic)[0]) == [b"a", b"b", b"c"]


def test_many_requests_are_under_way_on_one_connection(client: Client, make_topic) -> None:
    topic = make_topic()
    fetch(client, topic)  # is retried until the new topic has its leader; the rest is not
    txn = begin(client, fresh_id())
    asks = [
        Ask(
            request=produce_request(topic, [b"%d" % n * 20_000], txn=txn, sequence=n),
            to=Leader(topic, 0),
        )
        for n in range(60)
    ]
    client.topic(topic)
    under_way = [client.submit(ask) for ask in asks]
    assert sum(not pending.is_done for pending in under_way) > 1
    assert {produce_code(pending.result()) for pending in under_way} == {Code.NONE}
    assert ended_with(client, txn, commit=True) == "NONE"
    wait_for(lambda: len(values(fetch(client, topic, committed=True)[0])) == 60)


def test_many_transactions_are_ended_at_once(
    broker: KafkaServer, client: Client, make_topic
) -> None:
    topic = make_topic()
    open_ones = [open_transaction(client, topic) for _ in range(12)]
    with Client(broker.address(), clock=SystemClock(), lanes=3) as other:
        answers = other.ask_all(
            [
                Ask(
                    request=EndTxnRequest(
                        transactional_id=txn.transactional_id,
                        producer_id=txn.producer_id,
                        producer_epoch=txn.producer_epoch,
                        committed=True,
                    ),
                    to=Coordinator(txn.transactional_id),
                    is_repeatable=True,
                )
                for txn in open_ones
            ]
        )
    assert [getattr(answer, "error_code", answer) for answer in answers] == [0] * len(open_ones)
    wait_for(lambda: len(values(fetch(client, topic, committed=True)[0])) == len(open_ones))


@pytest.mark.parametrize("version", [3, 5])
def test_offsets_committed_within_a_transaction_appear_with_it(
    client: Client, make_topic, version: int
) -> None:
    topic = make_topic()
    txn = begin(client, fresh_id())
    group = group_coordinator(f"group-of-{txn.transactional_id}")
    if version < 5:
        adding = AddOffsetsToTxnRequest(
            transactional_id=txn.transactional_id,
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            group_id=group.key,
        )
        assert client.ask(adding, Coordinator(txn.transactional_id)).error_code == Code.NONE
    part = TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=41)
    committing = TxnOffsetCommitRequest(
        transactional_id=txn.transactional_id,
        group_id=group.key,
        producer_id=txn.producer_id,
        producer_epoch=txn.producer_epoch,
        topics=[TxnOffsetCommitRequestTopic(name=topic, partitions=[part])],
    )

    def commit() -> int:
        (reported,) = client.ask(committing, group, version_max=version).topics
        return reported.partitions[0].error_code

    # A coordinator that was elected a moment ago answers so for each partition: it is asked again.
    wait_for(lambda: commit() == Code.NONE)

    def offset() -> int:
        wanted = OffsetFetchRequestTopics(name=topic, partition_indexes=[0])
        asked = OffsetFetchRequest(
            groups=[OffsetFetchRequestGroup(group_id=group.key, topics=[wanted])]
        )
        (found,) = client.ask(asked, group).groups
        return found.topics[0].partitions[0].committed_offset

    assert offset() == -1
    assert ended_with(client, txn, commit=True) == "NONE"
    wait_for(lambda: offset() == 41)


def test_offsets_can_be_asked_for(client: Client, make_topic) -> None:
    topic = make_topic()
    assert produce(client, topic, [b"a", b"b", b"c"]) == Code.NONE
    request = ListOffsetsRequest(
        replica_id=-1,
        topics=[
            ListOffsetsTopic(
                name=topic, partitions=[ListOffsetsPartition(partition_index=0, timestamp=-1)]
            )
        ],
    )
    (reported,) = client.ask(request, Leader(topic, 0)).topics
    assert reported.partitions[0].offset == 3


def test_a_topic_that_is_not_there_is_named(broker: KafkaServer) -> None:
    patience = Patience(unknown_topic_s=0.2)
    with (
        Client(broker.address(), clock=SystemClock(), patience=patience) as client,
        pytest.raises(Misconfigured, match="there is no topic 'nowhere'"),
    ):
        produce(client, "nowhere", [b"x"])


def test_one_living_address_among_dead_ones_is_enough(broker: KafkaServer) -> None:
    addresses = f"localhost:1,127.0.0.1:2,{broker.address()}"
    with Client(addresses, clock=SystemClock()) as client:
        assert client.nodes() == [Node(1)]
        assert client.ask(DescribeClusterRequest()).cluster_id == client.cluster.cluster_id


def test_a_broker_that_is_stopped_leaves_the_outcome_unknown(
    broker: KafkaServer, client: Client, make_topic
) -> None:
    topic = make_topic()
    assert produce(client, topic, [b"before"]) == Code.NONE
    limits = Limits(request_timeout_s=0.5, connect_timeout_s=0.5)
    with Client(broker.address(), clock=SystemClock(), limits=limits) as hurried:
        assert fetch(hurried, topic), "a read is repeated until the connection is there"
        broker.pause()
        try:
            with pytest.raises(OutcomeUnknown, match="no answer"):
                produce(hurried, topic, [b"perhaps"])
            # The next one can't even be sent: a new connection gets no answer either.
            with pytest.raises(TryAgain):
                hurried.ask(produce_request(topic, [b"never"]), Leader(topic, 0), timeout_s=0.3)
        finally:
            broker.resume()
        assert fetch(hurried, topic), "the same client goes on"
    assert produce(client, topic, [b"after"]) == Code.NONE
    found = values(fetch(client, topic)[0])
    assert found in ([b"before", b"perhaps", b"after"], [b"before", b"after"])


def test_a_client_outlives_a_broker_that_is_killed_and_started_again(
    broker: KafkaServer, client: Client, make_topic
) -> None:
    topic = make_topic()
    txn = open_transaction(client, topic, b"kept")
    broker.kill()
    with (
        Client(broker.address(), clock=SystemClock()) as lonely,
        pytest.raises(TryAgain, match="no broker can be reached"),
    ):
        lonely.ask(DescribeClusterRequest(), timeout_s=0.3)
    broker.start()
    assert ended_with(client, txn, commit=True) == "NONE"
    wait_for(lambda: values(fetch(client, topic, committed=True)[0]) == [b"kept"])
