"""
The committer of a Hudi sink: one commit of the table's timeline per epoch.

An instant names no owner, so a note does, beside the timeline and before the instant is there:

    <table>/.hoodie/epochal/prepared/<handle>     the time of the instant that this attempt has

    driver    draw a time ── note ── start the instant ── Hudi writes ── note there? ── receipt
    commit    in Hudi's lock: no such epoch in the ledger? instant pending? ── complete ── note off
    abort     pending? ── Hudi's rollback ── note off

Completing an instant twice is not refused by Hudi: it leaves a second file of completion. So what
was read of the ledger before counts for nothing; it is read again inside the lock that every
completion of this table holds, and what is found there decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochal.contract import Begin, EngineWrite, EngineWritten
from epochal.errors import InvariantBroken, OutcomeUnknown, PreparedLost, TryAgain
from epochal.kit.marked_files import Conflict, MarkedFilesCommitter, Markers
from epochal.kit.sink_base import Dropped, Recount
from epochal.sinks.hudi.check import ONLY_LISTS, abilities, columns, require_keys, required
from epochal.sinks.hudi.client import (
    Before,
    HudiClient,
    State,
    TableKeys,
    WriteConflict,
    require_spark,
    running_spark,
    translate_errors,
)
from epochal.sinks.hudi.ledger import KEY, Ledger
from epochal.sinks.hudi.sink import TASKS_REFUSAL
from epochal.storage import open_store
from epochal.storage.urls import scheme_of
from epochal.terms import (
    DRIVER_ATTEMPTS,
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Proof,
    Receipt,
)

if TYPE_CHECKING:
    from epochal.sinks.hudi.sink import Hudi

_NOTES = ".hoodie/epochal"
_PREPARED = "prepared"


class HudiCommitter(MarkedFilesCommitter[Ledger]):
    """One sink's decisions on one table."""

    def __init__(self, sink: Hudi, identity: Identity, limits: Limits) -> None:
        waits_s = [wait_ms / 1000 for wait_ms in limits.retry_backoff_ms]
        super().__init__(
            identity, target=sink.target, trusts_rehearsal=True, conflict_waits_s=waits_s
        )
        self._sink = sink
        self._begun: dict[Handle, tuple[str, Before]] = {}
        """Jobs of this process: their instants, and the timeline when they began."""
        self._empty_numbers = count()
        self._opened: HudiClient | None = None
        self._rehearsed_ledger: Ledger | None = None

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        if schema is None and running_spark() is None:
            return [ONLY_LISTS]
        with self._errors("check"):
            self._columns(schema, self._client_of_now())
            return abilities(self._client, self._target)

    def begin(self, begin: Begin) -> Json:
        self._forget_rehearsal()
        self._begun.clear()
        return super().begin(begin)

    def in_doubt(self) -> Sequence[InDoubt]:
        if running_spark() is None:
            return self._listed()
        return super().in_doubt()

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        return Proof.UNKNOWN if running_spark() is None else super().outcome(epoch, receipt)

    def newest(self) -> Sequence[Mark] | None:
        return None if running_spark() is None else super().newest()

    def close(self) -> None:
        self._forget_client()

    def recount(self) -> Recount:
        if running_spark() is None:
            return Recount(rows=None, because="rows of a Hudi table are counted by Spark")
        with self._errors("count rows"):
            because = "rows of the table, of all its writers"
            return Recount(rows=self._client.rows(), because=because, is_alone=False)

    def drop(self, *, is_dry_run: bool) -> Dropped:  # noqa: ARG002
        return Dropped(kept="the epochs in the metadata of its commits, which nothing removes")

    # Jobs of Hudi's own writer

    engine_formats = ("hudi",)
    tasks_refusal = TASKS_REFUSAL

    @property
    def engine_location(self) -> str:
        return self._target if scheme_of(self._target) else f"file://{self._target}"

    def engine_refusal(self, schema: pa.Schema | None, form: str) -> str | None:  # noqa: ARG002
        return None

    def engine_write(self, handle: Handle, schema: pa.Schema, form: str) -> EngineWrite:
        with self._errors("start an instant"):
            client = self._client_of_now()
            selected = self._columns(schema, client)
            self._begun[handle] = self._started(handle)
            return EngineWrite(
                handle=handle,
                format=form,
                folder=self.engine_location,
                options=client.options,
                select=selected,
                required=self._required(client, schema),
                keys=self._keys(client.keys),
                order_by=client.keys.order if self._is_upsert else (),
                table=self._begun[handle][0],
            )

    def _columns(self, schema: pa.Schema | None, client: HudiClient) -> Mapping[str, str]:
        if self._is_upsert:
            require_keys(schema, client.keys, self._target)
        return columns(schema, client.schema, self._target)

    def _required(self, client: HudiClient, schema: pa.Schema) -> list[str]:
        keys = (*client.keys.record, *client.keys.order) if self._is_upsert else ()
        named = dict.fromkeys((*required(client.schema), *keys))
        return [name for name in named if name in schema.names]

    def _keys(self, keys: TableKeys) -> Sequence[str]:
        if not self._is_upsert:
            return ()
        return keys.record if self._sink.has_global_keys else (*keys.record, *keys.partition)

    @property
    def _is_upsert(self) -> bool:
        return self._sink.mode == "upsert"

    def _started(self, handle: Handle) -> tuple[str, Before]:
        client = self._client
        instant = client.new_instant()
        self._notes.put(handle, instant.encode())
        client.start(instant)
        return instant, client.get_ready(instant)

    def gather(self, written: EngineWritten) -> Receipt:
        """See every file, and that nobody has cleared this attempt away meanwhile."""
        instant, before = self._begun.pop(written.handle)
        (metadata,) = written.reports or ("{}",)
        receipt = Receipt(
            handle=written.handle,
            fingerprint=written.fingerprint,
            bytes=written.bytes,
            token={
                "instant": instant,
                "files": written.files,
                "metadata": metadata,
                "completed": before.completed,
                "pending": list(before.pending),
            },
        )
        with self._errors("look at the files of Hudi's writer"):
            if not self._notes.exists(written.handle):
                self._client.roll_back(instant)
                raise TryAgain(f"{written.handle} was aborted while it was still writing")
            why = self._lost(receipt)
            if why is not None:
                raise TryAgain(f"{written.handle} can't be committed: {why}")
        return receipt

    # The table and its ledger

    @property
    def _client(self) -> HudiClient:
        spark = require_spark()
        if self._opened is None or not self._opened.is_of(spark):
            options = self._sink.writer_options()
            self._opened = HudiClient(spark, self.engine_location, options)
        return self._opened

    def _client_of_now(self) -> HudiClient:
        """One that knows the columns that the table has now."""
        if not self._client.has_these_columns():
            self._forget_client()
        return self._client

    def _forget_client(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    @property
    def _notes(self) -> Markers:
        store = open_store(f"{self._target}/{_NOTES}", spark=running_spark())
        return Markers(store, _PREPARED)

    def _errors(self, verb: str) -> AbstractContextManager[None]:
        return translate_errors(self._doing(verb))

    def _doing(self, verb: str) -> str:
        return f"sink {self._identity.sink!r} on {self._target}: {verb}"

    def _read(self) -> Ledger:
        return Ledger(self._identity, self._client.ledger_text())

    @contextmanager
    def _reading(self, *, is_rehearsed: bool) -> Iterator[Ledger]:
        ledger = self._rehearsed_ledger if is_rehearsed else None
        self._rehearsed_ledger = None
        ledger = ledger or self._read()
        yield ledger
        self._rehearsed_ledger = ledger

    def _forget_rehearsal(self) -> None:
        super()._forget_rehearsal()
        self._rehearsed_ledger = None

    # Before the decision

    def _require_prepared(
        self,
        ledger: Ledger,  # noqa: ARG002  it was read before the timeline
        epoch: EpochNumber,
        receipts: Sequence[Receipt],
    ) -> None:
        lost = {str(one.handle): why for one in receipts if (why := self._lost(one)) is not None}
        if lost and self._read().is_done(epoch):
            raise TryAgain(f"{self._doing(f'commit epoch {epoch}')}: another driver has done it")
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {next(iter(lost.values()))}; and no commit of {self._target} "
                "proves it committed",
                "another writer rolled it back: each needs "
                "hoodie.clean.failed.writes.policy=LAZY, and the same lock",
                handles=tuple(sorted(lost)),
            )

    def _lost(self, receipt: Receipt) -> str | None:
        """Why an instant can't be completed with its files any more; None where it can."""
        if not receipt.token["files"]:
            return None  # an instant without files can be made again
        instant = str(receipt.token["instant"])
        state = self._client.state(instant)
        if state is State.COMPLETED:
            raise TryAgain(f"instant {instant} of {self._target} was completed a moment ago")
        if state is State.ROLLED_BACK_HALF:
            self._client.roll_back(instant)
        if state is not State.PENDING:
            return f"instant {instant} is not pending on the timeline: {state.value}"
        stats = _stats(receipt)
        sizes = self._client.sizes([stat["path"] for stat in stats])
        for stat, size in zip(stats, sizes, strict=True):
            if size != stat["fileSizeInBytes"]:
                found = "not there" if size is None else f"of {size} bytes"
                return f"{stat['path']} of {stat['fileSizeInBytes']} bytes is {found}"
        return None

    def _require_acceptable(
        self,
        ledger: Ledger,  # noqa: ARG002
        epoch: EpochNumber,  # noqa: ARG002
        receipts: Sequence[Receipt],
    ) -> None:
        """The rows were written for the table as it is now, which has no other constraints."""
        changed = "its columns" if not self._client.has_these_columns() else ""
        for receipt in receipts:
            if self._written_meanwhile(receipt):
                changed = "rows in its partitions"
        if changed:
            raise TryAgain(
                f"{self._doing('rehearse')}: {changed} were changed while rows were written",
                "the epoch is tried again whole, as the table is now",
            )

    def _written_meanwhile(self, receipt: Receipt) -> set[str]:
        """
        Partitions where others have put rows since keys were looked up there: a key that was new
        may be there by now. Hudi itself compares files only, and two new files are no conflict.
        """
        if not self._is_upsert:
            return set()
        mine = {str(stat["partitionPath"]) for stat in _stats(receipt)}
        written = self._client.partitions_written_since(_before(receipt))
        return written if mine and self._sink.has_global_keys else written & mine

    # The commit

    def _publish(self, ledger: Ledger, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        if len(receipts) > 1:
            raise InvariantBroken(f"{self._target}: epoch {epoch} has {len(receipts)} receipts")
        handles = [receipt.handle for receipt in receipts]
        handle, instant, metadata, before = self._to_complete(epoch, receipts)
        doing = self._doing(f"commit epoch {epoch}")

        def inside(state: State) -> Mapping[str, str]:
            now = self._read()
            if now.is_done(epoch) or state is not State.PENDING:
                raise _LooksOtherwise(f"instant {instant} is {state.value}")
            for receipt in receipts:
                if partitions := self._written_meanwhile(receipt):
                    where = ", ".join(sorted(partitions)[:3]) or "the table"
                    raise WriteConflict(f"{doing}: others have written to {where} since")
            return {KEY: now.with_epoch(epoch, handles)}

        try:
            with translate_errors(doing):
                self._client.complete(instant, metadata, before, inside)
        except _LooksOtherwise as error:
            raise Conflict(TryAgain(f"{doing}: {error}")) from error
        except WriteConflict as error:
            raise self._given_up(epoch, receipts, instant, error) from error
        except TryAgain as error:
            raise Conflict(OutcomeUnknown(error.message, error.hint)) from error
        self._notes.delete([handle])

    def _given_up(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], instant: str, error: WriteConflict
    ) -> Exception:
        """
        Roll an instant back that Hudi will never complete, decided or not: no row of it was or will
        be seen, and the rows are written again for the table as it is now.
        """
        if self._client.state(instant) is not State.PENDING or self._read().is_done(epoch):
            return Conflict(error)
        self._client.roll_back(instant)
        return PreparedLost(
            f"epoch {epoch}: instant {instant} was rolled back: {error.message}",
            "another writer changed the table in between: its columns, or rows of its partitions",
            handles=tuple(str(receipt.handle) for receipt in receipts),
        )

    def _to_complete(
        self, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> tuple[Handle, str, str | None, Before]:
        """
        The note, the instant, its files, and the timeline before it. A new instant where there are
        no rows, and none was started for them or it was rolled back.
        """
        for receipt in receipts:
            token: Mapping[str, Any] = receipt.token
            if token["files"] or self._client.state(token["instant"]) is State.PENDING:
                return receipt.handle, token["instant"], token["metadata"], _before(receipt)
        attempt = DRIVER_ATTEMPTS + next(self._empty_numbers)
        handle = self._identity.job_handle(epoch, attempt)
        instant, before = self._started(handle)
        self._client.make_inflight(instant)
        return handle, instant, None, before

    # Notes

    def _clear(self, receipts: Sequence[Receipt]) -> None:
        self._notes.delete(receipt.handle for receipt in receipts)

    def _discard(self, receipt: Receipt) -> None:
        noted = self._notes.read(receipt.handle)
        if noted is not None:
            self._client.roll_back(noted.decode())
            self._notes.delete([receipt.handle])

    def _listed(self) -> Sequence[InDoubt]:
        return self._notes.in_doubt(self._identity)

    def _marked(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        return [receipt for receipt in receipts if self._notes.exists(receipt.handle)]

    def _is_prepared(self, receipt: Receipt) -> bool:
        instant = self._instant(receipt)
        return instant is not None and self._client.state(instant) is State.PENDING

    def _may_be_visible(self, ledger: Ledger, receipt: Receipt) -> bool:  # noqa: ARG002
        instant = self._instant(receipt)
        return instant is not None and self._client.state(instant) is State.COMPLETED

    def _instant(self, receipt: Receipt) -> str | None:
        if "instant" in receipt.token:
            return str(receipt.token["instant"])
        noted = self._notes.read(receipt.handle)
        return None if noted is None else noted.decode()


class _LooksOtherwise(Exception):
    """Inside the lock, the timeline is not as it was before."""


def _before(receipt: Receipt) -> Before:
    token: Mapping[str, Any] = receipt.token
    return Before(completed=token["completed"], pending=token["pending"])


def _stats(receipt: Receipt) -> list[dict[str, Any]]:
    """What Hudi says of each file of a receipt."""
    metadata = json.loads(str(receipt.token["metadata"]))
    return [stat for stats in metadata.get("partitionToWriteStats", {}).values() for stat in stats]
