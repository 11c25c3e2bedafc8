"""
The ledger of a Hudi table: one entry in the extra metadata of a commit, under the key `epochal`.

A commit of this sink holds what the one before it had, of all pipelines, with its own epoch added:
both are done inside of Hudi's lock. So the newest commit by *completion* that has the key is the
whole ledger, and what archival removes was carried on before. Other writers don't carry it, so
commits without the key are passed over.

    completed   10:00 commit {a: 7}    10:01 compaction    10:02 commit {a: 7, b: 3}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from epochal.errors import require_known_format
from epochal.terms import EpochNumber, Handle, Identity, Mark, Uid

KEY = "epochal"
_FORMAT = 1
_EPOCHS_KEPT = 2


class Ledger:
    """What a table proves of one sink, as one read found it."""

    def __init__(self, identity: Identity, text: str | None) -> None:
        self._identity = identity
        self._entries: dict[str, Any] = {}
        """`<sink>.<uid>` to names and epochs, and each epoch to its handles."""
        if text is not None:
            fields = json.loads(text)
            require_known_format("the ledger in a Hudi commit", fields.get("format"), _FORMAT)
            self._entries = fields["entries"]

    @property
    def _key(self) -> str:
        return f"{self._identity.tag}.{self._identity.uid}"

    @property
    def _epochs(self) -> Mapping[str, Sequence[str]]:
        found: Mapping[str, Sequence[str]] = self._entries.get(self._key, {}).get("epochs", {})
        return found

    def is_done(self, epoch: EpochNumber) -> bool:
        return any(int(known) >= epoch for known in self._epochs)

    def names(self, handle: Handle) -> bool | None:
        named = self._epochs.get(str(handle.epoch))
        return None if named is None else str(handle) in named

    def is_of(self, epoch: EpochNumber, handles: frozenset[Handle]) -> bool:
        named = self._epochs.get(str(epoch))
        return named is not None and set(named) == {str(handle) for handle in handles}

    def marks(self) -> list[Mark]:
        names = self._identity.pipeline, self._identity.sink
        return [
            Mark(
                uid=Uid(key.partition(".")[2]),
                epoch=EpochNumber(max(map(int, entry["epochs"]))),
                run=entry["run"],
            )
            for key, entry in self._entries.items()
            if (entry["pipeline"], entry["sink"]) == names
        ]

    def with_epoch(self, epoch: EpochNumber, handles: Iterable[Handle]) -> str:
        """The ledger that the commit of an epoch carries."""
        epochs = {**self._epochs, str(epoch): sorted(map(str, handles))}
        kept = sorted(epochs, key=int)[-_EPOCHS_KEPT:]
        entry = {
            "pipeline": self._identity.pipeline,
            "sink": self._identity.sink,
            "run": self._identity.run,
            "epochs": {known: epochs[known] for known in kept},
        }
        entries = {**self._entries, self._key: entry}
        return json.dumps({"format": _FORMAT, "entries": entries}, separators=(",", ":"))
