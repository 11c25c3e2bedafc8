"""What an epoch changes about the table: which files come, which go, and what proves it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.update import (
    RemovePropertiesUpdate,
    SetPropertiesUpdate,
)

from epochal.errors import Misconfigured, TryAgain
from epochal.sinks.iceberg import inside
from epochal.sinks.iceberg.attempt import Attempt
from epochal.sinks.iceberg.data_files import files_in, require_fitting
from epochal.sinks.iceberg.expiring import Expired, clear_up, expired, is_of
from epochal.sinks.iceberg.layout import layout_of
from epochal.sinks.iceberg.ledger import Ledger
from epochal.sinks.iceberg.merging import merged, require_mergeable
from epochal.sinks.iceberg.replacing import replaced
from epochal.sinks.iceberg.storage import Storage
from epochal.terms import EpochNumber, Handle, Identity, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.iceberg.sink import Iceberg

logger = logging.getLogger("epochal")

DRIVER = 9_999_999
"""The partition number in handles of files that the driver writes: no stage has so many tasks."""
_KEEP_METADATA = "write.metadata.delete-after-commit.enabled"


@dataclass(slots=True, kw_only=True)
class Plan:
    """A change that is ready to be sent, and what must be undone if it is refused."""

    change: inside.Change
    attempt: Attempt | None = None
    handles: list[Handle] = field(default_factory=list)
    """Of files that the driver wrote."""

    def undo(self, table: Table) -> None:
        """
        Take back what was written for a change that was refused, unless the table has it: a client
        or a proxy that asks again by itself is refused because of its own first request (I9).
        """
        if self.change.is_in(table.catalog.load_table(table.name()).metadata):
            return
        Storage(table.io).delete(self.change.written)
        if self.attempt is not None:
            self.attempt.discard()


class Changing:
    """One sink's changes to one table."""

    def __init__(self, sink: Iceberg, identity: Identity) -> None:
        self._sink = sink
        self._identity = identity
        self._expired: list[Expired] = []

    def handed(self, table: Table) -> Json:
        """What a task must know of the table, without its history and without our ledger."""
        kept = {k: v for k, v in table.metadata.properties.items() if not k.startswith("epochal.")}
        slim = inside.without_history(table.metadata, kept)
        told: Json = json.loads(slim.model_dump_json())
        return told

    def rehearse(self, table: Table, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Whatever could still say no by content says it here, before the decision (I3)."""
        for receipt in receipts:
            require_fitting(receipt, table.metadata)
        if self._sink.mode == "upsert":
            require_mergeable(self._sink, table, epoch, self._files(table, receipts))
        if self._sink.audit_branch is not None and any(receipt.rows for receipt in receipts):
            files = self._files(table, receipts)
            self._show_for_audit(table, epoch, files, self._sink.audit_branch)

    def plan(self, table: Table, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Plan:
        files = self._files(table, receipts)
        ledger = Ledger(self._identity, table.metadata.properties)
        if files:
            plan = self._with_rows(table, epoch, files, self._sink.branch)
        else:
            # No rows, no snapshot (I8): the ledger alone is written.
            plan = Plan(change=inside.properties_only(table))
        winners = [*(receipt.handle for receipt in receipts), *plan.handles]
        plan.change.also(
            SetPropertiesUpdate(updates=self._properties(table, ledger, epoch, winners))
        )
        outdated = ledger.outdated(epoch)
        if outdated:
            plan.change.also(RemovePropertiesUpdate(removals=outdated))
        self._drop_audit(table, plan)
        self._expire(table, plan)
        return plan

    def give_up(self, table: Table) -> None:
        """Remove the audit branch of an epoch that is not going to be committed."""
        plan = Plan(change=inside.properties_only(table))
        self._drop_audit(table, plan)
        if not plan.change.updates:
            return
        try:
            inside.send(table, plan.change)
        except (CommitFailedException, inside.Stale) as error:
            # The next epoch takes the branch's place, or its commit removes it.
            logger.warning("%s: an audit branch is left for now: %s", self._sink.place, error)

    def tidy(self, table: Table) -> None:
        """Remove files that only expired snapshots used."""
        gone, self._expired = self._expired, []
        if gone:
            clear_up(table, gone)

    def _files(self, table: Table, receipts: Sequence[Receipt]) -> list[DataFile]:
        return [file for receipt in receipts for file in files_in(receipt, table.metadata)]

    def _with_rows(
        self, table: Table, epoch: EpochNumber, files: Sequence[DataFile], branch: str
    ) -> Plan:
        add, remove = list(files), []
        attempt, handles = None, []
        if self._sink.mode == "overwrite_partitions":
            remove = replaced(table, self._sink.branch, files, place=str(self._sink.place))
        elif self._sink.mode == "upsert":
            attempt = self._own_attempt(table, epoch)
            try:
                rewritten = merged(self._sink, table, files, attempt[1])
            except BaseException:
                attempt[1].discard()
                raise
            add, remove = rewritten.add, rewritten.remove
            handles = [attempt[0]] if rewritten.has_own_files else []
        change = inside.snapshot(
            table,
            branch=branch,
            add=add,
            remove=remove,
            summary=self._summary(epoch),
            parent_of=self._sink.branch,
        )
        return Plan(change=change, attempt=attempt[1] if attempt else None, handles=handles)

    def _own_attempt(self, table: Table, epoch: EpochNumber) -> tuple[Handle, Attempt]:
        """Files that the driver writes have a handle and a marker of their own, like a task's."""
        handle = self._identity.handle(epoch, partition=DRIVER, attempt=time.time_ns())
        attempt = Attempt(
            handle,
            metadata=table.metadata,
            storage=Storage(table.io),
            layout=layout_of(table.metadata.location, table.metadata.properties),
            limits=self._sink.file_limits,
        )
        return handle, attempt

    def _summary(self, epoch: EpochNumber) -> Mapping[str, str]:
        told = {
            "epochal.pipeline": self._identity.pipeline,
            "epochal.uid": self._identity.uid,
            "epochal.sink": self._identity.sink,
            "epochal.epoch": str(epoch),
            "epochal.generation": str(self._identity.generation),
        }
        return told if self._identity.run is None else {**told, "epochal.run": self._identity.run}

    def _properties(
        self, table: Table, ledger: Ledger, epoch: EpochNumber, winners: Sequence[Handle]
    ) -> dict[str, str]:
        written = ledger.written(epoch, winners)
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
            inside.send(table, plan.change)
        except CommitFailedException as error:
            plan.undo(table)
            raise TryAgain(f"{self._sink.place}: branch {branch} was written by others") from error

    def _drop_audit(self, table: Table, plan: Plan) -> None:
        branch = self._sink.audit_branch
        head = table.refs().get(branch) if branch is not None else None
        if branch is None or head is None:
            return
        own = table.snapshot_by_id(head.snapshot_id)
        if own is None or not is_of(own.summary, self._identity):
            raise Misconfigured(
                f"{self._sink.place}: branch {branch} is not one that this sink made",
                "another audit_branch=, or drop the branch if nobody needs it",
            )
        plan.change.also(inside.without_branch(branch))
        plan.change.also(inside.without_snapshots([head.snapshot_id]))

    def _expire(self, table: Table, plan: Plan) -> None:
        if self._sink.snapshots_kept is None or not plan.change.written:
            return
        self._expired = expired(table, self._identity, kept=self._sink.snapshots_kept - 1)
        if self._expired:
            ids = [one.snapshot_id for one in self._expired]
            plan.change.also(inside.without_snapshots(ids))
