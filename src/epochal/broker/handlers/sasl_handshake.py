"""SaslHandshake: choose how to authenticate."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse

VERSIONS = range(2)


def handle(call: Call, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    if call.login is None:
        return SaslHandshakeResponse(error_code=Code.ILLEGAL_SASL_STATE)
    known = list(call.login.mechanisms)
    if not call.login.begin(request.mechanism):
        code = Code.UNSUPPORTED_SASL_MECHANISM
        return SaslHandshakeResponse(error_code=code, mechanisms=known)
    return SaslHandshakeResponse(mechanisms=known)
