"""The client against brokers that move, lie, hang up and keep silent."""

from __future__ import annotations

import time

import pytest
from fake_broker import HANG_UP, SILENCE, FakeBroker, Handler, api_versions

from epochal.clock import SystemClock
from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka import versions
from epochal.kafka.client import Ask, Client, Patience
from epochal.kafka.cluster import Address, Coordinator, Leader, Node
from epochal.kafka.codes import Code
from epochal.kafka.connection import Limits
from epochal.kafka.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
)
from epochal.kafka.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse
from epochal.kafka.messages.find_coordinator import Coordinator as FoundCoordinator
from epochal.kafka.messages.find_coordinator import FindCoordinatorResponse
from epochal.kafka.messages.metadata import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from epochal.kafka.messages.sasl_authenticate import SaslAuthenticateResponse
from epochal.kafka.messages.sasl_handshake import SaslHandshakeResponse
from epochal.kafka.primitives import Malformed, Message
from epochal.kafka.security import OAuthBearer, Plain, Security

QUICK = Patience(total_s=60, pause_first_s=0.001, pause_max_s=0.01, unknown_topic_s=0.1)
END = EndTxnRequest(transactional_id="t", producer_id=1, producer_epoch=0, committed=True)


def client_of(*brokers: FakeBroker, **options: object) -> Client:
    settings = {"clock": SystemClock(), "patience": QUICK, **options}
    return Client([broker.address for broker in brokers], **settings)  # type: ignore[arg-type]


def in_turn(*answers: object) -> Handler:
    """A handler that goes through its answers and stays at the last one."""
    left = list(answers)

    def handle(_: Message) -> object:
        return left.pop(0) if len(left) > 1 else left[0]

    return handle


def coordinator_at(broker: FakeBroker) -> FindCoordinatorResponse:
    reported = FoundCoordinator(key="t", node_id=broker.node_id, host="127.0.0.1", port=broker.port)
    return FindCoordinatorResponse(coordinators=[reported])


def metadata(leader: FakeBroker, *others: FakeBroker, code: int = 0) -> MetadataResponse:
    partition = MetadataResponsePartition(partition_index=0, leader_id=leader.node_id)
    return MetadataResponse(
        brokers=[
            MetadataResponseBroker(node_id=b.node_id, host="127.0.0.1", port=b.port)
            for b in (leader, *others)
        ],
        topics=[
            MetadataResponseTopic(
                name="orders", error_code=code, partitions=[] if code else [partition]
            )
        ],
    )


def produced(code: int = 0) -> ProduceResponse:
    partition = PartitionProduceResponse(index=0, error_code=code)
    return ProduceResponse(
        responses=[TopicProduceResponse(name="orders", partition_responses=[partition])]
    )


PRODUCE = ProduceRequest(
    acks=-1,
    timeout_ms=1_000,
    topic_data=[
        TopicProduceData(name="orders", partition_data=[PartitionProduceData(records=b"x")])
    ],
)


def code_of(answer: ProduceResponse) -> int:
    return answer.responses[0].partition_responses[0].error_code


def test_a_coordinator_that_moved_is_looked_up_again() -> None:
    with FakeBroker({}, 1) as old, FakeBroker({}, 2) as new:
        old.handlers |= {
            10: in_turn(coordinator_at(old), coordinator_at(new)),
            26: in_turn(EndTxnResponse(error_code=Code.NOT_COORDINATOR)),
        }
        new.handlers |= {26: in_turn(EndTxnResponse())}
        with client_of(old) as client:
            assert client.ask(END, Coordinator("t")).error_code == Code.NONE
        assert len(old.asked(26)) == len(new.asked(26)) == 1


def test_a_connection_that_was_closed_while_idle_is_noticed_before_anything_is_sent() -> None:
    with FakeBroker({}) as broker:
        broker.handlers |= {10: in_turn(coordinator_at(broker)), 26: in_turn(EndTxnResponse())}
        with client_of(broker) as client:
            client.ask(END, Coordinator("t"))
            broker.hang_up()
            assert client.ask(END, Coordinator("t")).error_code == Code.NONE
        assert len(broker.asked(26)) == 2


