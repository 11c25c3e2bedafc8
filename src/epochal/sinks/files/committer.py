"""
The committer of a Files sink: every file to its place, then the epoch's manifest.

How a file comes to its place is the back end's. The manifest, put if absent, is the ledger: it
proves that all files are there. On a disk and on S3 files appear one by one before it; a commit
that was cut short is repeated and finds some of them in their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from epochal.contract import Begin, EngineWrite, EngineWritten, Rows
from epochal.errors import InvariantBroken, Misconfigured, PreparedLost, Refused
from epochal.kit.engine_files import Dictionaries, orc_footer, rising
from epochal.kit.hive_partitions import check_columns
from epochal.kit.marked_files import MarkedFilesCommitter, of_sink
from epochal.kit.sink_base import Compacted, Dropped, Recount
from epochal.sinks.files import layout
from epochal.sinks.files.backend import EngineAttempt, Showing, Staging
from epochal.sinks.files.formats import FORMATS, avro_name_refusal
from epochal.sinks.files.ledger import Ledger, LedgerView, Manifest, manifest_of
from epochal.sinks.files.row_counts import ROW_COUNTS
from epochal.sinks.files.spark_log import SparkLog
from epochal.sinks.files.writer import receipt_of
from epochal.terms import Ability, EpochNumber, Handle, Identity, InDoubt, Json, Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """How the engine's own writer is to write files."""

    compression: str
    sort_by: Sequence[str]
    options: Mapping[str, str]
    refusal: str | None
    """Why it is not asked for files."""
    tasks_refusal: str | None
    """Why tasks can't write them."""


