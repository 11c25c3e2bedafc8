"""Carries decisions out on files.

A commit moves every file to its final place, then puts the epoch's manifest. A file that is moved
without a manifest is of a decided epoch whose commit was cut short; the repeat finishes it, since a
source that is gone and a destination that is there mean: done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from epochal.errors import InvariantBroken, PreparedLost
from epochal.sinks.files import disk
from epochal.sinks.files.checks import check_place, check_prepared, check_schema
from epochal.sinks.files.layout import Layout, folders_of
from epochal.sinks.files.manifests import Ledger, Manifest, files_of, ledgers, manifest_of
from epochal.sinks.files.prepared import discard
from epochal.sinks.files.spark_log import SparkLog
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Mark,
    Proof,
    Receipt,
    handle_prefix,
)

_SCRATCH_AGE_S = 600.0
"""Writing a manifest takes milliseconds: what is this old was left by a killed process."""


class FileCommitter:
    """One sink's decisions below one root."""

    def __init__(
        self,
        identity: Identity,
        layout: Layout,
        *,
        format: str,  # noqa: A002 (the user's word for it)
        partition_by: tuple[str, ...],
        spark_metadata: bool,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._format = format
        self._partition_by = partition_by
        self._scratch = layout.scratch_of(identity.uid, identity.tag)
        self._ledger = Ledger(layout, identity.uid, identity.tag)
        self._log = SparkLog(layout)
        self._has_log = spark_metadata

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        abilities = [check_place(self._layout, scratch=self._scratch)]
        self._require_log_fits()
        if schema is not None:
            check_schema(schema, self._format, self._partition_by)
        return [*abilities, _whole_epochs(self._has_log)]

    def begin(self, epoch: EpochNumber) -> Json:  # noqa: ARG002
        """Begin Spark's log where it is wanted: from here on Spark's readers go by it."""
        self._require_log_fits()
        if self._has_log:
            self._log.mark(scratch=self._scratch)
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        """See every file from here: executors may have written to a disk of their own."""
        # Again: another sink of the same folder may have begun a log after this one began.
        self._require_log_fits()
        for receipt in receipts:
            for file, (source, target) in zip(files_of(receipt), self._moves(receipt), strict=True):
                check_prepared(source, target, file.bytes)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        manifest = manifest_of(self._identity, epoch, receipts)
        if not self._is_done(manifest):
            if self._has_log:
                self._log.mark(scratch=self._scratch)
            seen = self._log.last() if self._has_log else -1
            is_first = self._move(epoch, receipts)
            if self._has_log and manifest.files:
                since = seen if is_first else -1
                self._log.append(manifest.files, since=since, scratch=self._scratch)
            self._ledger.put(manifest, scratch=self._scratch)
        for receipt in receipts:
            disk.remove_empty(self._layout.prepared(receipt.handle))

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        for receipt in receipts:
            if not self._is_committed(receipt.handle) and not self._is_moving(receipt):
                discard(self._layout.prepared(receipt.handle))

    def in_doubt(self) -> Sequence[InDoubt]:
        self._remove_old_scratch()
        prefix = handle_prefix(self._identity.uid)
        mine = (name for name in disk.names(self._layout.all_prepared) if name.startswith(prefix))
        return [found for name in sorted(mine) if (found := self._listed(name)) is not None]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        files = files_of(receipt)
        if self._layout.prepared(receipt.handle).is_dir() and self._any_waits(receipt):
            return Proof.UNKNOWN
        manifest = self._ledger.find(epoch)
        if manifest is not None and str(receipt.handle) in manifest.handles:
            return Proof.COMMITTED
        is_gone = (bool(files) or manifest is not None) and not self._is_moving(receipt)
        return Proof.ABORTED if is_gone else Proof.UNKNOWN

    def newest(self) -> Sequence[Mark]:
        newest = (ledger.newest() for ledger in ledgers(self._layout, self._identity.tag))
        mine = (self._identity.pipeline, self._identity.sink)
        return [
            Mark(uid=manifest.uid, epoch=manifest.epoch, run=manifest.run)
            for manifest in newest
            if manifest is not None and (manifest.pipeline, manifest.sink) == mine
        ]

    def prune(self, below: EpochNumber) -> None:
        """Readers of whole epochs go by the manifests, so none is dropped: they are folded."""
        self._ledger.fold(below, scratch=self._scratch)

    def close(self) -> None:
        """Nothing is kept open."""

    def _require_log_fits(self) -> None:
        if self._has_log:
            self._log.refuse_unless_ours()
        else:
            self._log.refuse_if_there()

    def _is_done(self, manifest: Manifest) -> bool:
        there = self._ledger.find(manifest.epoch)
        if there is not None and there.handles != manifest.handles:
            raise InvariantBroken(
                f"epoch {manifest.epoch} of {manifest.uid} is committed in {self._layout.root} "
                f"with {list(there.handles)}, and a commit now names {list(manifest.handles)}"
            )
        return there is not None

    def _move(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        """Move every file to its place, durably: True where this call moved each of them."""
        self._require_all_there(epoch, receipts)
        moves = [move for receipt in receipts for move in self._moves(receipt)]
        paths = [file.path for receipt in receipts for file in files_of(receipt)]
        folders = folders_of(paths, self._layout.root)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        moved = disk.at_once(_move_one, moves)
        # All of them, not only new ones: a killed commit may have made some, and synced none.
        disk.at_once(disk.sync, folders)
        return all(moved)

    def _require_all_there(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        gone = [receipt for receipt in receipts if self._is_lost(receipt)]
        self._require_none_half_moved(epoch, gone)
        lost = tuple(str(receipt.handle) for receipt in gone)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: files of {len(lost)} of {len(receipts)} receipts are neither in "
                f"{self._layout.all_prepared} nor in their place below {self._layout.root}, and no "
                "manifest says that they were committed",
                "somebody removed them: files below _epochal/ belong to the pipeline",
                handles=lost,
            )

    def _require_none_half_moved(self, epoch: EpochNumber, gone: Sequence[Receipt]) -> None:
        """Written again, rows whose files are in their place already would be there twice."""
        moves = [
            move for receipt in gone if self._is_moving(receipt) for move in self._moves(receipt)
        ]
        if moves:
            missing = [str(target) for source, target in moves if not _is_there(source, target)]
            shown = [str(target) for _, target in moves if target.exists()]
            raise InvariantBroken(
                f"epoch {epoch} was being committed, and of its files somebody removed {missing} "
                f"while {shown}, of the same tasks, are in their place",
                "put the missing files back and start again; or, if they are lost for good, remove "
                "those in their place too: the epoch's rows are then written again",
            )

    def _is_lost(self, receipt: Receipt) -> bool:
        return not all(_is_there(source, target) for source, target in self._moves(receipt))

    def _any_waits(self, receipt: Receipt) -> bool:
        moves = self._moves(receipt)
        return not moves or any(source.exists() for source, _ in moves)

    def _is_moving(self, receipt: Receipt) -> bool:
        """A file of it is in its place: only a decision can have put it there (I3)."""
        return any(target.exists() for _, target in self._moves(receipt))

    def _moves(self, receipt: Receipt) -> list[tuple[Path, Path]]:
        prepared = self._layout.prepared(receipt.handle)
        return [
            (prepared / file.path, self._layout.visible(file.path)) for file in files_of(receipt)
        ]

    def _is_committed(self, handle: Handle) -> bool:
        manifest = self._ledger.find(handle.epoch)
        return manifest is not None and str(handle) in manifest.handles

    def _listed(self, name: str) -> InDoubt | None:
        handle = Handle.parse(name)
        path = self._layout.all_prepared / name
        if handle is not None and handle.sink != self._identity.tag:
            return None
        if handle is not None and self._is_committed(handle):
            disk.remove_empty(path)
            return None
        try:
            age_s = max(0.0, time.time() - path.stat().st_mtime)
        except FileNotFoundError:
            return None
        return InDoubt(name=name, handle=handle, age_s=age_s)

    def _remove_old_scratch(self) -> None:
        prefix = self._scratch.name
        for name in disk.names(self._layout.scratch):
            path = self._layout.scratch / name
            with suppress(FileNotFoundError):
                if name.startswith(prefix) and time.time() - path.stat().st_mtime > _SCRATCH_AGE_S:
                    path.unlink()


def _is_there(source: Path, target: Path) -> bool:
    # In this order: of a file that another driver moves meanwhile, one of the two is seen.
    return source.exists() or target.exists()


def _move_one(move: tuple[Path, Path]) -> bool:
    """Move one file: True where this call did it, False where it was in its place already."""
    source, target = move
    try:
        source.rename(target)
    except FileNotFoundError:
        if not target.exists():
            raise
        return False
    return True


def _whole_epochs(has_log: bool) -> Ability:
    if has_log:
        return Ability(
            name="whole epochs for Spark's readers", granted=True, because="_spark_metadata is kept"
        )
    return Ability(
        name="whole epochs for plain readers",
        granted=False,
        because="files of an epoch appear one by one; read_epochs shows whole epochs, and "
        "spark_metadata=True makes Spark do so",
    )