def test_a_coordinator_that_is_still_loading_is_asked_again() -> None:
    loading = EndTxnResponse(error_code=Code.COORDINATOR_LOAD_IN_PROGRESS)
    absent = FindCoordinatorResponse(
        coordinators=[FoundCoordinator(key="t", error_code=Code.COORDINATOR_NOT_AVAILABLE)]
    )
    with FakeBroker({}) as broker:
        broker.handlers |= {
            10: in_turn(absent, coordinator_at(broker)),
            26: in_turn(loading, loading, EndTxnResponse(error_code=Code.INVALID_TXN_STATE)),
        }
        with client_of(broker) as client:
            answer = client.ask(END, Coordinator("t"))
        assert answer.error_code == Code.INVALID_TXN_STATE
        assert len(broker.asked(10)) == 2


def test_a_leader_that_moved_is_looked_up_again() -> None:
    with FakeBroker({}, 1) as old, FakeBroker({}, 2) as new:
        old.handlers |= {
            3: in_turn(metadata(old, new), metadata(new, old)),
            0: in_turn(produced(Code.NOT_LEADER_OR_FOLLOWER)),
        }
        new.handlers |= {3: in_turn(metadata(new, old)), 0: in_turn(produced())}
        with client_of(old) as client:
            answer = client.ask(PRODUCE, Leader("orders", 0), code_of=code_of)
        assert code_of(answer) == Code.NONE
        assert len(new.asked(0)) == 1


def test_patience_has_an_end_and_says_what_it_waited_for() -> None:
    with FakeBroker({}) as broker:
        busy = EndTxnResponse(error_code=Code.CONCURRENT_TRANSACTIONS)
        broker.handlers |= {10: in_turn(coordinator_at(broker)), 26: in_turn(busy)}
        with client_of(broker) as client, pytest.raises(TryAgain, match="CONCURRENT_TRANSACTIONS"):
            client.ask(END, Coordinator("t"), timeout_s=2.0)


def test_a_write_whose_coordinator_went_away_for_good_is_in_doubt() -> None:
    with FakeBroker({}) as broker:
        gone = EndTxnResponse(error_code=Code.COORDINATOR_NOT_AVAILABLE)
        broker.handlers |= {10: in_turn(coordinator_at(broker)), 26: in_turn(gone)}
        with client_of(broker) as client, pytest.raises(OutcomeUnknown):
            client.ask(END, Coordinator("t"), timeout_s=2.0)


def test_an_unanswered_write_is_not_repeated() -> None:
    with FakeBroker({26: in_turn(HANG_UP)}) as broker:
        broker.handlers |= {10: in_turn(coordinator_at(broker))}
        with client_of(broker) as client, pytest.raises(OutcomeUnknown, match="closed"):
            client.ask(END, Coordinator("t"))
        assert len(broker.asked(26)) == 1


def test_a_write_that_never_left_as_a_whole_did_not_happen() -> None:
    partition = PartitionProduceData(records=bytes(64_000_000))
    large = ProduceRequest(
        acks=-1, topic_data=[TopicProduceData(name="orders", partition_data=[partition])]
    )
    with FakeBroker({}) as broker:
        broker.frame_bytes_max = 1_000_000
        with client_of(broker) as client:
            link = client._any_link(0)
            with pytest.raises(TryAgain):
                link.send(large, transaction_version=0).result()


def test_an_unanswered_write_is_repeated_if_its_caller_says_so() -> None:
    with FakeBroker({26: in_turn(HANG_UP, HANG_UP, EndTxnResponse())}) as broker:
        broker.handlers |= {10: in_turn(coordinator_at(broker))}
        with client_of(broker) as client:
            assert client.ask(END, Coordinator("t"), is_repeatable=True).error_code == 0
        assert len(broker.asked(26)) == 3


def test_an_unanswered_read_is_repeated() -> None:
    reported = DescribeClusterResponse(cluster_id="c")
    with FakeBroker({60: in_turn(HANG_UP, reported)}) as broker, client_of(broker) as client:
        assert client.ask(DescribeClusterRequest()) == reported


def test_a_look_up_that_goes_unanswered_leaves_nothing_in_doubt() -> None:
    with (
        FakeBroker({10: in_turn(HANG_UP)}) as broker,
        client_of(broker) as client,
        pytest.raises(TryAgain),
    ):
        client.ask(END, Coordinator("t"), timeout_s=2.0)


def test_silence_ends_at_the_deadline_in_doubt() -> None:
    limits = Limits(request_timeout_s=1.0)
    with FakeBroker({26: in_turn(SILENCE)}) as broker:
        broker.handlers |= {10: in_turn(coordinator_at(broker))}
        with (
            client_of(broker, limits=limits) as client,
            pytest.raises(OutcomeUnknown, match=r"no answer from .* in time"),
        ):
            client.ask(END, Coordinator("t"))


