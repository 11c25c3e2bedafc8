"""
The committer of an Iceberg sink: one metadata commit per epoch.

That commit adds the snapshot and writes the ledger, and it holds only if the branch is still where
it was when the ledger was read. So any other commit in between, of another writer or of another
driver of the same pipeline, makes it fail, and the ledger is read again before anything is
repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import RemovePropertiesUpdate, SetPropertiesUpdate

from epochal.contract import Begin, EngineWrite, EngineWritten
from epochal.errors import InvariantBroken, PreparedLost, TryAgain
from epochal.kit.compaction import compactor_of
from epochal.kit.engine_files import Dictionaries, JobFolders, hadoop_url
from epochal.kit.marked_files import (
    OTHERS_WROTE,
    Conflict,
    MarkedFilesCommitter,
    rows_by_epoch,
)
from epochal.kit.sink_base import Compacted, Dropped, Recount
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.check import add_columns, catalog_ability, check_schema, check_table
from epochal.sinks.iceberg.client import TableAddress
from epochal.sinks.iceberg.compact import TableCompaction
from epochal.sinks.iceberg.data_files import locations_in, misfit, receipt_of, sizes_in
from epochal.sinks.iceberg.engine_job import (
    ICEBERG,
    EngineJob,
    job_files,
    prepared_files,
    stored_files,
)
from epochal.sinks.iceberg.errors import translate_errors
from epochal.sinks.iceberg.ledger import DRIVER, Ledger, TableLedger
from epochal.sinks.iceberg.multi_table import TablesTransaction, together_with_others
from epochal.sinks.iceberg.snapshot_plan import SnapshotPlan, SnapshotPlanner
from epochal.sinks.iceberg.table_files import (
    Layout,
    TableFiles,
    discard,
    handle_in,
    layout_around,
    layout_of,
)
from epochal.sinks.iceberg.types import new_columns, unknown_columns
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Receipt,
    SinkName,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from epochal.sinks.iceberg.sink import Iceberg

_CONFLICTS_MAX = 20
"""How often one call tries again after others' commits; then the coordinator waits and repeats."""
_CONFLICT_WAIT_S = 0.02
_KEYS_AGE_MAX_S = 300.0
"""How long keys of a catalog for a table's files are used; the shortest live for 15 minutes."""


