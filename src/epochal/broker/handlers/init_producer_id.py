"""InitProducerId: a producer id and epoch; the previous holder of the id is fenced."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.transactions import Given
from epochal.kafka.codes import Code
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

VERSIONS = range(6)
_FENCED_FROM = 4
"""Clients before this version know only INVALID_PRODUCER_EPOCH."""


def handle(call: Call, request: InitProducerIdRequest) -> InitProducerIdResponse:
    code, producer_id, epoch = _given(call, request)
    if code is Code.PRODUCER_FENCED and call.version < _FENCED_FROM:
        code = Code.INVALID_PRODUCER_EPOCH
    return InitProducerIdResponse(error_code=code, producer_id=producer_id, producer_epoch=epoch)


def _given(call: Call, request: InitProducerIdRequest) -> Given:
    state = call.broker.state
    has_id, has_epoch = request.producer_id >= 0, request.producer_epoch >= 0
    if has_id != has_epoch:
        return Given(Code.INVALID_REQUEST)
    if request.transactional_id is None:
        return Given(Code.NONE, state.new_producer_id(), 0)
    if not request.transactional_id:
        return Given(Code.INVALID_REQUEST)
    expected = (request.producer_id, request.producer_epoch) if has_id else None
    return state.transactions.init(
        request.transactional_id, request.transaction_timeout_ms, expected, call.broker.now_ms
    )