def test_an_old_broker_is_understood_in_its_own_version() -> None:
    refusal = (
        bytes(4)
        + int(Code.UNSUPPORTED_VERSION).to_bytes(2, "big")
        + bytes.fromhex("00000001 0012 0000 0002")
    )

    def answer(request: Message) -> object:
        known = api_versions(request)
        for api in known.api_keys:
            api.max_version = min(api.max_version, 2) if api.api_key == 18 else api.max_version
        return known

    with FakeBroker({60: in_turn(DescribeClusterResponse(cluster_id="old"))}) as broker:
        broker.handlers[18] = in_turn(len(refusal).to_bytes(4, "big") + refusal, answer(END))
        with client_of(broker) as client:
            assert client.ask(DescribeClusterRequest()).cluster_id == "old"
        assert [version for key, version, _ in broker.seen if key == 18] == [4, 2]
        assert broker.connections == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (bytes.fromhex("1503030002 0228"), "this listener uses TLS"),
        (b"HTTP/1.1 400 Bad Request", "announced a frame of"),
        (bytes.fromhex("ffffffff"), "announced a frame of -1"),
        (bytes.fromhex("00000004 00000063"), "answered request 99, which was not next"),
        (bytes.fromhex("00000008 00000000 ff ff ff ff"), "ApiVersionsResponse"),
    ],
)
def test_a_peer_that_is_no_kafka_is_malformed(answer: bytes, expected: str) -> None:
    with FakeBroker({18: in_turn(answer)}) as broker, client_of(broker) as client:
        with pytest.raises(Malformed) as caught:
            client.ask(DescribeClusterRequest(), timeout_s=30)
        assert expected in str(caught.value)


def test_two_full_pipes_do_not_wait_for_each_other() -> None:
    """Both sides send more than the sockets hold before they read."""
    many = [DescribeClusterBroker(broker_id=n, host="x" * 32_000) for n in range(250)]
    huge = DescribeClusterResponse(brokers=many)
    big = ProduceRequest(
        acks=-1,
        topic_data=[
            TopicProduceData(
                name="orders", partition_data=[PartitionProduceData(records=bytes(8_000_000))]
            )
        ],
    )
    with FakeBroker({60: in_turn(huge), 0: in_turn(produced())}) as broker:
        broker.handlers |= {3: in_turn(metadata(broker))}
        with client_of(broker) as client:
            link = client._any_link(0)  # the raw link, to send without waiting
            under_way = [
                link.send(request, transaction_version=0)
                for request in (DescribeClusterRequest(), big, DescribeClusterRequest(), big)
            ]
            for pending in reversed(under_way):
                assert pending.result().encode(pending.version)


def test_a_session_that_nears_its_end_gets_a_new_connection() -> None:
    sasl = Plain(username="u", password="p")
    with FakeBroker({60: in_turn(DescribeClusterResponse())}) as broker:
        broker.handlers |= {
            17: in_turn(SaslHandshakeResponse(mechanisms=["PLAIN"])),
            36: in_turn(
                SaslAuthenticateResponse(session_lifetime_ms=1),
                SaslAuthenticateResponse(session_lifetime_ms=3_600_000),
            ),
        }
        with client_of(broker, security=Security(sasl=sasl)) as client:
            for _ in range(4):
                client.ask(DescribeClusterRequest())
                time.sleep(0.005)
        assert broker.connections == 2


def test_a_session_that_nears_its_end_is_left_when_its_requests_are_answered() -> None:
    sasl = Plain(username="u", password="p")
    reported = DescribeClusterResponse(cluster_id="c")
    with FakeBroker({60: in_turn(reported)}) as broker:
        broker.handlers |= {
            3: in_turn(metadata(broker)),
            17: in_turn(SaslHandshakeResponse(mechanisms=["PLAIN"])),
            36: in_turn(SaslAuthenticateResponse(session_lifetime_ms=200)),
        }
        with client_of(broker, security=Security(sasl=sasl)) as client:
            under_way = []
            for _ in range(6):
                under_way.append(client.submit(Ask(request=DescribeClusterRequest(), to=Node(1))))
                time.sleep(0.06)
            assert [pending.result() for pending in under_way] == [reported] * 6
        assert broker.connections > 1


