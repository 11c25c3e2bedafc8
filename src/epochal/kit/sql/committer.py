"""`SqlCommitter`, the base of both strategies: the pool, the ledger, the checks, and retries."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import pyarrow as pa

from epochal.contract import Room
from epochal.errors import (
    EpochalError,
    Refused,
    TryAgain,
    copy_at_work,
    require_known_format,
    require_still_committed,
)
from epochal.kit.sink_base import Dropped, Operable, Recount
from epochal.kit.sql.check import Checker
from epochal.kit.sql.client import Pool, Session
from epochal.kit.sql.dialect import Dialect
from epochal.kit.sql.ledger import FORMAT, Ledger
from epochal.kit.sql.staging_tables import Staging
from epochal.kit.sql.table_sink import TableSink
from epochal.terms import (
    Ability,
    EpochNumber,
    Identity,
    Json,
    Limits,
    Mark,
    Proof,
    Receipt,
    quantity,
)

logger = logging.getLogger("epochal")

T = TypeVar("T")
HOLDER_WAIT_S = 2.0
"""How long to wait for another driver's open transaction before its sessions are ended."""
_CLEAR_WAIT_S = 0.1
_DEADLOCKS_MAX = 5
_AFTER_DEADLOCK_S = (0.01, 0.1)
"""At least and at most, before the server is asked again: others that wait alike meet again."""


def retry_transient(
    attempt: Callable[[], T],
    limits: Limits,
    is_patient: Callable[[BaseException | None], bool] = lambda _: False,
) -> T:
    """
    Repeat a whole transaction that failed with `TryAgain`: each begins anew. Causes that others'
    transactions bring, and take away, are waited for as long as a commit may take (`is_patient`).
    """
    waits_ms, deadline_s = limits.retry_backoff_ms, time.monotonic() + limits.commit_retry_max_s
    number = 0
    while True:
        try:
            return attempt()
        except TryAgain as error:
            is_left = is_patient(error.__cause__) and time.monotonic() < deadline_s
            if not waits_ms or (number >= len(waits_ms) and not is_left):
                raise
        # With jitter: two writers that wait alike would meet again.
        wait_ms = waits_ms[min(number, len(waits_ms) - 1)]
        time.sleep(wait_ms / 1000 * random.uniform(0.5, 1.0))
        number += 1


def has_rows(receipt: Receipt) -> bool:
    """Whether its task left anything; a receipt made from the target's listing did."""
    return bool(receipt.token.get("staged", True))


def proven(receipt: Receipt, ledger: Proof) -> Proof:
    """
    What the ledger proves of a receipt of which the server lists nothing.

    A task without rows left nothing to list: then an empty listing proves nothing.
    """
    return Proof.UNKNOWN if ledger is Proof.ABORTED and not has_rows(receipt) else ledger


