"""DeleteAcls: refused, as there are none."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.handlers.describe_acls import NO_AUTHORIZER
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_acls import (
    DeleteAclsFilterResult,
    DeleteAclsRequest,
    DeleteAclsResponse,
)

VERSIONS = range(1, 4)


def handle(_call: Call, request: DeleteAclsRequest) -> DeleteAclsResponse:
    refused = DeleteAclsFilterResult(error_code=Code.SECURITY_DISABLED, error_message=NO_AUTHORIZER)
    return DeleteAclsResponse(filter_results=[refused for _ in request.filters])
