"""AlterReplicaLogDirs: there is one folder, where every partition is."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)

VERSIONS = range(1, 3)


def handle(call: Call, request: AlterReplicaLogDirsRequest) -> AlterReplicaLogDirsResponse:
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirTopicResult(
                topic_name=topic.name,
                partitions=[
                    AlterReplicaLogDirPartitionResult(
                        partition_index=index,
                        error_code=_code(call, wanted.path, topic.name, index),
                    )
                    for index in topic.partitions
                ],
            )
            for wanted in request.dirs
            for topic in wanted.topics
        ]
    )


def _code(call: Call, path: str, topic: str, index: int) -> Code:
    if path != call.broker.store.folder:
        return Code.LOG_DIR_NOT_FOUND
    is_known = call.broker.partition(topic, index) is not None
    return Code.NONE if is_known else Code.UNKNOWN_TOPIC_OR_PARTITION
