"""
Carries decisions out on a Delta table: one version an epoch.

The ledger is in the log itself, in the commit that shows the rows (see `names`). It is read on the
handle on which the commit is made, so of two drivers that carry out one decision at the same time
one is refused, looks again, and finds it done. After any error the same: look, and only then again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import RemoveAction

from epochal.contract import Begin, Dropped, Limits, Operable, Recount
from epochal.errors import (
    Fenced,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    Refused,
    TryAgain,
)
from epochal.sinks.delta.checking import (
    Plan,
    abilities,
    check_delete_when,
    check_missing,
    plan_for,
    steering,
)
from epochal.sinks.delta.counting import recount
from epochal.sinks.delta.dropping import drop
from epochal.sinks.delta.merging import merge
from epochal.sinks.delta.names import Lives, ledger_id
from epochal.sinks.delta.place import require_ours
from epochal.sinks.delta.rehearsing import Rehearsal, files_of
from epochal.sinks.delta.schema import delta_schema
from epochal.sinks.delta.table import (
    Table,
    active_paths,
    add_of,
    handles_in_history,
    hooks,
    looking,
    properties,
    removals,
    sorting,
)
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

if TYPE_CHECKING:
    from epochal.sinks.delta.sink import Delta


class DeltaCommitter(Operable):
    def __init__(self, sink: Delta, identity: Identity, limits: Limits) -> None:
        self._sink = sink
        self._identity = identity
        self._limits = limits
        self._place = sink.place()
        self._table = Table(self._place)
        self._lives = Lives(identity)
        self._ledger = ledger_id(identity.uid, identity.tag)
        self._schema: pa.Schema | None = None
        self._plan: Plan | None = None

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        self._schema = schema
        table = self._table.open()
        if table is None:
            check_missing(self._sink, schema)
        else:
            plan_for(self._sink, table, schema)
        check_delete_when(self._sink, schema)
        return abilities(table)

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        if self._plan is None:
            self._plan = self._ready()
        return self._plan.handout()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        with self._table.newest() as table:
            if self._proves(table, epoch):
                raise self._committed_elsewhere(table, epoch)
            try:
                self._require_files(table, epoch, receipts)
            except PreparedLost as error:
                raise TryAgain(
                    f"{error.message}; no decision was made", "the epoch is tried again whole"
                ) from error
            plan = self._still_planned(table)
            Rehearsal(sink=self._sink, place=self._place, epoch=epoch, receipts=receipts).judge(
                plan
            )
            if self._sink.mode == "overwrite_partitions":
                self._replaced(table, receipts)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        for wait_ms in (*self._limits.retry_backoff_ms, None):
            try:
                self._commit_once(epoch, receipts)
                break
            except (CommitFailedError, TryAgain) as error:
                # Refused, or unanswered: the ledger says which, on a handle of its own (I9).
                if wait_ms is None:
                    raise OutcomeUnknown(
                        f"{self._doing(f'commit epoch {epoch}')}: {error}"
                    ) from error
                time.sleep(wait_ms / 1000)
        self._let_go(receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._plan = None
        noted = [receipt for receipt in receipts if self._place.has_note(receipt.handle)]
        if not noted:
            return
        table = self._table.open()
        is_proven = table is not None and self._proves(table, epoch)
        for receipt in noted:
            proof = Proof.ABORTED
            if is_proven and table is not None:
                proof = self._became(table, receipt.handle)
            if proof is Proof.ABORTED or (is_proven and self._sink.mode == "merge"):
                self._place.remove(self._paths_of(receipt))
            if proof is not Proof.UNKNOWN:
                self._place.remove_note(receipt.handle)

    def in_doubt(self) -> Sequence[InDoubt]:
        prefix = handle_prefix(self._identity.uid)
        with sorting(self._doing("list what is prepared")):
            notes = [note for note in self._place.notes() if note.name.startswith(prefix)]
        listed = [
            InDoubt(name=note.name, handle=Handle.parse(note.name), age_s=note.age_s)
            for note in notes
        ]
        tag = self._identity.tag
        return [one for one in listed if one.handle is None or one.handle.sink == tag]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        if self._place.has_note(receipt.handle):
            return Proof.UNKNOWN
        table = self._table.open()
        if table is not None and self._proves(table, epoch):
            return self._became(table, receipt.handle)
        # A task without rows leaves nothing: that there is nothing proves nothing.
        return Proof.ABORTED if files_of(receipt) else Proof.UNKNOWN

    def newest(self) -> Sequence[Mark]:
        table = self._table.open()
        return [] if table is None else self._lives.newest(looking(table))

    def prune(self, below: EpochNumber) -> None:
        """The log keeps one number a pipeline, whatever the number of its epochs."""

    def recount(self) -> Recount:
        table = self._table.open()
        if table is None:
            return Recount(rows=None, because=f"there is no table at {self._place.uri}")
        with sorting(self._doing("count rows")):
            return recount(self._sink, self._identity, self._place, table)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        with sorting(self._doing("drop")):
            return drop(self._place, self._identity, self._ledger, is_dry_run=is_dry_run)

    def close(self) -> None:
        """A handle holds no connection that would have to be let go."""

    # The commit

    def _doing(self, verb: str) -> str:
        return f"sink {self._identity.sink!r} on {self._place.uri}: {verb}"

    def _proves(self, table: DeltaTable, epoch: EpochNumber) -> bool:
        newest = looking(table)(self._ledger)
        return newest is not None and newest >= epoch

    def _commit_once(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        with self._table.newest() as table:
            if self._proves(table, epoch):
                self._table.make_recent_durable(table)
                return
            self._require_files(table, epoch, receipts)
            before = table.version()  # a merge moves its handle on
            with sorting(self._doing(f"commit epoch {epoch}")):
                self._write(table, epoch, receipts)
            self._table.make_durable(before)

    def _write(self, table: DeltaTable, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        files = [file for receipt in receipts for file in files_of(receipt)]
        properties_ = self._properties(table, epoch, receipts)
        if self._sink.mode == "merge" and files:
            merge(self._sink, table, self._place, files, properties_)
            table, files = self._table.require(), []
            if self._proves(table, epoch):
                return
            # It changed nothing, and so made no version: the ledger's entry is written alone.
            properties_ = self._properties(table, epoch, receipts)
        is_replacing = self._sink.mode == "overwrite_partitions"
        table.create_write_transaction(
            [
                *(add_of(file) for file in files),
                *(self._replaced(table, receipts) if is_replacing else ()),
            ],
            mode="append",
            schema=table.schema(),
            partition_by=table.metadata().partition_columns,
            commit_properties=properties_,
            post_commithook_properties=hooks(table),
        )

    def _replaced(self, table: DeltaTable, receipts: Sequence[Receipt]) -> list[RemoveAction]:
        partitions = [file["partition"] for receipt in receipts for file in files_of(receipt)]
        return removals(table, partitions, table.metadata().partition_columns)

    def _ready(self) -> Plan:
        """Make what is missing and was asked for: the table, its new columns."""
        table = self._table.open()
        if table is None:
            table = self._created()
        plan = plan_for(self._sink, table, self._schema)
        if plan.fit is None or not plan.fit.new or self._schema is None:
            return plan
        new = pa.schema([self._schema.field(name).with_nullable(True) for name in plan.fit.new])
        try:
            with sorting(self._doing("add columns")):
                table.alter.add_columns(list(delta_schema(new).fields))
        except CommitFailedError as error:
            raise TryAgain(f"{self._doing('add columns')}: {error}") from error
        return plan_for(self._sink, self._table.require(), self._schema)

    def _created(self) -> DeltaTable:
        check_missing(self._sink, self._schema)
        if self._schema is None:
            raise Misconfigured(
                f"{self._place.uri} is to be created, and its columns are not known yet",
                "start the pipeline, which knows them",
            )
        written = [
            column.with_nullable(True)
            for column in self._schema
            if self._sink.mode != "merge"
            or column.name not in steering(self._sink, self._schema)
            or column.name in self._sink.order_by
        ]
        try:
            with sorting(self._doing("create the table")):
                DeltaTable.create(
                    self._place.uri,
                    delta_schema(pa.schema(written)),
                    mode="ignore",
                    partition_by=list(self._sink.partition_by or ()),
                    storage_options=self._place.options,
                )
        except CommitFailedError as error:
            raise TryAgain(f"{self._doing('create the table')}: {error}") from error
        return self._table.require()

    def _properties(
        self, table: DeltaTable, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> Any:
        return properties(
            self._lives.to_write(looking(table), epoch),
            ledger=self._ledger,
            epoch=epoch,
            handles=[receipt.handle for receipt in receipts],
        )

    def _still_planned(self, table: DeltaTable) -> Plan:
        """Look anew: somebody may have changed the table since the tasks were told how it is."""
        told, self._plan = self._plan, None
        plan = plan_for(self._sink, table, self._schema)
        is_short = plan.fit is not None and bool(plan.fit.new)
        if is_short or (told is not None and told.handout() != plan.handout()):
            raise TryAgain(
                f"{self._doing('rehearse')}: its partitions or its columns were changed while "
                "rows were written for it",
                "the epoch is tried again whole, as the table is now",
            )
        self._plan = plan
        return plan

    def _require_files(
        self, table: DeltaTable, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        """
        See every file from here, in the partitions that the table has: a commit would take others,
        and no reader would find the rows, or their values, again.
        """
        wanted = [(receipt, file) for receipt in receipts for file in files_of(receipt)]
        with sorting(self._doing("look for prepared files")):
            sizes = self._place.sizes([file["path"] for _, file in wanted])
        is_staged = self._sink.mode == "merge"
        columns = set() if is_staged else set(table.metadata().partition_columns)
        lost = {
            str(receipt.handle)
            for (receipt, file), size in zip(wanted, sizes, strict=True)
            if size != file["bytes"] or file["partition"].keys() != columns
        }
        if lost:
            self._plan = None  # rows that are written again are written for the table as it is now
            raise PreparedLost(
                f"epoch {epoch}: files of {len(lost)} of {len(receipts)} receipts are not below "
                f"{self._place.uri} as their tasks wrote them, or are of other partitions than the "
                "table has now, and the log does not prove them committed",
                "somebody removed them (VACUUM with a short retention does), or partitioned the "
                "table anew, or driver and executors don't see the same folder",
                handles=tuple(sorted(lost)),
            )

    def _let_go(self, receipts: Sequence[Receipt]) -> None:
        """The rows are visible: nothing of these attempts is in doubt any more."""
        for receipt in receipts:
            files = files_of(receipt)
            if files and self._sink.mode == "merge":
                self._place.remove([require_ours(one["path"], receipt.handle) for one in files])
            if files:
                self._place.remove_note(receipt.handle)

    def _committed_elsewhere(self, table: DeltaTable, epoch: EpochNumber) -> Fenced | Refused:
        fact = f"epoch {epoch} is being written, and {self._place.uri} proves it committed"
        named = handles_in_history(table, epoch, self._ledger) or ()
        handles = [handle for one in named if (handle := Handle.parse(one)) is not None]
        newest = max((handle.generation for handle in handles), default=None)
        if newest is not None and newest > self._identity.generation:
            return Fenced(
                f"{fact} by generation {newest}; this driver is {self._identity.generation}",
                "another driver has taken this checkpoint over: leave this one stopped",
            )
        return Refused(
            f"{fact} already: the epoch log is older than the table",
            "the log or the checkpoint was restored from a backup: start with the newer one, or "
            "with a run= of its own",
        )

    # Clearing up

    def _became(self, table: DeltaTable, handle: Handle) -> Proof:
        """Whether the commit of its epoch named a handle; UNKNOWN where the log can't say."""
        named = handles_in_history(table, handle.epoch, self._ledger)
        if named is not None:
            return Proof.COMMITTED if str(handle) in named else Proof.ABORTED
        is_active = any(f"{handle}-" in path for path in active_paths(table))
        return Proof.COMMITTED if is_active else Proof.UNKNOWN

    def _paths_of(self, receipt: Receipt) -> list[str]:
        told = [require_ours(file["path"], receipt.handle) for file in files_of(receipt)]
        if told:
            return told
        noted = self._place.noted_files(receipt.handle)
        return list(noted) if noted is not None else self._place.named(receipt.handle)
