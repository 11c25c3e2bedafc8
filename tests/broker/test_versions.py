"""Every version of every request is answered in words that the version has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pyarrow as pa
from table import START_MS, Table

from epochal.broker import handlers
from epochal.kafka import batches, messages
from epochal.kafka.batches import Columns, Producer
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.end_txn import EndTxnRequest
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from epochal.kafka.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from epochal.kafka.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment

PLACES = {"name": "known", "partitions": [0, 9]}
ACLS = {"resource_type_filter": 2, "principal_filter": None, "host_filter": None, "operation": 1}


def requests(table: Table) -> list[Any]:
    """One or more of each kind, with something in every field that any version has."""
    txn = table.broker.state.transactions.ids["txn"]
    who = {
        "transactional_id": "txn",
        "producer_id": txn.producer_id,
        "producer_epoch": txn.producer_epoch,
    }
    old = {f"v3_and_below_{key}": value for key, value in who.items()}
    member = next(iter(table.broker.state.groups.classic.groups["group"].members))
    place = {"partition_index": 0}
    m = messages_of
    return [
        m(
            "produce",
            "ProduceRequest",
            acks=-1,
            topic_data=[
                m(
                    "produce",
                    "TopicProduceData",
                    name=name,
                    partition_data=[
                        m("produce", "PartitionProduceData", index=0, records=b"broken")
                    ],
                )
                for name in ("known", "unknown")
            ],
        ),
        *(
            m(
                "fetch",
                "FetchRequest",
                isolation_level=level,
                max_bytes=1 << 20,
                topics=[
                    m(
                        "fetch",
                        "FetchTopic",
                        topic=name,
                        partitions=[
                            m("fetch", "FetchPartition", partition=0, partition_max_bytes=1 << 20)
                        ],
                    )
                    for name in ("known", "unknown")
                ],
            )
            for level in (0, 1)
        ),
        *(
            m(
                "list_offsets",
                "ListOffsetsRequest",
                topics=[
                    m(
                        "list_offsets",
                        "ListOffsetsTopic",
                        name=name,
                        partitions=[
                            m("list_offsets", "ListOffsetsPartition", timestamp=at, **place)
                        ],
                    )
                    for name in ("known", "unknown")
                ],
            )
            for at in (-1, -2, -3, 0)
        ),
        m("metadata", "MetadataRequest", topics=None),
        m(
            "metadata",
            "MetadataRequest",
            topics=[m("metadata", "MetadataRequestTopic", name=name) for name in ("known", "x/y")],
        ),
        m(
            "offset_commit",
            "OffsetCommitRequest",
            group_id="group",
            member_id=member,
            generation_id_or_member_epoch=1,
            topics=[
                m(
                    "offset_commit",
                    "OffsetCommitRequestTopic",
                    name="known",
                    partitions=[m("offset_commit", "OffsetCommitRequestPartition", **place)],
                )
            ],
        ),
        m(
            "offset_fetch",
            "OffsetFetchRequest",
            group_id="group",
            topics=None,
            groups=[m("offset_fetch", "OffsetFetchRequestGroup", group_id="group", topics=None)],
        ),
        m("find_coordinator", "FindCoordinatorRequest", key="k", coordinator_keys=["k"]),
        m("find_coordinator", "FindCoordinatorRequest", key_type=9, coordinator_keys=["k"]),
        m(
            "join_group",
            "JoinGroupRequest",
            group_id="group",
            session_timeout_ms=10_000,
            protocol_type="consumer",
            group_instance_id="me",
            protocols=[m("join_group", "JoinGroupRequestProtocol", name="range", metadata=b"m")],
        ),
        m("join_group", "JoinGroupRequest", group_id="group", member_id="unknown"),
        m("heartbeat", "HeartbeatRequest", group_id="group", member_id=member, generation_id=1),
        m(
            "leave_group",
            "LeaveGroupRequest",
            group_id="group",
            member_id="x",
            members=[m("leave_group", "MemberIdentity", member_id="x", group_instance_id="y")],
        ),
        m(
            "sync_group",
            "SyncGroupRequest",
            group_id="group",
            member_id=member,
            generation_id=1,
            protocol_type="consumer",
            protocol_name="range",
        ),
        m("describe_groups", "DescribeGroupsRequest", groups=["group", "unknown"]),
        m("list_groups", "ListGroupsRequest"),
        *(
            m(
                "consumer_group_heartbeat",
                "ConsumerGroupHeartbeatRequest",
                group_id=name,
                member_id="newer",
                rebalance_timeout_ms=1_000,
                subscribed_topic_names=["known"],
                topic_partitions=[],
            )
            for name in ("newer", "group")
        ),
        m(
            "consumer_group_describe",
            "ConsumerGroupDescribeRequest",
            group_ids=["newer", "group", "unknown"],
        ),
        m("sasl_handshake", "SaslHandshakeRequest", mechanism="PLAIN"),
        m("api_versions", "ApiVersionsRequest"),
        m(
            "create_topics",
            "CreateTopicsRequest",
            validate_only=True,
            topics=[
                m(
                    "create_topics",
                    "CreatableTopic",
                    name=name,
                    num_partitions=1,
                    replication_factor=1,
                )
                for name in ("new", "known")
            ],
        ),
        m(
            "delete_topics",
            "DeleteTopicsRequest",
            topic_names=["unknown"],
            topics=[m("delete_topics", "DeleteTopicState", name="unknown")],
        ),
        m(
            "delete_records",
            "DeleteRecordsRequest",
            topics=[
                m(
                    "delete_records",
                    "DeleteRecordsTopic",
                    name="known",
                    partitions=[m("delete_records", "DeleteRecordsPartition", **place)],
                )
            ],
        ),
        m("init_producer_id", "InitProducerIdRequest", transactional_id=None),
        m(
            "init_producer_id",
            "InitProducerIdRequest",
            transactional_id="other",
            transaction_timeout_ms=10_000,
        ),
        m(
            "offset_for_leader_epoch",
            "OffsetForLeaderEpochRequest",
            topics=[
                m(
                    "offset_for_leader_epoch",
                    "OffsetForLeaderTopic",
                    topic="known",
                    partitions=[
                        m("offset_for_leader_epoch", "OffsetForLeaderPartition", partition=0)
                    ],
                )
            ],
        ),
        m(
            "add_partitions_to_txn",
            "AddPartitionsToTxnRequest",
            **old,
            v3_and_below_topics=[m("add_partitions_to_txn", "AddPartitionsToTxnTopic", **PLACES)],
            transactions=[
                m(
                    "add_partitions_to_txn",
                    "AddPartitionsToTxnTransaction",
                    **who,
                    topics=[m("add_partitions_to_txn", "AddPartitionsToTxnTopic", **PLACES)],
                )
            ],
        ),
        m("add_offsets_to_txn", "AddOffsetsToTxnRequest", **who, group_id="group"),
        m(
            "txn_offset_commit",
            "TxnOffsetCommitRequest",
            **who,
            group_id="group",
            topics=[
                m(
                    "txn_offset_commit",
                    "TxnOffsetCommitRequestTopic",
                    name="known",
                    partitions=[m("txn_offset_commit", "TxnOffsetCommitRequestPartition", **place)],
                )
            ],
        ),
        m("end_txn", "EndTxnRequest", **{**who, "producer_epoch": 99}),
        m(
            "write_txn_markers",
            "WriteTxnMarkersRequest",
            markers=[
                m(
                    "write_txn_markers",
                    "WritableTxnMarker",
                    producer_id=777,
                    topics=[
                        m(
                            "write_txn_markers",
                            "WritableTxnMarkerTopic",
                            name="known",
                            partition_indexes=[1, 9],
                        )
                    ],
                )
            ],
        ),
        m(
            "describe_configs",
            "DescribeConfigsRequest",
            include_synonyms=True,
            resources=[
                m(
                    "describe_configs",
                    "DescribeConfigsResource",
                    resource_type=kind,
                    resource_name="known",
                    configuration_keys=None,
                )
                for kind in (2, 4, 9)
            ],
        ),
        m(
            "alter_configs",
            "AlterConfigsRequest",
            resources=[
                m(
                    "alter_configs",
                    "AlterConfigsResource",
                    resource_type=kind,
                    resource_name="known",
                )
                for kind in (2, 4)
            ],
        ),
        m("sasl_authenticate", "SaslAuthenticateRequest"),
        m(
            "create_partitions",
            "CreatePartitionsRequest",
            validate_only=True,
            topics=[
                m("create_partitions", "CreatePartitionsTopic", name="known", count=count)
                for count in (1, 5)
            ],
        ),
        m("delete_groups", "DeleteGroupsRequest", groups_names=["group", "unknown"]),
        m(
            "incremental_alter_configs",
            "IncrementalAlterConfigsRequest",
            resources=[
                m(
                    "incremental_alter_configs",
                    "AlterConfigsResource",
                    resource_type=2,
                    resource_name=name,
                )
                for name in ("known", "unknown")
            ],
        ),
        m("describe_cluster", "DescribeClusterRequest"),
        m(
            "describe_producers",
            "DescribeProducersRequest",
            topics=[
                m("describe_producers", "TopicRequest", name="known", partition_indexes=[0, 9])
            ],
        ),
        m(
            "describe_transactions",
            "DescribeTransactionsRequest",
            transactional_ids=["txn", "unknown"],
        ),
        m("list_transactions", "ListTransactionsRequest", state_filters=["Ongoing", "x"]),
        m("describe_acls", "DescribeAclsRequest", **ACLS),
        m(
            "create_acls",
            "CreateAclsRequest",
            creations=[m("create_acls", "AclCreation", resource_type=2, resource_name="known")],
        ),
        m(
            "delete_acls",
            "DeleteAclsRequest",
            filters=[m("delete_acls", "DeleteAclsFilter", **ACLS)],
        ),
        *(
            m(
                "alter_replica_log_dirs",
                "AlterReplicaLogDirsRequest",
                dirs=[
                    m(
                        "alter_replica_log_dirs",
                        "AlterReplicaLogDir",
                        path=path,
                        topics=[m("alter_replica_log_dirs", "AlterReplicaLogDirTopic", **PLACES)],
                    )
                ],
            )
            for path in (table.disk.folder, "elsewhere")
        ),
        m("describe_log_dirs", "DescribeLogDirsRequest", topics=None),
        m(
            "describe_log_dirs",
            "DescribeLogDirsRequest",
            topics=[
                m("describe_log_dirs", "DescribableLogDirTopic", topic=name, partitions=[0, 9])
                for name in ("known", "unknown")
            ],
        ),
        m(
            "elect_leaders",
            "ElectLeadersRequest",
            topic_partitions=[
                m("elect_leaders", "TopicPartitions", topic="known", partitions=[0, 9])
            ],
        ),
        m("elect_leaders", "ElectLeadersRequest", topic_partitions=None),
        m(
            "alter_partition_reassignments",
            "AlterPartitionReassignmentsRequest",
            topics=[
                m(
                    "alter_partition_reassignments",
                    "ReassignableTopic",
                    name="known",
                    partitions=[
                        m(
                            "alter_partition_reassignments",
                            "ReassignablePartition",
                            partition_index=index,
                            replicas=replicas,
                        )
                        for index in (0, 9)
                        for replicas in (None, [1], [7])
                    ],
                )
            ],
        ),
        m("list_partition_reassignments", "ListPartitionReassignmentsRequest", topics=None),
        m(
            "list_partition_reassignments",
            "ListPartitionReassignmentsRequest",
            topics=[
                m(
                    "list_partition_reassignments",
                    "ListPartitionReassignmentsTopics",
                    name="known",
                    partition_indexes=[0, 9],
                )
            ],
        ),
        *(
            m(
                "offset_delete",
                "OffsetDeleteRequest",
                group_id=group,
                topics=[
                    m(
                        "offset_delete",
                        "OffsetDeleteRequestTopic",
                        name=name,
                        partitions=[m("offset_delete", "OffsetDeleteRequestPartition", **place)],
                    )
                    for name in ("known", "unknown")
                ],
            )
            for group in ("group", "unknown")
        ),
        m(
            "describe_client_quotas",
            "DescribeClientQuotasRequest",
            components=[m("describe_client_quotas", "ComponentData", entity_type="user")],
        ),
        m(
            "describe_user_scram_credentials",
            "DescribeUserScramCredentialsRequest",
            users=[m("describe_user_scram_credentials", "UserName", name="nobody")],
        ),
        m(
            "describe_quorum",
            "DescribeQuorumRequest",
            topics=[
                m(
                    "describe_quorum",
                    "TopicData",
                    topic_name=name,
                    partitions=[m("describe_quorum", "PartitionData", **place)],
                )
                for name in ("__cluster_metadata", "known")
            ],
        ),
        m("list_config_resources", "ListConfigResourcesRequest"),
        m(
            "describe_topic_partitions",
            "DescribeTopicPartitionsRequest",
            topics=[
                m("describe_topic_partitions", "TopicRequest", name=name)
                for name in ("known", "unknown")
            ],
            response_partition_limit=1,
        ),
    ]


def messages_of(module: str, kind: str, /, **fields: Any) -> Any:
    return getattr(import_module(f"epochal.kafka.messages.{module}"), kind)(**fields)


def lived_in() -> Table:
    """A broker with a bit of everything."""
    table = Table()
    wanted = CreatableTopic(name="known", num_partitions=2, replication_factor=1)
    table.ask(CreateTopicsRequest(topics=[wanted]))
    for commit in (False, None):
        given = table.ask(
            InitProducerIdRequest(transactional_id="txn", transaction_timeout_ms=60_000)
        )
        who = Producer(
            producer_id=given.producer_id,
            producer_epoch=given.producer_epoch,
            base_sequence=0,
            is_transactional=True,
        )
        rows = Columns(value=pa.array([b"row"], pa.binary()))
        records = b"".join(batches.encode(rows, default_timestamp_ms=START_MS, producer=who))
        part = PartitionProduceData(index=0, records=records)
        topic = TopicProduceData(name="known", partition_data=[part])
        table.ask(ProduceRequest(transactional_id="txn", acks=-1, topic_data=[topic]))
        if commit is not None:
            end = EndTxnRequest(
                transactional_id="txn",
                producer_id=given.producer_id,
                producer_epoch=given.producer_epoch,
                committed=commit,
            )
            table.ask(end)
    joining = JoinGroupRequest(
        group_id="group",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        group_instance_id="me",
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
    )
    joined = table.ask(joining)
    mine = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=b"a")
    table.ask(
        SyncGroupRequest(
            group_id="group",
            generation_id=1,
            member_id=joined.member_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[mine],
        )
    )
    place = OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    table.ask(
        OffsetCommitRequest(
            group_id="group",
            member_id=joined.member_id,
            generation_id_or_member_epoch=1,
            topics=[OffsetCommitRequestTopic(name="known", partitions=[place])],
        )
    )
    return table


def test_every_version_is_answered_in_its_own_words() -> None:
    table = lived_in()
    asked = set()
    for request in requests(table):
        for version in handlers.table()[request.API_KEY].versions:
            answer = table.ask(request, version)
            assert answer is not None, (request, version)
            asked.add(request.API_KEY)
            table.ask(type(request)(), version)
    assert asked == set(messages.APIS)


def test_the_table_of_versions_names_every_request() -> None:
    rows = handlers.rows()
    assert [row[0] for row in rows] == sorted(messages.APIS)
    assert (26, "EndTxn", "0 to 5", "from 5") in rows
