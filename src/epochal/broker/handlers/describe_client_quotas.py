"""DescribeClientQuotas: there are none."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.messages.describe_client_quotas import (
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)

VERSIONS = range(2)


def handle(_call: Call, _request: DescribeClientQuotasRequest) -> DescribeClientQuotasResponse:
    return DescribeClientQuotasResponse(error_message=None, entries=[])
