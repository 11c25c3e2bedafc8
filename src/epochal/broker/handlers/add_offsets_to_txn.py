"""AddOffsetsToTxn: add a group's offsets to a transaction, or begin one."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.add_offsets_to_txn import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
)

VERSIONS = range(5)
_FENCED_FROM = 2


def handle(call: Call, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
    who = (request.transactional_id, request.producer_id, request.producer_epoch)
    if not request.transactional_id or not request.group_id:
        return AddOffsetsToTxnResponse(error_code=Code.INVALID_REQUEST)
    transactions = call.broker.state.transactions
    code = transactions.add(who, (), (request.group_id,), call.broker.now_ms)
    if code is Code.PRODUCER_FENCED and call.version < _FENCED_FROM:
        code = Code.INVALID_PRODUCER_EPOCH
    return AddOffsetsToTxnResponse(error_code=code)