class IcebergCommitter(MarkedFilesCommitter[TableLedger]):
    """One sink's decisions on one table."""

    def __init__(self, sink: Iceberg, identity: Identity, limits: Limits) -> None:
        waits_s = [_CONFLICT_WAIT_S * conflicts for conflicts in range(_CONFLICTS_MAX - 1)]
        # The commit asserts that table and branch are those of the rehearsal.
        super().__init__(
            identity,
            target=str(sink.address),
            trusts_rehearsal=True,
            conflict_waits_s=waits_s,
        )
        self._sink = sink
        self._catalog: Catalog | None = None
        self._known: Table | None = None
        self._loaded_s = 0.0
        self._rehearsed_table: Table | None = None
        self._planned: SnapshotPlan | None = None
        """Of the rehearsal: its manifests are written, and it was never sent."""
        self._schema: pa.Schema | None = None
        self._begun: TableMetadata | None = None
        """The table as rows of this epoch are written for it."""
        self._planner = SnapshotPlanner(sink, identity)
        self._dictionaries = Dictionaries()
        self._compactor = compactor_of(sink, sink.compact, identity, limits)

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        with self._errors("check"):
            abilities = check_table(self._sink, self._load(), schema)
        self._schema = schema
        together = together_with_others(self._sink, self.catalog)
        found = [*abilities, catalog_ability(self.catalog)]
        return found if together is None else [*found, together]

    def begin(self, begin: Begin) -> Json:
        """Add missing columns where that is wanted, and hand the table's shape to the tasks."""
        super().begin(begin)
        with self._errors("begin"):
            self._forget_rehearsal()
            table = self._newest_known()
            if self._schema is not None and self._sink.evolve == "add_columns":
                table = self._evolved(table, self._schema)
            # A catalog that issues its own keys for the files gives them per client: tasks ask too.
            has_own_keys = bool(table.config)
            self._begun = table.metadata
            return {"metadata": None if has_own_keys else self._planner.handout(table)}

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        super().commit(epoch, receipts)
        if self._compactor is not None:
            self._compactor.after_commit()

    def prune(self, below: EpochNumber) -> None:
        """Nothing to do: each commit removes the proofs below its own."""

    def recount(self) -> Recount:
        if self._sink.mode != "append":
            because = f"mode={self._sink.mode!r} replaces rows: their number means nothing"
            return Recount(rows=None, because=because)
        with self._errors("count rows"):
            return self._recount(self._load(), self._sink.branch)

    def _recount(self, table: Table, branch: str) -> Recount:
        """Rows of the branch; by epoch where every file is as a task of this sink wrote it."""
        if table.metadata.snapshot_by_name(branch) is None:
            return Recount(rows=0, because=f"branch {branch} has no snapshot")
        scan = table.scan() if branch == "main" else table.scan().use_ref(branch)
        tasks = list(scan.plan_files())
        handles = [handle_in(task.file.file_path) for task in tasks]
        rows = [task.file.record_count for task in tasks]
        epochs = rows_by_epoch(self._identity, zip(handles, rows, strict=True))
        # What the driver wrote for a merge, and rows that delete files hide, are of no one epoch.
        is_plain = not any(task.delete_files for task in tasks) and not any(
            handle is not None and handle.partition == DRIVER for handle in handles
        )
        missing = TableFiles(table.io).missing([task.file.file_path for task in tasks])
        return Recount(
            rows=scan.count(),
            because=f"rows of branch {branch}" + ("" if epochs is not None else OTHERS_WROTE),
            epochs=epochs if is_plain else None,
            is_alone=epochs is not None,
            faults=[f"{where} is in the table and not there" for where in missing],
        )

    def compact(self, *, target_bytes: int, is_dry_run: bool) -> Compacted:
        with self._errors("compact"):
            compaction = TableCompaction(
                self._sink, self._identity, self.catalog, target_bytes=target_bytes
            )
            return compaction.run(is_dry_run=is_dry_run)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        """Remove this uid's proofs from the table's properties; rows and snapshots stay."""
        with self._errors("drop"):
            for _ in range(_CONFLICTS_MAX):
                table = self._load()
                dropping = Ledger(self._identity, table.metadata.properties).dropping()
                if is_dry_run or not dropping.removed:
                    break
                change = private.properties_only(
                    table,
                    SetPropertiesUpdate(updates=dict(dropping.written)),
                    RemovePropertiesUpdate(removals=list(dropping.removed)),
                )
                try:
                    private.send(table, change)
                except (CommitFailedException, private.Stale):
                    continue
                break
        return Dropped(
            removed=[f"property {key} of {self._sink.address}" for key in dropping.removed]
        )

    def close(self) -> None:
        if self._compactor is not None:
            self._compactor.close()
        self._rehearsed = None
        self._planned = None
        self._rehearsed_table = None
        self._known = None
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    # Jobs of the engine's own writer

    engine_formats = (ICEBERG, "parquet")
    tasks_refusal = None

    @property
    def engine_location(self) -> str:
        with self._errors("look at the table"):
            table = self._newest_known()
            is_local = _jobs(table).place is not None
            return "file:///" if is_local else hadoop_url(_layout(table).data_path)

    def engine_refusal(self, schema: pa.Schema | None, form: str) -> str | None:
        with self._errors("look at the table"):
            table = self._newest_known()
            if _jobs(table).place is None and form != ICEBERG:
                return "the table is in an object store, where only Iceberg's own writer is used"
        if self._sink.file_bytes_max is not None:
            return "file_bytes_max is given, and Spark does not go by it"
        return EngineJob(metadata=table.metadata, rows=schema or pa.schema([]), form=form).refusal()

    def engine_write(self, handle: Handle, schema: pa.Schema, form: str) -> EngineWrite:
        with self._errors("get ready for a job"):
            table = self._newest_known()
            layout, jobs = _layout(table), _jobs(table)
            layout.markers(TableFiles(table.io)).put(handle)
            job = EngineJob(metadata=self._begun_metadata, rows=schema, form=form)
            is_local = jobs.place is not None
            folder = f"file://{jobs.folder(handle)}" if is_local else layout.folder(handle)
            return job.asked(handle, folder, self._dictionaries)

    def gather(self, written: EngineWritten) -> Receipt:
        """Take the files to where they will stay: a snapshot makes them visible."""
        handle = written.handle
        with self._errors("take the files of Spark's writer"):
            table, metadata = self._newest_known(), self._begun_metadata
            files, layout, jobs = TableFiles(table.io), _layout(table), _jobs(table)
            if jobs.place is None:
                prepared = stored_files(written, metadata, files, layout)
            else:
                found = job_files(written, metadata, jobs.folder(handle), self._dictionaries)
                spec_id = metadata.default_spec_id
                prepared = prepared_files(found, handle, files, layout, spec_id=spec_id)
            jobs.remove(handle)
            if not prepared:
                layout.markers(files).delete([handle])
            return receipt_of(
                handle,
                written.fingerprint,
                prepared,
                folder=layout.folder(handle),
                metadata=metadata,
            )

    @property
    def _begun_metadata(self) -> TableMetadata:
        if self._begun is None:
            raise InvariantBroken(f"{self._target}: no epoch has begun")
        return self._begun

    # The table and its ledger

    def _errors(self, verb: str) -> AbstractContextManager[None]:
        return self._translated(verb)

    def _translated(self, verb: str, *, is_commit: bool = False) -> AbstractContextManager[None]:
        doing = f"sink {self._identity.sink!r} on {self._target}: {verb}"
        return translate_errors(doing, scrub=self._sink.address.scrub, is_commit=is_commit)

    def _load(self) -> Table:
        """The table as it is now; a proof is never read from what was known before (I9)."""
        self._loaded_s = time.monotonic()
        self._known = self._sink.address.load(self.catalog)
        return self._known

    def _newest_known(self) -> Table:
        """Loaded anew where the keys that the catalog has given for its files may expire."""
        age_s = time.monotonic() - self._loaded_s
        if self._known is None or (self._known.config and age_s > _KEYS_AGE_MAX_S):
            return self._load()
        return self._known

    def _read(self) -> TableLedger:
        return TableLedger(self._identity, self._load(), self._sink.branch)

    @contextmanager
    def _reading(self, *, is_rehearsed: bool) -> Iterator[TableLedger]:
        seen = self._rehearsed_table if is_rehearsed else None
        yield TableLedger(self._identity, seen or self._load(), self._sink.branch)

    def _evolved(self, table: Table, schema: pa.Schema) -> Table:
        for _ in range(_CONFLICTS_MAX):
            if not new_columns(schema, table.schema()):
                return table
            try:
                add_columns(table, schema)
            except CommitFailedException:
                time.sleep(_CONFLICT_WAIT_S)
            table = self._load()
        raise TryAgain(f"{self._target}: others change the table all the time")

    # Before the decision

    def _require_prepared(
        self, ledger: TableLedger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        lost = _lost(ledger.table, receipts)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: files of {len(lost)} of {len(receipts)} receipts can't be "
                f"committed: {next(iter(lost.values()))}; and the ledger of {self._target} "
                "does not prove the epoch committed",
                "driver and executors must reach the same storage; orphan files may be removed "
                "only when they are older than any epoch that is still to be committed; columns "
                "may be replaced only while nothing is",
                handles=tuple(lost),
                shows_none=True,
            )

    def _require_acceptable(
        self, ledger: TableLedger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        if self._schema is not None:
            check_schema(self._sink, ledger.table, self._schema)
            if gone := unknown_columns(self._schema, ledger.table.schema()):
                raise TryAgain(
                    f"{self._target}: column {', '.join(gone)} was dropped while rows were written",
                    "the epoch is tried again whole, as the table is now",
                )
        self._planner.rehearse(ledger.table, epoch, receipts)
        self._planned = self._planner.plan(ledger, epoch, receipts)
        self._planned.make_durable(TableFiles(ledger.table.io))
        self._rehearsed_table = ledger.table

    def _forget_rehearsal(self) -> None:
        super()._forget_rehearsal()
        self._rehearsed_table = None
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.discard(TableFiles(self._newest_known().io))
        if self._sink.audit_branch is not None:
            self._planner.drop_audit_branch(self._load())

    # The commit

    def _publish(
        self, ledger: TableLedger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        table = ledger.table
        plan = self._plan_for(ledger, epoch, receipts)
        conflict = Conflict(
            TryAgain(
                f"{self._target}: epoch {epoch}: others committed {_CONFLICTS_MAX} times while "
                "this commit was made"
            )
        )
        with self._translated(f"commit epoch {epoch}", is_commit=True):
            try:
                private.send(table, plan.change)
            except (CommitFailedException, ValidationException) as error:
                plan.undo(table)
                raise conflict from error
            except private.Stale as error:
                # Not a clear refusal, so nothing is undone: the ledger is read again, and files
                # that the driver wrote have a marker.
                raise conflict from error
        self._published(table, plan)

    def _published(self, table: Table, plan: SnapshotPlan) -> None:
        """Make a change durable that the catalog has taken, and remove what was only for it."""
        files = TableFiles(table.io)
        files.make_durable(table.metadata_location)
        self._known = table
        _layout(table).markers(files).delete(plan.handles)
        plan.clean_up(table)

    # Several tables by one request: see `multi_table`

    def share(self, members: Sequence[IcebergCommitter]) -> TablesTransaction:
        return TablesTransaction(members)

    @property
    def address(self) -> TableAddress:
        return self._sink.address

    @property
    def sink_name(self) -> SinkName:
        return self._identity.sink

    @property
    def catalog(self) -> Catalog:
        """Opened, if it is not open yet."""
        if self._catalog is None:
            self._catalog = self._sink.address.open()
        return self._catalog

    def planned(
        self, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> tuple[Table, SnapshotPlan] | None:
        """The change that commits an epoch to the table as it is now; None where it has it."""
        is_rehearsed = self._take_rehearsal(epoch, receipts)
        with (
            self._errors(f"commit epoch {epoch}"),
            self._reading(is_rehearsed=is_rehearsed) as ledger,
        ):
            if not self._is_committable(ledger, epoch, receipts, is_rehearsed=is_rehearsed):
                self._clear(receipts)
                return None
            return ledger.table, self._plan_for(ledger, epoch, receipts)

    def taken(self, epoch: EpochNumber, plan: SnapshotPlan, receipts: Sequence[Receipt]) -> None:
        """After the catalog took a plan together with those of other tables."""
        with self._errors(f"commit epoch {epoch}"):
            self._published(self._load(), plan)
            self._clear(receipts)
        if self._compactor is not None:
            self._compactor.after_commit()

    def _plan_for(
        self, ledger: TableLedger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> SnapshotPlan:
        """The rehearsal's, where this is the table as it was then. It is sent once at most."""
        planned, self._planned = self._planned, None
        if planned is not None and ledger.table is self._rehearsed_table:
            return planned
        if planned is not None:
            planned.discard(TableFiles(ledger.table.io))
        plan = self._planner.plan(ledger, epoch, receipts)
        plan.make_durable(TableFiles(ledger.table.io))
        return plan

    # Markers

    def _clear(self, receipts: Sequence[Receipt]) -> None:
        table = self._newest_known()
        files = TableFiles(table.io)
        for receipt in receipts:
            _jobs(table, receipt).remove(receipt.handle)
        files.delete(_layout_for(table, one).marker(one.handle) for one in receipts)

    def _discard(self, receipt: Receipt) -> None:
        table = self._newest_known()
        _jobs(table, receipt).remove(receipt.handle)
        discard(receipt.handle, files=TableFiles(table.io), layout=_layout_for(table, receipt))

    def _listed(self) -> Sequence[InDoubt]:
        table = self._newest_known()
        markers = _layout(table).markers(TableFiles(table.io))
        _jobs(table).remove_unmarked(self._identity, markers)
        return markers.in_doubt(self._identity)

    def _is_prepared(self, receipt: Receipt) -> bool:
        table = self._newest_known()
        markers = _layout_for(table, receipt).markers(TableFiles(table.io))
        return markers.exists(receipt.handle)


def _layout(table: Table) -> Layout:
    return layout_of(table.metadata.location, table.metadata.properties)


def _layout_for(table: Table, receipt: Receipt) -> Layout:
    """By the receipt, as the table's data location may have been changed since (I9)."""
    folder = receipt.token.get("folder")
    return _layout(table) if folder is None else layout_around(str(folder))


def _jobs(table: Table, receipt: Receipt | None = None) -> JobFolders:
    layout = _layout(table) if receipt is None else _layout_for(table, receipt)
    return JobFolders(TableFiles(table.io).local(layout.job_folder))


def _lost(table: Table, receipts: Sequence[Receipt]) -> dict[str, str]:
    """Why this table can't have the files of some receipts, by handle."""
    locations = [where for receipt in receipts for where in locations_in(receipt)]
    sizes = dict(zip(locations, TableFiles(table.io).sizes(locations), strict=True))
    found = {}
    for receipt in receipts:
        why = misfit(receipt, table.metadata)
        for where, size in zip(locations_in(receipt), sizes_in(receipt), strict=True):
            if sizes[where] is None:
                why = f"{where} is not there"
            elif sizes[where] != size:
                why = f"{where} has {sizes[where]} bytes, and was prepared with {size}"
        if why is not None:
            found[str(receipt.handle)] = why
    return found
