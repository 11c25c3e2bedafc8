"""
The committer of a Delta sink: one version of the table per epoch.

The ledger is in the log itself, in the commit that shows the rows (see `ledger`). It is read on the
handle on which the commit is made, so delta-rs refuses the commit where another one of the same
application id came in between. After any error: read the ledger on a new handle, and only then
repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import RemoveAction

from epochal.contract import Begin, EngineWrite, EngineWritten
from epochal.errors import InvariantBroken, Misconfigured, OutcomeUnknown, PreparedLost, TryAgain
from epochal.kit.compaction import compactor_of
from epochal.kit.engine_files import (
    Dictionaries,
    JobFolders,
    engine_files,
    hadoop_url,
    listed_sizes,
    require_put,
    writer_options,
)
from epochal.kit.marked_files import (
    OTHERS_WROTE,
    Conflict,
    MarkedFilesCommitter,
    at_once,
    is_of,
    rows_by_epoch,
)
from epochal.kit.parquet import nullable_inside
from epochal.kit.sink_base import Compacted, Dropped, Recount
from epochal.sinks.delta.check import (
    Rehearsal,
    WritePlan,
    abilities,
    check_delete_when,
    check_missing,
    deciding_fields,
    plan_for,
)
from epochal.sinks.delta.client import (
    Table,
    active_paths,
    add_of,
    commit_properties,
    hooks,
    removals,
    small_files,
)
from epochal.sinks.delta.errors import plain_text, translate_errors
from epochal.sinks.delta.ledger import Ledger, NewestEpoch, ledger_id
from epochal.sinks.delta.merge import merge
from epochal.sinks.delta.table_files import JOBS, TableFiles, files_of, handle_in, require_ours
from epochal.sinks.delta.types import columns_digest, delta_schema, misfit
from epochal.sinks.delta.writer import DataFile, Statistics, data_path, sealed_receipt
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Receipt,
    quantity,
)

if TYPE_CHECKING:
    from epochal.sinks.delta.sink import Delta


class DeltaCommitter(MarkedFilesCommitter[Ledger]):
    """One sink's decisions on one table."""

    def __init__(self, sink: Delta, identity: Identity, limits: Limits) -> None:
        waits_s = [wait_ms / 1000 for wait_ms in limits.retry_backoff_ms]
        super().__init__(identity, target=sink.target, conflict_waits_s=waits_s)
        self._sink = sink
        self._files = sink.table_files()
        local = self._files.local
        self._jobs = JobFolders(None if local is None else local / JOBS)
        self._table = Table(self._files)
        self._newest = NewestEpoch(identity)
        self._dictionaries = Dictionaries()
        self._schema: pa.Schema | None = None
        self._plan: WritePlan | None = None
        self._generated: Mapping[str, str] = {}
        self._compactor = compactor_of(sink, sink.compact, identity, limits)

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        self._schema = schema
        table = self._table.open()
        if table is None:
            check_missing(self._sink, schema)
        else:
            self._remember(plan_for(self._sink, table, schema))
        check_delete_when(self._sink, schema)
        return abilities(table)

    def begin(self, begin: Begin) -> Json:
        super().begin(begin)
        if self._plan is None:
            self._plan = self._made_ready()
            self._remember(self._plan)
        return self._plan.handout()

    def _remember(self, plan: WritePlan) -> None:
        """Which columns of the table are generated: tasks can't compute them."""
        self._generated = plan.generated

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        super().commit(epoch, receipts)
        if self._compactor is not None:
            self._compactor.after_commit()

    def close(self) -> None:
        if self._compactor is not None:
            self._compactor.close()

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._plan = None  # the next attempt is written for the table as it is then
        super().abort(epoch, receipts)

    def recount(self) -> Recount:
        table = self._table.open()
        if table is None:
            return Recount(rows=None, because=f"there is no table at {self._target}")
        with self._errors("count rows"):
            return self._recount(table)

    def _recount(self, table: DeltaTable) -> Recount:
        """Rows of this version; by epoch where every file is as a task of this sink wrote it."""
        paths = sorted(unquote(path) for path in active_paths(table))
        if because := _uncountable(self._sink, table, paths):
            return Recount(rows=None, because=because)
        counted = at_once(lambda path: _rows_in(self._files, path), paths)
        rows = [count if isinstance(count, int) else 0 for count in counted]
        epochs = rows_by_epoch(self._identity, zip(map(handle_in, paths), rows, strict=True))
        return Recount(
            rows=sum(rows),
            because=f"rows in the files of version {table.version()}"
            + ("" if epochs is not None else OTHERS_WROTE),
            epochs=epochs,
            is_alone=epochs is not None,
            faults=[fault for fault in counted if isinstance(fault, str)],
        )

    def compact(self, *, target_bytes: int, is_dry_run: bool) -> Compacted:
        """By delta-rs, in one version that changes no row. Prepared files are not in it."""
        table = self._table.require()
        with self._errors("compact"):
            if instants := _instants_in_folders(table):
                return Compacted(
                    because=f"the table is partitioned by {', '.join(instants)}, whose values "
                    "deltalake writes without a time zone: compact with OPTIMIZE of Spark"
                )
            small = small_files(table, target_bytes)
            if is_dry_run or not small:
                return Compacted(files_before=sum(small), files_after=len(small))
            before = table.version()
            try:
                done = table.optimize.compact(target_size=target_bytes)
            except CommitFailedError as error:
                raise TryAgain(f"{self._doing('compact')}: {error}") from error
        self._table.make_durable(before)
        return Compacted(
            files_before=int(done["numFilesRemoved"]), files_after=int(done["numFilesAdded"])
        )

    def drop(self, *, is_dry_run: bool) -> Dropped:
        """
        Remove rows that a late task staged for a merge after its marker was gone: VACUUM passes
        over them. Data files of such tasks are VACUUM's, like all that no version names.
        """
        with self._errors("drop"):
            staged = self._files.staged()
            orphans = [path for path in staged if is_of(self._identity, handle_in(path))]
            if not is_dry_run:
                self._files.delete(orphans)
        ledger = ledger_id(self._identity.uid, self._identity.tag)
        return Dropped(
            removed=[f"the staged file {path}" for path in orphans],
            kept=f"the application transaction {ledger} and those of its name: a Delta log has no "
            "way to remove one; delta.setTransactionRetentionDuration lets the table forget it",
        )

    # Jobs of the engine's own writer

    engine_formats = ("parquet",)

    @property
    def engine_location(self) -> str:
        return "file:///" if self._files.local is not None else hadoop_url(self._target)

    @property
    def tasks_refusal(self) -> str | None:
        for name in self._generated:
            return f"column {name} is generated, which takes Spark's own writer"
        return None

    def engine_refusal(self, schema: pa.Schema | None, form: str) -> str | None:  # noqa: ARG002
        if self.engine_location.startswith("az://"):
            return "Hadoop knows this store as abfss://container@account.dfs.core.windows.net/…"
        if self._sink.mode == "merge":
            return "rows of a merge are read by deltalake, and kept apart for it by tasks"
        if self._sink.max_file_bytes is not None:
            return "max_file_bytes is given, and Spark does not split files by their size"
        for column in schema or ():
            if pa.types.is_nested(column.type):
                return f"column {column.name} is nested: a file's statistics don't count its nulls"
        return None

    def engine_write(self, handle: Handle, schema: pa.Schema, form: str) -> EngineWrite:
        with self._errors("get ready for a job"), self._files.errors():
            self._files.markers.put(handle)
        is_local = self._files.local is not None
        return EngineWrite(
            handle=handle,
            format=form,
            folder=f"file://{self._jobs.folder(handle)}" if is_local else self._job_url(handle),
            is_listed=not is_local,
            partition_by=self._planned.partition_by,
            select=self._planned.select(schema),
            options={**self._dictionaries.options(), **writer_options(self._sink.compression)},
        )

    def _job_url(self, handle: Handle) -> str:
        """In a store: files stay where a job puts them."""
        return f"{hadoop_url(self._target)}/{handle}"

    def gather(self, written: EngineWritten) -> Receipt:
        """Take the files to where they will stay: the table's log makes them visible."""
        with self._errors("take the files of Spark's writer"), self._files.errors():
            is_local = self._files.local is not None
            receipt = sealed_receipt(
                self._files,
                written.handle,
                self._moved(written) if is_local else self._put(written),
                fingerprint=written.fingerprint,
                is_partitioned=bool(self._planned.partition_by),
                columns=self._planned.columns,
            )
            self._jobs.remove(written.handle)
            if not receipt.rows:
                self._files.markers.delete([written.handle])
            return receipt

    def _moved(self, written: EngineWritten) -> list[DataFile]:
        folder, table = self._jobs.folder(written.handle), Path(self._target)
        moved: list[DataFile] = []
        for file in engine_files(folder, written, footer_of=self._dictionaries.footer):
            compression = self._sink.compression
            path = data_path(file.partition, written.handle, len(moved), compression)
            (table / path).parent.mkdir(parents=True, exist_ok=True)
            file.move_to(table / path)
            moved.append(self._data_file(written, path, file.footer))
        return moved

    def _put(self, written: EngineWritten) -> list[DataFile]:
        """The files of a job in a store, where the log of the job lists them."""
        handle, files = written.handle, self._files
        sizes = listed_sizes(written, self._job_url(handle))
        paths = [f"{handle}/{relative}" for relative in sizes]
        require_put(sizes, files.sizes(paths), self._job_url(handle), self._target)
        footers = dict(zip(paths, at_once(self._footer, paths), strict=True))
        rows = sum(footer.num_rows for footer in footers.values())
        if rows != written.fingerprint.rows:
            raise TryAgain(
                f"Spark has written {quantity(written.fingerprint.rows, 'row')} to "
                f"{self._job_url(handle)}, and the files there have {rows}",
                "the epoch is tried again at the next start",
            )
        files.delete(path for path, footer in footers.items() if not footer.num_rows)
        return [
            self._data_file(written, path, footer)
            for path, footer in footers.items()
            if footer.num_rows
        ]

    def _footer(self, path: str) -> pq.FileMetaData:
        with self._files.open(path) as stream:
            footer = pq.read_metadata(stream)
        self._dictionaries.note(footer)
        return footer

    def _data_file(self, written: EngineWritten, path: str, footer: pq.FileMetaData) -> DataFile:
        plan = self._planned
        names = [*written.schema.names, *plan.generated]
        columns = [plan.types.field(name) for name in names if name not in plan.partition_by]
        statistics = Statistics(pa.schema(columns), plan.stats_columns)
        statistics.take_file(lambda: self._files.open(path), footer)
        return DataFile(path=path, footer=footer, statistics=statistics)

    @property
    def _planned(self) -> WritePlan:
        if self._plan is None:
            raise InvariantBroken(f"{self._target}: no epoch has begun")
        return self._plan

    # The table and its ledger

    def _errors(self, verb: str) -> AbstractContextManager[None]:
        return translate_errors(self._doing(verb))

    def _doing(self, verb: str) -> str:
        return f"sink {self._identity.sink!r} on {self._target}: {verb}"

    def _read(self) -> Ledger:
        return Ledger(self._identity, self._table.open(), self._newest)

    @contextmanager
    def _reading(self, *, is_rehearsed: bool) -> Iterator[Ledger]:  # noqa: ARG002
        with self._table.newest() as table:
            yield Ledger(self._identity, table, self._newest)

    def _made_ready(self) -> WritePlan:
        """Make what is missing and was asked for: the table, its new columns."""
        table = self._table.open()
        if table is None:
            table = self._created()
        plan = plan_for(self._sink, table, self._schema)
        if plan.fit is None or not plan.fit.new or self._schema is None:
            return plan
        new = nullable_inside(
            pa.schema([self._schema.field(name).with_nullable(True) for name in plan.fit.new])
        )
        try:
            with self._errors("add columns"):
                table.alter.add_columns(list(delta_schema(new).fields))
        except CommitFailedError as error:
            raise TryAgain(f"{self._doing('add columns')}: {error}") from error
        return plan_for(self._sink, self._table.require(), self._schema)

    def _created(self) -> DeltaTable:
        check_missing(self._sink, self._schema)
        if self._schema is None:
            raise Misconfigured(
                f"{self._target} is to be created, and its columns are not known yet",
                "start the pipeline, which knows them",
            )
        written = [
            column.with_nullable(True)
            for column in self._schema
            if self._sink.mode != "merge"
            or column.name not in deciding_fields(self._sink, self._schema)
            or column.name in self._sink.order_by
        ]
        try:
            with self._errors("create the table"):
                DeltaTable.create(
                    self._files.uri,
                    delta_schema(nullable_inside(pa.schema(written))),
                    mode="ignore",
                    partition_by=list(self._sink.partition_by or ()),
                    storage_options=self._files.options,
                )
        except CommitFailedError as error:
            raise TryAgain(f"{self._doing('create the table')}: {error}") from error
        except TableNotFoundError as error:
            # What deltalake raises where it can't make the folder.
            raise Misconfigured(
                f"{self._doing('create the table')}: {plain_text(error)}",
                "the folder above the table must be there and writable",
            ) from None
        return self._table.require()

    # Before the decision

    def _require_prepared(
        self, ledger: Ledger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        """
        See every file from here, in the partitions and with the columns that the table has: a
        commit would take others, and no reader would find the rows, or their values, again.
        """
        digest = columns_digest(ledger.table)
        partition_by = set(ledger.table.metadata().partition_columns)

        def lost_of(receipt: Receipt) -> str | None:
            has_these_columns = receipt.token.get("columns") == digest
            changed = None if has_these_columns else ledger.table
            return self._lost(receipt, partition_by, changed)

        with self._errors("look for prepared files"):
            found = at_once(lost_of, receipts)
        lost = {str(one.handle): why for one, why in zip(receipts, found, strict=True) if why}
        if lost:
            self._plan = None  # rows that are written again are written for the table as it is now
            raise PreparedLost(
                f"epoch {epoch}: files of {len(lost)} of {len(receipts)} receipts can't be "
                f"committed: {next(iter(lost.values()))}; and the log of {self._target} does not "
                "prove them committed",
                "somebody removed them (VACUUM with a short retention does), or gave the table "
                "other partitions or columns, or driver and executors don't see the same folder",
                handles=tuple(sorted(lost)),
                shows_none=True,
            )

    def _lost(
        self, receipt: Receipt, partition_by: set[str], changed: DeltaTable | None
    ) -> str | None:
        """
        Why the table can't have the files of a receipt; None where it can. `changed` is the table
        where it has other columns than the files were written for.
        """
        files = files_of(receipt)
        columns = set() if self._sink.mode == "merge" else partition_by
        sizes = self._files.sizes([file["path"] for file in files])
        for file, size in zip(files, sizes, strict=True):
            if size is None:
                return f"{file['path']} is not there"
            if size != file["bytes"]:
                return f"{file['path']} has {size} bytes, and was prepared with {file['bytes']}"
            if file["partition"].keys() != columns:
                return f"{file['path']} is of other partitions than the table has now"
            if changed is not None and (why := self._misfit(changed, receipt, file)):
                return f"{file['path']} is of other columns than the table has now: {why}"
        return None

    def _misfit(self, table: DeltaTable, receipt: Receipt, file: Mapping[str, Any]) -> str | None:
        with self._files.open(file["path"]) as stream:
            written = pq.read_schema(stream)
        nulls: Any = receipt.token["nulls"]
        return misfit(written, table, partition=file["partition"], nulls=nulls)

    def _require_acceptable(
        self, ledger: Ledger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        plan = self._still_planned(ledger.table)
        Rehearsal(sink=self._sink, files=self._files, epoch=epoch, receipts=receipts).judge(plan)
        if self._sink.mode == "overwrite_partitions":
            self._replaced(ledger.table, receipts)

    def _still_planned(self, table: DeltaTable) -> WritePlan:
        """Look again: somebody may have changed the table since the tasks got their plan."""
        given, self._plan = self._plan, None
        plan = plan_for(self._sink, table, self._schema)
        is_short = plan.fit is not None and bool(plan.fit.new)
        if is_short or (given is not None and given.handout() != plan.handout()):
            raise TryAgain(
                f"{self._doing('rehearse')}: its partitions or its columns were changed while "
                "rows were written for it",
                "the epoch is tried again whole, as the table is now",
            )
        self._plan = plan
        return plan

    # The commit

    def _is_committed(
        self, ledger: Ledger, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> bool:
        is_done = super()._is_committed(ledger, epoch, receipts)
        if is_done:
            # The driver that committed it may have died before it was on disk.
            self._table.make_recent_durable(ledger.table)
        return is_done

    def _publish(self, ledger: Ledger, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        before = ledger.table.version()  # a merge moves its handle on
        try:
            with self._errors(f"commit epoch {epoch}"):
                self._write(ledger, epoch, receipts)
        except (CommitFailedError, TryAgain) as error:
            doing = self._doing(f"commit epoch {epoch}")
            raise Conflict(OutcomeUnknown(f"{doing}: {error}")) from error
        self._table.make_durable(before)

    def _write(self, ledger: Ledger, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        files = [file for receipt in receipts for file in files_of(receipt)]
        handles = [receipt.handle for receipt in receipts]
        if self._sink.mode == "merge" and files:
            properties = commit_properties(ledger.entry(epoch, handles))
            merge(self._sink, ledger.table, self._files, files, properties)
            ledger, files = self._read(), []
            if ledger.is_done(epoch):
                return
            # It changed nothing, and so made no version: the ledger's entry is written alone.
        is_replacing = self._sink.mode == "overwrite_partitions"
        table = ledger.table
        table.create_write_transaction(
            [
                *(add_of(file) for file in files),
                *(self._replaced(table, receipts) if is_replacing else ()),
            ],
            mode="append",
            schema=table.schema(),
            partition_by=table.metadata().partition_columns,
            commit_properties=commit_properties(ledger.entry(epoch, handles)),
            post_commithook_properties=hooks(table),
        )

    def _replaced(self, table: DeltaTable, receipts: Sequence[Receipt]) -> list[RemoveAction]:
        partitions = [file["partition"] for receipt in receipts for file in files_of(receipt)]
        return removals(table, partitions, table.metadata().partition_columns)

    # Markers

    def _clear(self, receipts: Sequence[Receipt]) -> None:
        # A task without rows has no marker either.
        left = [one for one in receipts if files_of(one) or self._is_prepared(one)]
        if self._sink.mode == "merge":
            for receipt in left:
                self._files.delete(self._paths_of(receipt))
        for receipt in left:
            self._jobs.remove(receipt.handle)
        self._files.markers.delete(receipt.handle for receipt in left)

    def _discard(self, receipt: Receipt) -> None:
        self._files.delete(self._paths_of(receipt))
        self._jobs.remove(receipt.handle)
        self._files.markers.delete([receipt.handle])

    def _paths_of(self, receipt: Receipt) -> list[str]:
        named = [require_ours(file["path"], receipt.handle) for file in files_of(receipt)]
        return named or self._files.files_of_attempt(receipt.handle)

    def _listed(self) -> Sequence[InDoubt]:
        self._jobs.remove_unmarked(self._identity, self._files.markers)
        return self._files.markers.in_doubt(self._identity)

    def _is_prepared(self, receipt: Receipt) -> bool:
        return self._files.markers.exists(receipt.handle)

    def _may_be_visible(self, ledger: Ledger, receipt: Receipt) -> bool:
        """Where the log is past this epoch and its history was cleaned up: leave the files."""
        return ledger.was_done(receipt.handle.epoch)


def _instants_in_folders(table: DeltaTable) -> list[str]:
    """Partition columns of instants: without a zone, Spark takes their values for its own."""
    types = pa.schema(table.schema())
    columns = [types.field(name) for name in table.metadata().partition_columns]
    return [
        one.name for one in columns if pa.types.is_timestamp(one.type) and one.type.tz is not None
    ]


def _uncountable(sink: Delta, table: DeltaTable, paths: Sequence[str]) -> str:
    """Why a count would mean nothing; empty where it means something."""
    if sink.mode != "append":
        return f"mode={sink.mode!r} replaces rows: their number means nothing"
    if "deletionVectors" in (table.protocol().reader_features or ()):
        return "the table has the feature deletionVectors: its files hold rows that readers skip"
    if any("://" in path or path.startswith("/") for path in paths):
        return "the table names files outside its folder, as shallow clones do"
    return ""


def _rows_in(files: TableFiles, path: str) -> int | str:
    """The rows of one file, or what is wrong with it."""
    try:
        with files.open(path) as file:
            return int(pq.ParquetFile(file).metadata.num_rows)
    except FileNotFoundError:
        return f"{path} is in the table and not there"
    except (OSError, pa.ArrowException) as error:
        return f"{path} can't be read: {error}"