def test_a_token_that_can_not_be_had_leaves_no_connection_open() -> None:
    def token() -> str:
        raise RuntimeError("holds a token-secret")

    with FakeBroker({17: in_turn(SaslHandshakeResponse(mechanisms=["OAUTHBEARER"]))}) as broker:
        security = Security(sasl=OAuthBearer(token=token))
        with client_of(broker, security=security) as client, pytest.raises(TryAgain) as caught:
            client.ask(DescribeClusterRequest(), timeout_s=2.0)
        assert "RuntimeError" in caught.value.message
        assert "token-secret" not in str(caught.value)


def test_a_topic_that_is_not_there_is_not_waited_for_long() -> None:
    with FakeBroker({}) as broker:
        missing = metadata(broker, code=Code.UNKNOWN_TOPIC_OR_PARTITION)
        broker.handlers |= {3: in_turn(missing)}
        with client_of(broker) as client:
            with pytest.raises(Misconfigured, match="no topic 'orders'"):
                client.ask(PRODUCE, Leader("orders", 0))
            broker.handlers |= {3: in_turn(metadata(broker))}
            with pytest.raises(TryAgain, match="broker 9 is not there"):
                client.ask(DescribeClusterRequest(), Node(9), timeout_s=2.0)
            with pytest.raises(Misconfigured, match="has no partition 5"):
                client.ask(PRODUCE, Leader("orders", 5))


def test_a_topic_that_was_just_created_is_waited_for_until_all_its_partitions_are_known() -> None:
    with FakeBroker({}) as broker:
        unknown = metadata(broker, code=Code.UNKNOWN_TOPIC_OR_PARTITION)
        without_leader = metadata(broker, code=Code.LEADER_NOT_AVAILABLE)
        whole = metadata(broker)
        second = MetadataResponsePartition(partition_index=1, leader_id=broker.node_id)
        whole.topics[0].partitions.append(second)
        broker.handlers |= {3: in_turn(unknown, without_leader, metadata(broker), whole)}
        with client_of(broker) as client:
            assert client.await_topic("orders", partitions=2).leaders == {0: 1, 1: 1}


def test_every_connection_is_counted_as_a_lane() -> None:
    reported = DescribeClusterResponse()
    with FakeBroker({60: in_turn(reported)}) as broker:
        broker.handlers |= {3: in_turn(metadata(broker))}
        with client_of(broker, lanes=3) as client:
            asks = [Ask(request=DescribeClusterRequest(), to=Node(1)) for _ in range(9)]
            assert client.ask_all(asks) == [reported] * 9
        assert broker.connections == 3


@pytest.mark.parametrize(("level", "spoken"), [(0, 4), (1, 4), (2, 5)])
def test_the_newer_transaction_protocol_is_spoken_only_where_it_is_switched_on(
    level: int, spoken: int
) -> None:
    def about(request: Message) -> ApiVersionsResponse:
        reported = api_versions(request)
        reported.finalized_features_epoch = 7
        reported.finalized_features = [
            FinalizedFeatureKey(name="transaction.version", max_version_level=level)
        ]
        return reported

    with FakeBroker({18: about, 26: in_turn(EndTxnResponse())}) as broker:
        broker.handlers |= {10: in_turn(coordinator_at(broker))}
        with client_of(broker) as client:
            client.ask(END, Coordinator("t"))
            assert client.transaction_version() == level
        assert [version for key, version, _ in broker.seen if key == 26] == [spoken]


def test_versions_that_do_not_meet_are_named() -> None:
    with pytest.raises(Misconfigured, match="supports EndTxnRequest 7 to 9, this client 0 to 5"):
        versions.choose(END, {26: (7, 9)}, transaction_version=2)
    with pytest.raises(Misconfigured, match="does not support EndTxnRequest"):
        versions.choose(END, {}, transaction_version=2)
    assert versions.choose(END, {26: (0, 9)}, transaction_version=2, version_max=3) == 3
    assert versions.choose(ApiVersionsRequest(), {18: (0, 2)}, transaction_version=0) == 2


@pytest.mark.parametrize("text", ["localhost", ":9092", "host:port", "host:0", "host:99999"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Misconfigured):
        Client(text, clock=SystemClock())


def test_addresses_may_be_of_either_kind() -> None:
    assert Address.parse("[::1]:9092") == Address("::1", 9092)
    assert str(Address("::1", 9092)) == "[::1]:9092"
    with pytest.raises(Misconfigured, match="no broker is named"):
        Client(" , ", clock=SystemClock())
