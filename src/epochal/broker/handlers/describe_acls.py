"""DescribeAcls: there are none, as nobody checks them."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse

VERSIONS = range(1, 4)
NO_AUTHORIZER = "No Authorizer is configured."


def handle(_call: Call, _request: DescribeAclsRequest) -> DescribeAclsResponse:
    return DescribeAclsResponse(error_code=Code.SECURITY_DISABLED, error_message=NO_AUTHORIZER)
