"""CreateAcls: refused, as nobody would check them."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.handlers.describe_acls import NO_AUTHORIZER
from epochal.kafka.codes import Code
from epochal.kafka.messages.create_acls import (
    AclCreationResult,
    CreateAclsRequest,
    CreateAclsResponse,
)

VERSIONS = range(1, 4)


def handle(_call: Call, request: CreateAclsRequest) -> CreateAclsResponse:
    refused = AclCreationResult(error_code=Code.SECURITY_DISABLED, error_message=NO_AUTHORIZER)
    return CreateAclsResponse(results=[refused for _ in request.creations])
