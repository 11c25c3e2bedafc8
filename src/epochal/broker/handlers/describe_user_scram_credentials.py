"""DescribeUserScramCredentials: the users of the listener, and how each may log in by SCRAM."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.sasl import ITERATIONS, SCRAM_TYPES
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_user_scram_credentials import (
    CredentialInfo,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)

VERSIONS = range(1)


def handle(
    call: Call, request: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    known = [] if call.login is None else call.login.user_names()
    mechanisms = () if call.login is None else call.login.mechanisms
    infos = [
        CredentialInfo(mechanism=number, iterations=ITERATIONS)
        for name, number in SCRAM_TYPES.items()
        if name in mechanisms
    ]
    asked = known if not request.users else [user.name for user in request.users]
    return DescribeUserScramCredentialsResponse(
        error_message=None,
        results=[
            DescribeUserScramCredentialsResult(
                user=name, error_message=None, credential_infos=infos
            )
            if name in known and infos
            else _unknown(name)
            for name in asked
            if request.users or infos
        ],
    )


def _unknown(name: str) -> DescribeUserScramCredentialsResult:
    return DescribeUserScramCredentialsResult(
        user=name,
        error_code=Code.RESOURCE_NOT_FOUND,
        error_message=f"Attempt to describe a user credential that does not exist: {name}",
    )
