"""SaslAuthenticate: one exchange of a SASL mechanism."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.sasl import LoginFailed
from epochal.kafka.codes import Code
from epochal.kafka.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)

VERSIONS = range(3)


def handle(call: Call, request: SaslAuthenticateRequest) -> SaslAuthenticateResponse:
    if call.login is None or not call.login.has_begun:
        return SaslAuthenticateResponse(
            error_code=Code.ILLEGAL_SASL_STATE, error_message="SaslHandshake comes first"
        )
    try:
        reply = call.login.answer(request.auth_bytes)
    except LoginFailed as failed:
        return SaslAuthenticateResponse(
            error_code=Code.SASL_AUTHENTICATION_FAILED, error_message=str(failed)
        )
    return SaslAuthenticateResponse(error_message=None, auth_bytes=reply)
