"""SaslAuthenticate: one exchange of a SASL mechanism.

Checking a password takes milliseconds on purpose, so that is done beside the loop. A failure is
answered late, and the connection is closed behind it: guessing passwords takes as long.
"""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.sasl import Login, LoginFailed
from epochal.kafka.codes import Code
from epochal.kafka.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)

VERSIONS = range(3)


def handle(call: Call, request: SaslAuthenticateRequest) -> SaslAuthenticateResponse | None:
    login = call.login
    if login is None or not login.has_begun:
        return SaslAuthenticateResponse(
            error_code=Code.ILLEGAL_SASL_STATE, error_message="SaslHandshake comes first"
        )
    later = call.later()

    def then(answer: SaslAuthenticateResponse) -> None:
        if answer.error_code:
            delay_ms = call.broker.settings.login_failure_delay_ms
            call.broker.limit_reached("login_failure_delay_ms")
            later.after(delay_ms, lambda: later.answer(answer), lambda: None)
        else:
            later.answer(answer)

    call.broker.aside(lambda: _answer(login, request.auth_bytes), then)
    return None


def _answer(login: Login, message: bytes) -> SaslAuthenticateResponse:
    try:
        reply = login.answer(message)
    except LoginFailed as failed:
        return SaslAuthenticateResponse(
            error_code=Code.SASL_AUTHENTICATION_FAILED, error_message=str(failed)
        )
    return SaslAuthenticateResponse(error_message=None, auth_bytes=reply)
