"""EndTxn: commit or abort. The answer leaves once the decision is durable."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse

VERSIONS = range(6)
NEWER_FROM = 5
_FENCED_FROM = 2


def handle(call: Call, request: EndTxnRequest) -> EndTxnResponse:
    if not request.transactional_id:
        return EndTxnResponse(error_code=Code.INVALID_REQUEST)
    is_newer = call.version >= NEWER_FROM
    code, producer_id, epoch = call.broker.state.transactions.end(
        (request.transactional_id, request.producer_id, request.producer_epoch),
        is_commit=request.committed,
        is_v2=is_newer,
        now_ms=call.broker.now_ms,
    )
    if is_newer:
        return EndTxnResponse(error_code=code, producer_id=producer_id, producer_epoch=epoch)
    if code is Code.PRODUCER_FENCED and call.version < _FENCED_FROM:
        code = Code.INVALID_PRODUCER_EPOCH
    return EndTxnResponse(error_code=code)
