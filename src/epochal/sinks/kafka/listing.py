"""What is in doubt at the brokers: open transactions under the ids of this sink."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from epochal.errors import EpochalError
from epochal.kafka.client import Client
from epochal.kafka.messages.describe_transactions import TransactionState
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.sinks.kafka import ending, proof
from epochal.sinks.kafka.every_broker import ask_every_broker
from epochal.sinks.kafka.names import Names
from epochal.sinks.kafka.tokens import Open
from epochal.terms import NO_ROWS, Handle, InDoubt, Receipt

_PATTERN_FROM = 2
"""The version of ListTransactions that takes a pattern; others list all."""


def listed(client: Client, names: Names, whose: Callable[[str, Open], Handle]) -> list[InDoubt]:
    """What is open now; `whose` says of an id and its transaction which attempt left it."""
    ids = open_ids(client, names)
    found = []
    for name, told in zip(ids, ending.describe(client, ids), strict=True):
        if isinstance(told, EpochalError):
            raise told
        if told.transaction_state == proof.ONGOING:
            txn = _open(name, told, is_v2=client.transaction_version() >= 2)
            found.append(_in_doubt(txn, whose(name, txn), told.transaction_start_time_ms))
    return found


def open_ids(client: Client, names: Names) -> list[str]:
    """Ids of this sink with an open transaction; each broker lists those it looks after."""
    spoken = client.spoken(ListTransactionsRequest.API_KEY)[1]
    if spoken < 0:
        return []
    ours = f"{re.escape(names.ours)}.*"
    pattern = ours if spoken >= _PATTERN_FROM else None
    request = ListTransactionsRequest(
        state_filters=[proof.ONGOING], transactional_id_pattern=pattern
    )
    answers = ask_every_broker(client, request, "listing transactions")
    ids = [one.transactional_id for answer in answers for one in answer.transaction_states]
    return sorted({name for name in ids if names.parse(name) is not None})


def _open(name: str, told: TransactionState, *, is_v2: bool) -> Open:
    return Open(
        transactional_id=name,
        producer_id=told.producer_id,
        producer_epoch=told.producer_epoch,
        is_v2=is_v2,
        timeout_ms=told.transaction_timeout_ms,
    )


def _in_doubt(txn: Open, handle: Handle, began_ms: int) -> InDoubt:
    return InDoubt(
        name=txn.transactional_id,
        handle=handle,
        age_s=max(0.0, time.time() - began_ms / 1000),
        receipt=Receipt(handle=handle, fingerprint=NO_ROWS, token=txn.to_token()),
        blocks="readers of its partitions that read committed records only",
    )
