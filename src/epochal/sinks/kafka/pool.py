"""The pool: transactional ids that the first attempts of tasks use from epoch to epoch.

A transaction is named by producer id and epoch, so each needs an epoch of its own. In the newer
protocol the end of one transaction gives the next epoch along; in the older one, and wherever it is
not certain who may still hold the last epoch, the driver begins the id anew, all at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from epochal.errors import EpochalError
from epochal.kafka.client import Client
from epochal.kafka.codes import Code
from epochal.kafka.messages.end_txn import EndTxnResponse
from epochal.sinks.kafka import ending
from epochal.sinks.kafka.names import Names, Slot
from epochal.sinks.kafka.tokens import Open
from epochal.terms import Receipt

SLOTS_MAX = 1024


class Pool:
    """Of one driver. As large as the last epoch had tasks; a first epoch has none."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._size = 0
        self._clean: dict[int, tuple[int, int]] = {}
        """Slots whose next producer epoch nobody else can know."""

    def ready(
        self, client: Client, *, timeout_ms: int, held: Collection[str]
    ) -> Mapping[int, tuple[int, int]]:
        """A producer epoch for each slot but those whose id is held; what fails is left out."""
        found, self._clean = self._clean, {}
        missing = [
            number
            for number in range(self._size)
            if number not in found and self._names.slot(number) not in held
        ]
        starts = [
            ending.Start(transactional_id=self._names.slot(number), timeout_ms=timeout_ms)
            for number in missing
        ]
        answers = ending.start(client, starts) if starts else []
        for number, answer in zip(missing, answers, strict=True):
            if not isinstance(answer, EpochalError) and answer.error_code == Code.NONE:
                found[number] = (answer.producer_id, answer.producer_epoch)
        return {number: found[number] for number in sorted(found)}

    def fit(self, receipts: Sequence[Receipt]) -> None:
        """Learn how many tasks an epoch has."""
        if receipts:
            most = 1 + max(receipt.handle.partition for receipt in receipts)
            self._size = min(most, SLOTS_MAX)

    def ended(self, txn: Open, answer: EndTxnResponse) -> None:
        """A commit was acknowledged: its producer epoch is over, and the next one is known."""
        named = self._names.parse(txn.transactional_id)
        is_mine = isinstance(named, Slot) and named.generation == self._names.identity.generation
        if is_mine and txn.is_v2 and answer.producer_id >= 0 and isinstance(named, Slot):
            self._clean[named.number] = (answer.producer_id, answer.producer_epoch)

    def forget(self) -> None:
        self._clean.clear()