class FileCommitter(MarkedFilesCommitter[LedgerView]):
    """One sink's decisions below one root."""

    def __init__(
        self,
        identity: Identity,
        staging: Staging,
        *,
        format: str,  # noqa: A002 (the option's own name)
        partition_by: tuple[str, ...],
        whole_epochs: Ability,
        engine: EngineFiles,
        log: SparkLog | None = None,
        has_log: bool = False,
    ) -> None:
        super().__init__(
            identity,
            target=staging.stores.shown.location,
            trusts_rehearsal=staging.trusts_rehearsal,
        )
        self._staging = staging
        self._format = format
        self._partition_by = partition_by
        self._whole_epochs = whole_epochs
        self._engine = engine
        self._dictionaries = Dictionaries() if format == "parquet" else None
        self._ledger = Ledger(staging.stores.ours, identity.uid, identity.tag)
        self._rehearsed_view: LedgerView | None = None
        self._log = log
        self._has_log = has_log

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        abilities = self._staging.check()
        self._require_log_fits()
        if schema is not None:
            check_schema(schema, self._format, self._partition_by)
            check_order(schema, self._engine.sort_by, self._partition_by)
        return [*abilities, self._whole_epochs]

    def begin(self, begin: Begin) -> Json:
        """Begin Spark's log where it is wanted: from here on Spark's readers go by it."""
        super().begin(begin)
        self._require_log_fits()
        if self._log is not None and self._has_log:
            self._log.mark()
        return None

    def prune(self, below: EpochNumber) -> None:
        """Readers of whole epochs go by the manifests, so none is dropped: they are folded."""
        self._ledger.fold(below)

    def recount(self) -> Recount:
        from epochal.sinks.files.operate import recount  # noqa: PLC0415  only operators ask

        return recount(self._staging.stores, self._ledger, self._identity)

    def reread(self, engine: Any) -> Rows:
        from epochal.sinks.files.reader import read_manifests  # noqa: PLC0415  loads pandas

        return read_manifests(self._staging.stores, list(self._ledger.all()), engine)

    def compact(self, *, target_bytes: int, is_dry_run: bool) -> Compacted:  # noqa: ARG002
        return Compacted(
            because="readers of a folder go by the files in it, and would see rows twice or not at "
            "all while one file takes the place of others; where files are too small: Delta or "
            "Iceberg, or a longer trigger"
        )

    def drop(self, *, is_dry_run: bool) -> Dropped:  # noqa: ARG002
        return Dropped(kept="manifests: readers of whole epochs find the rows by them")

    # Jobs of the engine's own writer

    @property
    def engine_formats(self) -> Sequence[str]:
        return (FORMATS[self._format].engine.name,)

    @property
    def engine_location(self) -> str:
        return self._staging.engine_location

    @property
    def tasks_refusal(self) -> str | None:
        return self._engine.tasks_refusal

    def engine_refusal(self, schema: pa.Schema | None, form: str) -> str | None:  # noqa: ARG002
        return self._engine.refusal or self._staging.engine_refusal()

    def engine_write(self, handle: Handle, schema: pa.Schema, form: str) -> EngineWrite:  # noqa: ARG002
        """The attempt's marker is there before the first task."""
        attempt = self._engine_attempt(handle)
        with attempt.errors():
            attempt.make()
        return EngineWrite(
            handle=handle,
            format=form,
            folder=attempt.job_url,
            is_listed=attempt.is_listed,
            partition_by=self._partition_by,
            sort_by=[rising(name) for name in self._sorted_by],
            options={
                **({} if self._dictionaries is None else self._dictionaries.options()),
                **FORMATS[self._format].engine.writer_options(
                    self._engine.compression, self._engine.options
                ),
            },
        )

    @property
    def _sorted_by(self) -> Sequence[str]:
        sort_by = self._engine.sort_by
        return (*self._partition_by, *sort_by) if sort_by else ()

    def gather(self, written: EngineWritten) -> Receipt:
        """Look at what the engine has written: from here on it is like the files of a task."""
        attempt = self._engine_attempt(written.handle)
        suffix = FORMATS[self._format].suffix(self._engine.compression)
        with attempt.errors():
            rows = attempt.gather(
                written,
                lambda number: layout.file_name(written.handle, number, suffix),
                self._footer_of,
                partial(_has_rows, form=self._format),
            )
            return receipt_of(
                attempt, written.handle, written.schema, rows, fingerprint=written.fingerprint
            )

    @property
    def _footer_of(self) -> Callable[[Path], tuple[Any, int]] | None:
        if self._dictionaries is not None:
            return self._dictionaries.footer
        return orc_footer if self._format == "orc" else None

    def _engine_attempt(self, handle: Handle) -> EngineAttempt:
        attempt = self._staging.engine_attempt(handle)
        if attempt is None:
            raise InvariantBroken(f"{self._target} is written by tasks")
        return attempt

    # The ledger

    def _errors(self, verb: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Stores raise our errors themselves."""
        return nullcontext()

    def _read(self) -> LedgerView:
        return LedgerView(self._ledger, self._identity)

    @contextmanager
    def _reading(self, *, is_rehearsed: bool) -> Iterator[LedgerView]:
        seen = self._rehearsed_view if is_rehearsed else None
        self._rehearsed_view = seen or self._read()
        yield self._rehearsed_view

    # Before the decision

    def _require_prepared(
        self,
        ledger: LedgerView,  # noqa: ARG002
        epoch: EpochNumber,
        receipts: Sequence[Receipt],
    ) -> None:
        try:
            self._staging.require_prepared(epoch, receipts, self._ledger.showing(epoch, receipts))
        except (PreparedLost, InvariantBroken):
            # Another driver may have carried out the same decision meanwhile, and cleaned up.
            if not self._read().is_done(epoch):
                raise

    def _require_seen(
        self,
        ledger: LedgerView,  # noqa: ARG002
        epoch: EpochNumber,  # noqa: ARG002
        receipts: Sequence[Receipt],
    ) -> None:
        self._staging.rehearse(receipts)

    def _require_acceptable(
        self,
        ledger: LedgerView,  # noqa: ARG002
        epoch: EpochNumber,  # noqa: ARG002
        receipts: Sequence[Receipt],  # noqa: ARG002
    ) -> None:
        # Again: another sink of the same folder may have begun a log after this one began.
        self._require_log_fits()

    def _require_log_fits(self) -> None:
        if self._log is None:
            return
        if self._has_log:
            self._log.refuse_unless_ours()
        else:
            self._log.refuse_if_there()

    # The commit

    def _publish(self, ledger: LedgerView, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        manifest = manifest_of(self._identity, epoch, receipts)
        if not manifest.files or self._staging.shows_by_manifest:
            self._show(manifest, receipts, self._ledger.showing(epoch, receipts))
            return
        taken = self._ledger.start_showing(epoch, receipts)
        if taken is None:
            raise self._committed_by_others(epoch)
        showing = self._ledger.showing(epoch, receipts)
        if taken.is_new:
            showing = replace(showing, age_s=lambda: None)
        try:
            if not self._is_committed(self._read(), epoch, receipts):
                self._show(manifest, receipts, showing)
        except Refused:
            self._ledger.store.delete(taken.keys)
            raise
        except PreparedLost:
            # Nothing was shown under this note: a repeat must not take what is gone for shown.
            if taken.is_new:
                self._ledger.store.delete(taken.keys[-1:])
            raise
        self._ledger.store.delete(taken.keys)

    def _show(self, manifest: Manifest, receipts: Sequence[Receipt], showing: Showing) -> None:
        self._publish_files(manifest, receipts, showing)
        if not self._ledger.put(manifest):
            self._is_committed(self._read(), manifest.epoch, receipts)

    def _publish_files(
        self, manifest: Manifest, receipts: Sequence[Receipt], showing: Showing
    ) -> None:
        if self._log is None or not self._has_log:
            self._staging.publish(manifest.epoch, receipts, showing)
            return
        self._log.mark()
        last = self._log.last()
        is_first = self._staging.publish(manifest.epoch, receipts, showing)
        if manifest.files:
            self._log.append(manifest.files, since=last if is_first else -1)

    # What is prepared

    def _clear(self, receipts: Sequence[Receipt]) -> None:
        self._staging.clear(receipts)

    def _clear_listed(self, found: InDoubt) -> None:
        self._staging.clear_listed(found)

    def _discard(self, receipt: Receipt) -> None:
        self._staging.discard(receipt)

    def _listed(self) -> Sequence[InDoubt]:
        self._staging.remove_old_scratch()
        return of_sink(self._identity, self._staging.listed())

    def _marked(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """All: a folder or an upload is its own marker, and what is gone is not found."""
        return list(receipts)

    def _is_prepared(self, receipt: Receipt) -> bool:
        return self._staging.is_prepared(receipt)

    def _may_be_visible(self, ledger: LedgerView, receipt: Receipt) -> bool:
        """Files in their place without a manifest are of a commit that was cut short."""
        return self._staging.is_published(receipt) or ledger.may_be_shown(receipt.handle)


_EMPTY_BYTES_MAX = 1 << 20
"""A header, or what a format writes before the first row, is smaller."""


def _has_rows(path: Path, form: str) -> bool:
    """Only a job's first task begins a file before it has seen a row."""
    if not path.name.startswith("part-00000-") or path.stat().st_size > _EMPTY_BYTES_MAX:
        return True
    with pa.OSFile(str(path)) as file:
        return ROW_COUNTS[form](file, path.name) > 0


def check_order(schema: pa.Schema, sort_by: Sequence[str], partition_by: Sequence[str]) -> None:
    """Refuse an order that files can't have."""
    missing = [name for name in sort_by if name not in schema.names]
    if missing:
        raise Misconfigured(
            f"sort_by names {missing}, and the columns are {schema.names}",
            "sort_by takes names of columns that this sink is given",
        )
    if same := [name for name in sort_by if name in partition_by]:
        raise Misconfigured(
            f"sort_by names {same}, which are the same in all rows of a file: see partition_by",
            "leave them out of sort_by",
        )


def check_schema(schema: pa.Schema, form: str, partition_by: Sequence[str]) -> None:
    """Refuse columns that can't be written, with the column's name."""
    if not schema.names:
        raise Misconfigured("the rows have no columns", "select at least one")
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise Misconfigured(
            f"columns {twice} appear more than once", 'rename one: select=["a", "b as other"]'
        )
    check_columns(schema, partition_by)
    inside = pa.schema([column for column in schema if column.name not in partition_by])
    if form == "csv" and len(inside) == 1 and inside.field(0).nullable:
        name = inside.field(0).name
        raise Misconfigured(
            f"column {name!r} is the only one in the files and may be null: in CSV that is an "
            "empty line, which readers pass over",
            f'rule nulls out: select=["coalesce({name}, …) {name}"]; or add a column, or take '
            "another format",
        )
    _check_types(inside, form)


def _check_types(schema: pa.Schema, name: str) -> None:
    """Refuse columns that the format can't hold."""
    for field in schema:
        why = FORMATS[name].refusal(field.type)
        if name == "avro":
            why = why or avro_name_refusal(field.name)
        if why is not None:
            raise Misconfigured(
                f"column {field.name!r} can't be written as {name}: {why}",
                'leave it out or cast it: select=["…"]; or take another format: '
                + ", ".join(FORMATS),
            )
