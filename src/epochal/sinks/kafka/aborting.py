"""Aborts what tasks left open.

An abort begins the id anew instead of ending the transaction: a task that wakes up late then finds
itself fenced and can't open it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from epochal.errors import EpochalError, TryAgain
from epochal.kafka import faults
from epochal.kafka.client import Client
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_transactions import DescribeTransactionsRequest
from epochal.kafka.messages.init_producer_id import InitProducerIdResponse
from epochal.sinks.kafka import ending, standing
from epochal.sinks.kafka.tokens import Open

_ABORTED = (Code.NONE, Code.PRODUCER_FENCED, Code.INVALID_PRODUCER_EPOCH)
"""Fenced: it was aborted, by this very request the first time it was asked."""


def abort(client: Client, txns: Sequence[Open], timeout_ms: int) -> None:
    """Begin each id anew, if its transaction is still the one that is meant."""
    starts = [
        ending.Start(
            transactional_id=txn.transactional_id,
            timeout_ms=timeout_ms,
            expected=(txn.producer_id, txn.producer_epoch),
        )
        for txn in standing.still_open(client, txns)
    ]
    answers = ending.start(client, starts)
    if client.speaks(DescribeTransactionsRequest.API_KEY):
        # How they stand now counts, not what was answered: a lost reply may have been a good one,
        # and at the last producer epoch Apache Kafka aborts and answers UNKNOWN_SERVER_ERROR.
        still = standing.still_open(client, txns)
        if not still:
            return
        _require_answered(answers)
        raise TryAgain(f"{still[0].transactional_id} is still open")
    _require_answered(answers)


def _require_answered(answers: Sequence[InitProducerIdResponse | EpochalError]) -> None:
    for answer in answers:
        if isinstance(answer, EpochalError):
            raise answer
        if answer.error_code not in _ABORTED:
            faults.check(answer.error_code, "aborting a transaction")
