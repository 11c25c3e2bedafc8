"""Errors of boto3, as ours, which say what the caller may do next; without credentials."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 (boto's own root of them)
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
)
from urllib3.exceptions import HTTPError

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.storage.urls import first_line

_CREDENTIALS_HINT = (
    "credentials come from boto3's usual chain (environment, shared files, the machine's role) or "
    "from storage_options; Files(…).grants() prints the policy that they need"
)
_HINTS = {
    "NoSuchBucket": "the bucket must exist: it is never created",
    "PermanentRedirect": 'name the bucket\'s region: storage_options={"region": …}',
    "AuthorizationHeaderMalformed": 'name the bucket\'s region: storage_options={"region": …}',
    "NotImplemented": 'this server can\'t do it: try uploads="manifest", or leave the option out',
}
_TRANSIENT = frozenset(
    {
        "InternalError",
        "OperationAborted",
        "ConditionalRequestConflict",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
    }
)
_TRANSIENT_KINDS = (
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
)
_DENIED = frozenset({401, 403})
_NOT_IMPLEMENTED = 501


RAISED = (BotoCoreError, ClientError, HTTPError, OSError)
"""All that boto3 raises: where an error's body is cut short, also errors of the layers below."""


def code_of(error: ClientError) -> str:
    return str(_answer(error).get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _answer(error: ClientError) -> dict[str, Any]:
    found: dict[str, Any] = error.response
    return found


def error_of(error: Exception, what: str) -> EpochalError:
    fact = f"{what}: {first_line(str(error))}"
    if isinstance(error, ClientError):
        return _error_of_answer(error, fact)
    if isinstance(error, BotoCoreError) and not isinstance(error, _TRANSIENT_KINDS):
        return Misconfigured(fact, _CREDENTIALS_HINT)
    return TryAgain(fact, "check endpoint_url and region in storage_options, and the network")


def is_denied(error: Exception) -> bool:
    return isinstance(error, ClientError) and _status(error) in _DENIED


def _error_of_answer(error: ClientError, fact: str) -> EpochalError:
    code, status = code_of(error), _status(error)
    if code in _HINTS:
        return Misconfigured(fact, _HINTS[code])
    if code in _TRANSIENT or (status >= 500 and status != _NOT_IMPLEMENTED):
        return TryAgain(fact)
    if status in _DENIED:
        return Misconfigured(fact, _CREDENTIALS_HINT)
    return Misconfigured(fact, "S3 refused this for good: see its own message above")
