"""
The plan of an epoch's snapshot: which files come, which go, and the ledger entry that proves it.

Also what goes with it in the same commit: the audit branch, and old snapshots of this sink.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import TYPE_CHECKING, Any

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    RemovePropertiesUpdate,
    SetPropertiesUpdate,
)

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.marked_files import at_once
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.data_files import files_in
from epochal.sinks.iceberg.ledger import (
    DRIVER,
    DRIVER_ATTEMPT_BITS,
    Branch,
    Ledger,
    TableLedger,
)
from epochal.sinks.iceberg.merge import merged, require_mergeable
from epochal.sinks.iceberg.table_files import TableFiles, layout_of
from epochal.sinks.iceberg.writer import Attempt, file_limits
from epochal.terms import EpochNumber, Handle, Identity, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.iceberg.sink import Iceberg

logger = logging.getLogger("epochal")

_KEEP_METADATA = "write.metadata.delete-after-commit.enabled"


@dataclass(slots=True, kw_only=True)
class SnapshotPlan:
    """A change that is ready to be sent, and what must be undone if it is refused."""

    change: private.Change
    attempt: Attempt | None = None
    handles: list[Handle] = field(default_factory=list)
    """Of files that the driver wrote."""
    expired: list[_Expired] = field(default_factory=list)
    """Snapshots that go with the change, and with them their manifest lists."""

    def make_durable(self, files: TableFiles) -> None:
        at_once(files.make_durable, self.change.written)

    def discard(self, files: TableFiles) -> None:
        """Remove what was written for a change that was never sent."""
        files.delete(self.change.written)
        if self.attempt is not None:
            self.attempt.discard()

    def undo(self, table: Table) -> None:
        """
        Remove what was written for a change that was refused, unless the table has it: a client or
        a proxy that repeats requests is refused because of its own first one (I9).
        """
        if self.change.is_in(table.catalog.load_table(table.name()).metadata):
            return
        self.discard(TableFiles(table.io))

    def clean_up(self, table: Table) -> None:
        """
        Remove the manifest lists of expired snapshots: each belongs to one snapshot alone. A
        courtesy, so never fatal.
        """
        try:
            TableFiles(table.io).delete(one.manifest_list for one in self.expired)
        except OSError as error:
            logger.warning(
                "%s: manifest lists of expired snapshots are left: %s", table.name(), error
            )


class SnapshotPlanner:
    """Plans one sink's changes to one table."""

    def __init__(self, sink: Iceberg, identity: Identity) -> None:
        self._sink = sink
        self._identity = identity

    def handout(self, table: Table) -> Json:
        """What a task must know of the table, without its history and without our ledger."""
        kept = {k: v for k, v in table.metadata.properties.items() if not k.startswith("epochal.")}
        slim = private.without_history(table.metadata, kept)
        metadata: Json = json.loads(slim.model_dump_json())
        return metadata

    def rehearse(self, table: Table, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Raise what the table could refuse by content, before the decision (I3)."""
        if self._sink.mode == "upsert":
            require_mergeable(self._sink, table, epoch, self._files(table, receipts))
        if self._sink.audit_branch is not None and any(receipt.rows for receipt in receipts):
            files = self._files(table, receipts)
            self._show_for_audit(table, epoch, files, self._sink.audit_branch)

    def plan(
        self, ledger: TableLedger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> SnapshotPlan:
        table = ledger.table
        files = self._files(table, receipts)
        if files:
            plan = self._with_rows(table, epoch, files, self._sink.branch)
        else:
            # No rows, no snapshot (I8): the ledger alone is written.
            plan = SnapshotPlan(change=private.properties_only(table))
        winners = [*(receipt.handle for receipt in receipts), *plan.handles]
        folding = ledger.folding()
        branch = plan.change.snapshot or table.metadata.snapshot_by_name(self._sink.branch)
        written = {**self._properties(table, ledger, epoch, winners, branch), **folding.written}
        plan.change.also(SetPropertiesUpdate(updates=written))
        removals = [*ledger.outdated(epoch), *folding.removed]
        if removals:
            plan.change.also(RemovePropertiesUpdate(removals=removals))
        self._drop_audit(table, plan)
        self._expire(table, plan)
        return plan

    def drop_audit_branch(self, table: Table) -> None:
        """Remove the audit branch of an epoch that is not going to be committed."""
        plan = SnapshotPlan(change=private.properties_only(table))
        self._drop_audit(table, plan)
        if not plan.change.updates:
            return
        try:
            private.send(table, plan.change)
        except (CommitFailedException, private.Stale) as error:
            # The next epoch takes the branch's place, or its commit removes it.
            logger.warning("%s: an audit branch is left for now: %s", self._sink.address, error)

    def _files(self, table: Table, receipts: Sequence[Receipt]) -> list[DataFile]:
        return [file for receipt in receipts for file in files_in(receipt, table.metadata)]

    def _with_rows(
        self, table: Table, epoch: EpochNumber, files: Sequence[DataFile], branch: str
    ) -> SnapshotPlan:
        add, remove = list(files), []
        attempt, handles = None, []
        if self._sink.mode == "overwrite_partitions":
            remove = _replaced(table, self._sink.branch, files, target=str(self._sink.address))
        elif self._sink.mode == "upsert":
            attempt = self._own_attempt(table, epoch)
            try:
                rewritten = merged(self._sink, table, files, attempt[1])
            except BaseException:
                attempt[1].discard()
                raise
            add, remove = rewritten.add, rewritten.remove
            handles = [attempt[0]] if rewritten.has_own_files else []
        change = private.snapshot(
            table,
            branch=branch,
            add=add,
            remove=remove,
            summary=self._summary(epoch),
            parent_of=self._sink.branch,
        )
        return SnapshotPlan(change=change, attempt=attempt[1] if attempt else None, handles=handles)

    def _own_attempt(self, table: Table, epoch: EpochNumber) -> tuple[Handle, Attempt]:
        """Files that the driver writes have a handle and a marker of their own, like a task's."""
        handle = self._identity.handle(
            epoch, partition=DRIVER, attempt=getrandbits(DRIVER_ATTEMPT_BITS)
        )
        attempt = Attempt(
            handle,
            metadata=table.metadata,
            files=TableFiles(table.io),
            layout=layout_of(table.metadata.location, table.metadata.properties),
            limits=file_limits(self._sink),
        )
        return handle, attempt

    def _summary(self, epoch: EpochNumber) -> Mapping[str, str]:
        summary = {
            "epochal.pipeline": self._identity.pipeline,
            "epochal.uid": self._identity.uid,
            "epochal.sink": self._identity.sink,
            "epochal.epoch": str(epoch),
            "epochal.generation": str(self._identity.generation),
        }
        run = self._identity.run
        return summary if run is None else {**summary, "epochal.run": run}

    def _properties(
        self,
        table: Table,
        ledger: Ledger,
        epoch: EpochNumber,
        winners: Sequence[Handle],
        branch: Snapshot | None,
    ) -> dict[str, str]:
        at = None if branch is None else Branch(branch.snapshot_id, branch.sequence_number or 0)
        written = ledger.written(epoch, winners, at)
        # Otherwise every commit leaves a metadata file behind, and expiring snapshots is half done.
        if (
            self._sink.snapshots_kept is not None
            and _KEEP_METADATA not in table.metadata.properties
        ):
            written[_KEEP_METADATA] = "true"
        return written

    # The audit branch

    def _show_for_audit(
        self, table: Table, epoch: EpochNumber, files: Sequence[DataFile], branch: str
    ) -> None:
        plan = self._with_rows(table, epoch, files, branch)
        try:
            private.send(table, plan.change)
        except CommitFailedException as error:
            plan.undo(table)
            raise TryAgain(
                f"{self._sink.address}: branch {branch} was written by others"
            ) from error

    def _drop_audit(self, table: Table, plan: SnapshotPlan) -> None:
        branch = self._sink.audit_branch
        head = table.refs().get(branch) if branch is not None else None
        if branch is None or head is None:
            return
        own = table.snapshot_by_id(head.snapshot_id)
        if own is None or not _is_of(own.summary, self._identity):
            raise Misconfigured(
                f"{self._sink.address}: branch {branch} is not one that this sink made",
                "another audit_branch=, or drop the branch if nobody needs it",
            )
        plan.change.also(private.without_branch(branch))
        plan.change.also(private.without_snapshots([head.snapshot_id]))

    def _expire(self, table: Table, plan: SnapshotPlan) -> None:
        if self._sink.snapshots_kept is None or not plan.change.written:
            return
        plan.expired = _expired_snapshots(table, self._identity, kept=self._sink.snapshots_kept - 1)
        if plan.expired:
            ids = [one.snapshot_id for one in plan.expired]
            plan.change.also(private.without_snapshots(ids))


def _replaced(
    table: Table, branch: str, files: Sequence[DataFile], *, target: str
) -> list[DataFile]:
    """The table's files in the partitions of these ones; all, where the table has no partitions."""
    snapshot = table.metadata.snapshot_by_name(branch)
    if snapshot is None:
        return []
    spec_ids = {file.spec_id for file in files}
    wanted = {(file.spec_id, repr(file.partition)) for file in files}
    gone = []
    for manifest in snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            file = entry.data_file
            if file.content != 0:
                continue
            if file.spec_id not in spec_ids:
                raise Misconfigured(
                    f"{target} still has files of partition spec {file.spec_id}, and partitions of "
                    f"spec {sorted(spec_ids)} can't be compared with them",
                    "rewrite the older files first (rewrite_data_files)",
                )
            if (file.spec_id, repr(file.partition)) in wanted:
                gone.append(file)
    return gone


@dataclass(frozen=True, slots=True)
class _Expired:
    snapshot_id: int
    manifest_list: str


def _is_of(summary: Any, identity: Identity) -> bool:
    """Whether a snapshot was made by this sink of this uid."""
    if summary is None:
        return False
    found = summary.additional_properties
    return (found.get("epochal.uid"), found.get("epochal.sink")) == (identity.uid, identity.sink)


def _expired_snapshots(table: Table, identity: Identity, *, kept: int) -> list[_Expired]:
    """
    This sink's own snapshots but the newest `kept`; never one that a branch or a tag names.

    Snapshots of others are not ours to expire.
    """
    named = {ref.snapshot_id for ref in table.refs().values()}
    mine = [one for one in table.snapshots() if _is_of(one.summary, identity)]
    mine.sort(key=lambda one: (one.sequence_number or 0, one.timestamp_ms))
    old = mine[: len(mine) - kept] if kept else mine
    # The branch's head is named until the new snapshot takes its place, in the same commit.
    return [
        _Expired(one.snapshot_id, one.manifest_list) for one in old if one.snapshot_id not in named
    ]
