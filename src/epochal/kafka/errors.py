"""Error codes of brokers, by the error of this package that each becomes.

A caller that knows more about its request (the answer to a repeated EndTxn, say) reads the code
itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from epochal.errors import (
    EpochalError,
    Fenced,
    Misconfigured,
    OutcomeUnknown,
    RowRejected,
    TryAgain,
)
from epochal.kafka.codes import RETRIABLE, Code


class BrokerRefused(EpochalError):
    """A broker refused a request for good. It changed nothing."""

    code = "broker-refused"


MOVED = frozenset(
    (
        Code.NOT_COORDINATOR,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.NOT_LEADER_OR_FOLLOWER,
        Code.LEADER_NOT_AVAILABLE,
        Code.REPLICA_NOT_AVAILABLE,
        Code.FENCED_LEADER_EPOCH,
        Code.UNKNOWN_LEADER_EPOCH,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.UNKNOWN_TOPIC_ID,
        Code.INCONSISTENT_TOPIC_ID,
        Code.KAFKA_STORAGE_ERROR,
        Code.NOT_CONTROLLER,
    )
)
"""
Another broker is the leader or coordinator now: ask that one.

A read did nothing. A write may have been appended before its leader or coordinator changed, and
these codes don't say so: only a request that is safe to repeat (EndTxn of one producer epoch, a
Produce with a sequence number) may be sent again.
"""

BUSY = frozenset(
    (
        Code.COORDINATOR_LOAD_IN_PROGRESS,
        Code.CONCURRENT_TRANSACTIONS,
        Code.THROTTLING_QUOTA_EXCEEDED,
        Code.NOT_ENOUGH_REPLICAS,
        Code.UNSTABLE_OFFSET_COMMIT,
        Code.OFFSET_NOT_AVAILABLE,
        Code.PREFERRED_LEADER_NOT_AVAILABLE,
        Code.ELIGIBLE_LEADERS_NOT_AVAILABLE,
    )
)
"""Nothing happened, and the same broker may be asked again."""

MAY_HAVE_HAPPENED = frozenset(
    (
        Code.UNKNOWN_SERVER_ERROR,
        Code.REQUEST_TIMED_OUT,
        Code.NETWORK_EXCEPTION,
        Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    )
)
"""Kafka's own client retries most of these; that alone does not make it safe."""

_FENCING = frozenset(
    (
        Code.PRODUCER_FENCED,
        Code.INVALID_PRODUCER_EPOCH,
        Code.TRANSACTION_COORDINATOR_FENCED,
        Code.FENCED_INSTANCE_ID,
    )
)
_ROWS = frozenset(
    (
        Code.MESSAGE_TOO_LARGE,
        Code.RECORD_LIST_TOO_LARGE,
        Code.INVALID_RECORD,
        Code.INVALID_TIMESTAMP,
    )
)
DENIED = frozenset(
    (
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Code.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    )
)
"""A right is missing."""
GRANTS = "`epochal grants PIPELINE` prints the commands that grant what this sink needs"
_FOR_A_PERSON = frozenset(
    (
        Code.SASL_AUTHENTICATION_FAILED,
        Code.UNSUPPORTED_SASL_MECHANISM,
        Code.ILLEGAL_SASL_STATE,
        Code.SECURITY_DISABLED,
        Code.INVALID_TOPIC_EXCEPTION,
        Code.INVALID_REQUIRED_ACKS,
        Code.INVALID_TRANSACTION_TIMEOUT,
        Code.INVALID_REPLICATION_FACTOR,
        Code.INVALID_PARTITIONS,
        Code.INVALID_CONFIG,
        Code.POLICY_VIOLATION,
        Code.UNSUPPORTED_VERSION,
        Code.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        Code.UNSUPPORTED_COMPRESSION_TYPE,
    )
)
_HINTS: Mapping[int, str] = {
    Code.SASL_AUTHENTICATION_FAILED: "check username=, password= and sasl_mechanism=",
    Code.ILLEGAL_SASL_STATE: "this listener wants no login: leave username= and password= out, or "
    "name the listener that does",
    Code.INVALID_TOPIC_EXCEPTION: "a topic has up to 249 letters, digits, dots, underscores and "
    "dashes",
}


def code_name(code: int) -> str:
    """The code's name; the number itself for codes of newer brokers."""
    try:
        return Code(code).name
    except ValueError:
        return f"error code {code}"


def is_transient(code: int) -> bool:
    """Whether the same request may succeed later, perhaps at another broker."""
    return code in MOVED or code in BUSY


def error_for(
    code: int, about: str, broker_message: str | None = None, *, is_read: bool = False
) -> EpochalError:
    """The error to raise for a code. `about` names the request, and never holds a secret."""
    message = f"{about}: {code_name(code)}" + (f" ({broker_message})" if broker_message else "")
    if (code in MAY_HAVE_HAPPENED or code in MOVED) and not is_read:
        return OutcomeUnknown(message)
    if code in _FENCING:
        return Fenced(message)
    if code in _ROWS:
        return RowRejected(message)
    if code in DENIED or code in _FOR_A_PERSON:
        for_good = _HINTS.get(code, "the brokers refuse it for good: see their settings and logs")
        return Misconfigured(message, GRANTS if code in DENIED else for_good)
    if is_transient(code) or code in RETRIABLE or code in MAY_HAVE_HAPPENED:
        return TryAgain(message)
    return BrokerRefused(message)


def require_ok(code: int, about: str, broker_message: str | None = None) -> None:
    """Raise unless the code is NONE."""
    if code != Code.NONE:
        raise error_for(code, about, broker_message)