class SqlCommitter(Operable):
    def __init__(
        self,
        *,
        sink: TableSink,
        identity: Identity,
        limits: Limits,
        dialect: Dialect,
        pool: Pool,
        checker: Checker[Any, Any],
        staging: Staging,
    ) -> None:
        self.sink = sink
        self.identity = identity
        self.dialect = dialect
        self.pool = pool
        self.staging = staging
        self._limits = limits
        self._checker = checker
        self._ledger = Ledger(schema=sink.meta, identity=identity, dialect=dialect)
        self._handout: Mapping[str, Json] | None = None
        self._after = identity.committed
        """The newest epoch that was committed here before the one at work."""
        pool.act_for([identity])

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        self._checker.is_ready = False
        abilities = self._ask("check", lambda session: self._checker.check(session, schema))
        # After it: a right that is missing is reported there, with the grant.
        written = self._ask("read the ledger", self._ledger.format, missing=FORMAT)
        require_known_format(f"the ledger {self._ledger.table}", written, FORMAT)
        return abilities

    def has_leftovers(self) -> bool:
        """No epoch is open when it is asked, so whatever is listed is left over."""
        return self.sink.is_fixed and bool(
            self._ask(
                "list staged attempts", lambda session: self.staging.listed(session, self.identity)
            )
        )

    def room(self) -> Room | None:
        limit = self.sink.staging_limit_bytes
        if limit is None:
            return None
        used = self._ask("measure staging tables", self.staging.size, missing=0)
        return Room(used_bytes=used, limit_bytes=limit)

    def newest(self) -> Sequence[Mark]:
        return self._ask("read the ledger", self._ledger.newest, missing=[])

    def prune(self, below: EpochNumber) -> None:
        self._in_transaction(
            "prune the ledger",
            lambda session: self._ledger.prune(session, below),
            missing=0,
            lock_wait_s=HOLDER_WAIT_S,
        )

    def close(self) -> None:
        self.pool.close()

    def _begin_after(self, newest_committed: EpochNumber | None) -> None:
        """Compare before anything is created here; the epoch is then taken only after this one."""
        self._after = newest_committed
        if newest_committed is not None:
            self._ask("compare the ledger", self._require_not_back)

    def _require_not_back(self, session: Session) -> None:
        """Raise where the ledger has lost the newest epoch that was committed here."""
        if self._after is None:
            return
        try:
            newest = self._ledger.newest_epoch(session)
        except self.dialect.errors as error:
            if not self.dialect.is_missing(error):
                raise
            newest = None
        require_still_committed(self.identity.sink, self._after, proven=newest)

    def _committed_by_others(self, epoch: EpochNumber) -> Refused:
        return copy_at_work(
            self.doing(f"the ledger has epoch {epoch} under handles that this log did not decide")
        )

    # For operators

    def recount(self) -> Recount:
        """Count all rows of the table: it does not record who wrote them."""
        sink = self.sink
        if sink.write_mode.is_keyed:
            return Recount(
                rows=None,
                because=f"mode={sink.mode!r} changes rows in place: their number shows nothing",
            )

        def count(session: Session) -> Recount:
            ((rows,),) = session.query(
                f"SELECT COUNT(*) FROM {self.dialect.quote(*sink.table_name.parts)}"
            )
            because = f"all rows of {sink.table}, of all writers"
            return Recount(rows=int(rows), because=because, is_alone=False)

        absent = Recount(rows=None, because=f"there is no table {sink.table}")
        return self._ask("count rows, which takes SELECT on the table", count, missing=absent)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        """
        Delete the ledger rows of this sink of this uid, and staging tables that nobody uses. Those
        that hold its attempts are in doubt.
        """
        ledger, staging = self._ledger, self.staging

        def forget(session: Session) -> Dropped:
            count = ledger.count(session) if is_dry_run else ledger.forget(session)
            unused = staging.remove_unused(session, is_dry_run=is_dry_run)
            removed = [
                f"{quantity(count, 'row')} of {ledger.schema}.{self.dialect.ledger}",
                f"{quantity(unused, 'unused table')} of {staging.schema}",
            ]
            counted = zip((count, unused), removed, strict=True)
            return Dropped(removed=[text for number, text in counted if number])

        return self._in_transaction("forget", forget, missing=Dropped())

    def missing_ddl(self, schema: pa.Schema) -> Sequence[str]:
        def ask(session: Session) -> list[str]:
            self._checker.expect(schema)
            found = self._checker.missing(session) if self.sink.is_fixed else []
            return [statement for one in found for statement in one.ddl]

        return self._ask("look for what is missing", ask)

    def server_time(self) -> float:
        def read(session: Session) -> float:
            ((seconds,),) = session.query(self.dialect.clock)
            return float(seconds)

        return self._ask("read the clock", read)

    def server(self) -> Mapping[str, Json]:
        return self._ask("read its identity", lambda session: self.dialect.server(session.query))

    def server_change(self, before: Mapping[str, Json]) -> str:
        return self._ask(
            "compare its identity",
            lambda session: self.dialect.server_change(session.query, before),
        )

    # Sessions

    def doing(self, verb: str) -> str:
        return f"sink {self.identity.sink!r} on {self.sink.place}: {verb}"

    def make_ready(self) -> None:
        """Create what is missing, once per start."""
        if not self._checker.is_ready:
            run = self._ask if self.dialect.ddl_commits else self._in_transaction
            run("create what is missing", self._checker.make_ready)
            self._handout = None
            self._checker.is_ready = True

    @property
    def is_settled_in(self) -> bool:
        """Whether all is there that an epoch needs, and tasks need to know nothing."""
        return self._checker.is_ready and not self._checker.hands_out

    def hand_out(self) -> Json:
        """What tasks need to know of the table, in every epoch as it is now."""
        self.make_ready()
        if self._checker.hands_out:
            self._handout = self._ask(
                "read the table", lambda session: self._checker.handout(session, self._handout)
            )
        return self._handout

    def _read_again(self) -> None:
        """After an epoch that failed the table is read again: it may have been altered."""
        self._checker.is_ready = False

    def clear_staging(self, receipts: Sequence[Receipt]) -> None:
        """Housekeeping after a COMMIT: whatever it meets, the epoch is done."""
        if self.staging.is_clearing_due(receipts):
            try:
                self._in_transaction(
                    "clear staging tables", self.staging.clear_up, lock_wait_s=_CLEAR_WAIT_S
                )
            except EpochalError as error:
                logger.info("staging tables are cleared later: %s", error)

    def _ask(
        self,
        verb: str,
        ask: Callable[[Session], T],
        *,
        missing: T | None = None,
        deadlocks_max: int = _DEADLOCKS_MAX,
    ) -> T:
        """
        Ask on the primary; a schema that does not exist yet holds nothing.

        What a COMMIT leaves unknown is an error of ours by now: of any other nothing has happened.
        So a connection that was only believed to answer is replaced once, and a server that chose
        this session to end a deadlock is asked again: on MySQL that can be a plain SELECT, while
        others create tables.
        """
        session = self.pool.take()
        try:
            return ask(session)
        except self.dialect.errors as error:
            if missing is not None and self.dialect.is_missing(error):
                return missing
            is_stale = session.is_unasked and self.dialect.is_network(error)
            is_deadlock = deadlocks_max > 0 and self.dialect.is_deadlock(error)
            if not (is_stale or is_deadlock):
                self.end_holders(error, [self.identity])
                raise self.dialect.classify(error, self.doing(verb)) from error
        finally:
            self.pool.give_back(session)
        if is_deadlock:
            time.sleep(random.uniform(*_AFTER_DEADLOCK_S))
        left = deadlocks_max - is_deadlock
        return self._ask(verb, ask, missing=missing, deadlocks_max=left)

    def end_holders(self, error: BaseException, identities: Sequence[Identity]) -> None:
        """
        After a lock timeout, end sessions of earlier drivers of these sinks (I7): one that is
        frozen inside a transaction keeps its locks as long as its machine answers.
        """
        if not self.dialect.is_lock_wait(error):
            return
        session = self.pool.take()
        with suppress(*self.dialect.errors):
            self.dialect.end_older_sessions(session, identities)
        self.pool.give_back(session)

    def _in_transaction(
        self,
        verb: str,
        work: Callable[[Session], T],
        *,
        missing: T | None = None,
        lock_wait_s: float | None = None,
    ) -> T:
        """A short transaction, committed at its end."""

        def whole(session: Session) -> T:
            session.begin(lock_wait_s=lock_wait_s)
            try:
                done = work(session)
            except BaseException:
                session.roll_back()
                raise
            with self.dialect.classified(self.doing(verb), is_commit=True):
                session.commit()
            return done

        return self._ask(verb, whole, missing=missing)
