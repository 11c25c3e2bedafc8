"""ApiVersions: the requests this broker supports, and the features switched on."""

from __future__ import annotations

from epochal.broker import handlers
from epochal.broker.broker import FEATURE, FEATURE_MAX, Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.api_versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)

VERSIONS = range(5)
_FEATURES_FROM = 3
_GROUP_FEATURE = "group.version"
"""1: the newer consumer protocol."""
_ZERO_ALLOWED_FROM = 4
"""Clients before this version stumble over a feature whose lowest version is zero."""


def handle(call: Call, _: ApiVersionsRequest) -> ApiVersionsResponse:
    answer = ApiVersionsResponse(api_keys=supported(is_newer=call.broker.is_newer_protocol))
    if call.version < _FEATURES_FROM:
        return answer
    level = call.broker.settings.transaction_version
    lowest = 0 if call.version >= _ZERO_ALLOWED_FROM else 1
    answer.supported_features = [
        SupportedFeatureKey(name=name, min_version=lowest, max_version=highest)
        for name, highest in ((_GROUP_FEATURE, 1), (FEATURE, FEATURE_MAX))
    ]
    answer.finalized_features_epoch = 1
    answer.finalized_features = [
        FinalizedFeatureKey(name=name, max_version_level=now, min_version_level=now)
        for name, now in ((_GROUP_FEATURE, 1), (FEATURE, level))
        if now > 0
    ]
    return answer


def supported(*, is_newer: bool) -> list[ApiVersion]:
    result: list[ApiVersion] = []
    for api_key, handler in handlers.table().items():
        low, high = handler.supported(is_newer_protocol=is_newer)
        result.append(ApiVersion(api_key=api_key, min_version=low, max_version=high))
    return result


def too_new(*, is_newer: bool) -> ApiVersionsResponse:
    """The answer, in the format of version 0, to a version that is not known here."""
    return ApiVersionsResponse(
        error_code=Code.UNSUPPORTED_VERSION, api_keys=supported(is_newer=is_newer)
    )
