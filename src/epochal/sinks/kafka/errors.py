"""Error codes common to the requests of this sink: missing rights, ended transactions."""

from __future__ import annotations

from typing import TypeAlias

from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka.codes import Code
from epochal.kafka.errors import GRANTS, code_name, require_ok
from epochal.sinks.kafka.receipts import OpenTransaction

Right: TypeAlias = tuple[str, str]
"""An operation, by its name in ACLs, and the name of the resource."""

ENDED = frozenset(
    (
        Code.PRODUCER_FENCED,
        Code.INVALID_PRODUCER_EPOCH,
        Code.INVALID_PRODUCER_ID_MAPPING,
        Code.INVALID_TXN_STATE,
        Code.TRANSACTION_ABORTABLE,
        Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Code.UNKNOWN_PRODUCER_ID,
    )
)
"""The transaction no longer belongs to the caller: it timed out, or another process aborted it."""


class TransactionEnded(TryAgain):
    """
    Another process or a timeout ended a transaction before it was complete; no row became visible.

    Never `Fenced`: the code is about this transaction only, not about the driver.
    """


def require_rights(
    code: int,
    *,
    topic: Right | None = None,
    group: Right | None = None,
    transactional_id: Right | None = None,
) -> None:
    """Raise `Misconfigured` where the code means that the request lacks a right."""
    denied: dict[int, tuple[str, Right | None]] = {
        Code.TOPIC_AUTHORIZATION_FAILED: ("topic", topic),
        Code.GROUP_AUTHORIZATION_FAILED: ("group", group),
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: ("transactional id", transactional_id),
    }
    kind, needed = denied.get(code, ("", None))
    if needed is not None:
        operation, name = needed
        raise Misconfigured(f"the right {operation} on the {kind} {name} is missing", GRANTS)


class TopicGone(OutcomeUnknown):
    """The topic whose offsets were to be committed does not exist any more."""


def require_ongoing(code: int, txn: OpenTransaction, about: str) -> None:
    """Raise where the code means that a transaction has ended, or any other error."""
    require_rights(code, transactional_id=("Write", txn.transactional_id))
    if code in ENDED:
        seconds = f"it has {txn.timeout_ms / 1000:.0f} s: " if txn.timeout_ms else ""
        raise TransactionEnded(
            f"{about}: {code_name(code)}: the transaction {txn.transactional_id} was ended by "
            "another process or by its timeout",
            f"{seconds}a longer transaction_timeout_s, or smaller epochs",
        )
    if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        raise TopicGone(f"{about}: {code_name(code)}")
    require_ok(code, about)
