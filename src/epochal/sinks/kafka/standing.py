"""How many transactions stand, by the word of their coordinators: before a decision, and after."""

from __future__ import annotations

import time
from collections.abc import Sequence

from epochal.errors import EpochalError, OutcomeUnknown, TryAgain
from epochal.kafka import faults
from epochal.kafka.client import Client
from epochal.kafka.versions import NotSpoken
from epochal.sinks.kafka import ending, proof
from epochal.sinks.kafka.tokens import Open
from epochal.terms import EpochNumber

_VISIBLE_WITHIN_S = 5.0
"""How long a commit waits for its markers: what is acknowledged can't be undone any more."""
_POLL_S = (0.001, 0.002, 0.004, 0.008, 0.016)


def require_open(client: Client, epoch: EpochNumber, txns: Sequence[Open]) -> None:
    """Raise where one has ended already. Of brokers that can't tell, nothing is asked."""
    answers = ending.describe(client, [txn.transactional_id for txn in txns])
    for txn, told in zip(txns, answers, strict=True):
        if isinstance(told, NotSpoken):
            continue
        if isinstance(told, OutcomeUnknown):
            raise TryAgain(told.message, told.hint)
        if isinstance(told, EpochalError):
            raise told
        if not proof.is_open(told, txn):
            raise TryAgain(
                f"epoch {epoch}: the transaction {txn.transactional_id} is no longer open "
                f"({told.transaction_state or faults.name_of(told.error_code)}); nothing was "
                "decided",
                f"it had {txn.timeout_ms / 1000:.0f} s: smaller epochs, or a longer "
                "transaction_timeout_s",
            )


def is_open(client: Client, txn: Open) -> bool:
    (told,) = ending.describe(client, [txn.transactional_id])
    return not isinstance(told, EpochalError) and proof.is_open(told, txn)


def still_open(client: Client, txns: Sequence[Open]) -> list[Open]:
    """Those that are; of brokers that can't tell, all."""
    answers = ending.describe(client, [txn.transactional_id for txn in txns])
    found = []
    for txn, told in zip(txns, answers, strict=True):
        if isinstance(told, EpochalError) and not isinstance(told, NotSpoken):
            raise told
        if isinstance(told, NotSpoken) or proof.is_open(told, txn):
            found.append(txn)
    return found


def await_visible(client: Client, txns: Sequence[Open]) -> None:
    """Markers follow an acknowledged commit within milliseconds: readers see it after them."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    left, turn = list(txns), 0
    while left:
        answers = ending.describe(client, [txn.transactional_id for txn in left])
        left = [
            txn
            for txn, told in zip(left, answers, strict=True)
            if not isinstance(told, EpochalError) and not proof.is_complete(told, txn)
        ]
        if left and time.monotonic() > deadline:
            return
        if left:
            time.sleep(_POLL_S[min(turn, len(_POLL_S) - 1)])
            turn += 1
