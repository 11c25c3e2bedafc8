"""WriteTxnMarkers: end a transaction in single partitions, for an operator and a hanging one."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.batch_format import Marker
from epochal.kafka.codes import Code
from epochal.kafka.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

VERSIONS = range(1, 3)


def handle(call: Call, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    return WriteTxnMarkersResponse(
        markers=[
            WritableTxnMarkerResult(
                producer_id=marker.producer_id,
                topics=[
                    WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=[
                            WritableTxnMarkerPartitionResult(
                                partition_index=index,
                                error_code=_write(call, marker, topic.name, index),
                            )
                            for index in topic.partition_indexes
                        ],
                    )
                    for topic in marker.topics
                ],
            )
            for marker in request.markers
        ]
    )


def _write(call: Call, wanted: WritableTxnMarker, topic: str, index: int) -> Code:
    partition = call.broker.partition(topic, index)
    if partition is None:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    who = (wanted.producer_id, wanted.producer_epoch)
    code = partition.judge_marker(*who, wanted.coordinator_epoch)
    if code is Code.NONE:
        marker = Marker.COMMIT if wanted.transaction_result else Marker.ABORT
        call.broker.state.write_marker(partition, *who, marker, call.broker.now_ms)
    return code
