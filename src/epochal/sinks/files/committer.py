"""Carries decisions out on files: every file to its place, then the epoch's manifest.

How a file comes to its place is the back end's; the manifest proves that all of them are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from epochal.contract import Begin, Dropped, Operable, Recount, Rows
from epochal.errors import InvariantBroken
from epochal.sinks.files.auditing import recount, reread
from epochal.sinks.files.checks import check_schema
from epochal.sinks.files.manifests import Ledger, Manifest, files_of, ledgers, manifest_of
from epochal.sinks.files.places import Place, at_once
from epochal.sinks.files.spark_log import SparkLog
from epochal.terms import Ability, EpochNumber, Identity, InDoubt, Json, Mark, Proof, Receipt


class FileCommitter(Operable):
    """One sink's decisions below one root."""

    def __init__(
        self,
        identity: Identity,
        place: Place,
        *,
        format: str,  # noqa: A002 (the user's word for it)
        partition_by: tuple[str, ...],
        whole_epochs: Ability,
        log: SparkLog | None = None,
        has_log: bool = False,
    ) -> None:
        self._identity = identity
        self._place = place
        self._format = format
        self._partition_by = partition_by
        self._whole_epochs = whole_epochs
        self._ledger = Ledger(place.store, identity.uid, identity.tag)
        self._log = log
        self._has_log = has_log
        self._rehearsed: Manifest | None = None

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        abilities = self._place.check()
        self._require_log_fits()
        if schema is not None:
            check_schema(schema, self._format, self._partition_by)
        return [*abilities, self._whole_epochs]

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        """Begin Spark's log where it is wanted: from here on Spark's readers go by it."""
        self._require_log_fits()
        if self._log is not None and self._has_log:
            self._log.mark()
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """See every file from here, and that no other manifest stands in the way."""
        # Again: another sink of the same folder may have begun a log after this one began.
        self._require_log_fits()
        manifest = manifest_of(self._identity, epoch, receipts)
        self._place.rehearse(receipts)
        if not self._is_done(manifest):
            self._rehearsed = manifest

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        manifest = manifest_of(self._identity, epoch, receipts)
        # What was rehearsed here a moment ago need not be asked for again.
        if manifest == self._rehearsed or not self._is_done(manifest):
            self._show(manifest, receipts)
            if not self._ledger.put(manifest):
                self._is_done(manifest)
        self._rehearsed = None
        self._place.clear(receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._rehearsed = None
        manifest = self._ledger.find(epoch) if receipts else None
        committed = set() if manifest is None else set(manifest.handles)

        def discard(receipt: Receipt) -> None:
            if str(receipt.handle) not in committed and not self._place.is_shown(receipt):
                self._place.discard(receipt)

        at_once(discard, receipts)

    def in_doubt(self) -> Sequence[InDoubt]:
        self._place.tidy()
        mine = [
            found
            for found in self._place.listed()
            if found.handle is None or found.handle.sink == self._identity.tag
        ]
        epochs = {found.handle.epoch for found in mine if found.handle is not None}
        manifests = at_once(self._ledger.find, epochs)
        committed = {handle for one in manifests if one is not None for handle in one.handles}
        for found in mine:
            if str(found.handle) in committed:
                self._place.clear_surplus(found)
        return [found for found in mine if str(found.handle) not in committed]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        waits = self._place.waits(receipt)
        manifest = self._ledger.find(epoch)
        if manifest is not None and str(receipt.handle) in manifest.handles:
            return Proof.COMMITTED
        is_told = bool(files_of(receipt)) or manifest is not None
        if waits or not is_told or self._place.is_shown(receipt):
            return Proof.UNKNOWN
        return Proof.ABORTED

    def newest(self) -> Sequence[Mark]:
        newest = (ledger.newest() for ledger in ledgers(self._place.store, self._identity.tag))
        mine = (self._identity.pipeline, self._identity.sink)
        return [
            Mark(uid=manifest.uid, epoch=manifest.epoch, run=manifest.run)
            for manifest in newest
            if manifest is not None and (manifest.pipeline, manifest.sink) == mine
        ]

    def prune(self, below: EpochNumber) -> None:
        """Readers of whole epochs go by the manifests, so none is dropped: they are folded."""
        self._ledger.fold(below)

    def recount(self) -> Recount:
        return recount(self._place.store, self._ledger, self._identity)

    def reread(self, engine: Any) -> Rows:
        return reread(self._place.store, self._ledger, engine)

    def drop(self, *, is_dry_run: bool) -> Dropped:  # noqa: ARG002
        return Dropped(kept="manifests: readers of whole epochs find the rows by them")

    def close(self) -> None:
        """Nothing is kept open."""

    def _show(self, manifest: Manifest, receipts: Sequence[Receipt]) -> None:
        if self._log is None or not self._has_log:
            self._place.show(manifest.epoch, receipts)
            return
        self._log.mark()
        seen = self._log.last()
        is_first = self._place.show(manifest.epoch, receipts)
        if manifest.files:
            self._log.append(manifest.files, since=seen if is_first else -1)

    def _require_log_fits(self) -> None:
        if self._log is None:
            return
        if self._has_log:
            self._log.refuse_unless_ours()
        else:
            self._log.refuse_if_there()

    def _is_done(self, manifest: Manifest) -> bool:
        there = self._ledger.find(manifest.epoch)
        if there is not None and there.handles != manifest.handles:
            raise InvariantBroken(
                f"epoch {manifest.epoch} of {manifest.uid} is committed in "
                f"{self._place.store.root} with {list(there.handles)}, and a commit now names "
                f"{list(manifest.handles)}"
            )
        return there is not None
