"""`HttpCommitter`: `POST /commit/{txn}` for every task at a receiver, then the epoch's mark.

After a lost answer `GET /transactions/{txn}` has the outcome. That a transaction does not exist, or
is committed, counts only where the receiver itself answers so: a 404 or a 200 of a proxy on the way
proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from epochal.contract import Begin
from epochal.errors import (
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    TryAgain,
    copy_at_work,
    require_still_committed,
)
from epochal.kit.sink_base import CommitterBase, Dropped, Recount
from epochal.sinks.http.check import check
from epochal.sinks.http.client import Client, Reply
from epochal.sinks.http.sink import Service
from epochal.sinks.http.writer import Format
from epochal.terms import (
    Ability,
    Claim,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Proof,
    Receipt,
    Uid,
    claims_of,
    handle_prefix,
)

PROTOCOL = "epochal-two-phase"
VERSION = 1
_COMMITTED = "committed"
_LOST = frozenset({"unknown", "aborted"})
_FORGOTTEN = "forgotten"
_TAKEN = "taken"
_IN_ITS_PLACE = "a proxy may answer in its place, by a page for maintenance or for logging in"


class HttpCommitter(CommitterBase):
    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        service: Service,
        form: Format,
        *,
        part_bytes: int,
        threads: int,
    ) -> None:
        self._identity = identity
        self._url = service.url
        self._client = Client(service, backoff_ms=limits.retry_backoff_ms)
        self._form = form
        self._part_bytes = part_bytes
        self._threads = threads
        self._about: Mapping[str, Any] | None = None

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        return check(
            self._ask_about(),
            schema,
            url=self._url,
            content_type=self._form.content_type,
            part_bytes=self._part_bytes,
        )

    def begin(self, begin: Begin) -> Json:
        if begin.newest_committed is not None:
            newest = self._newest_epoch()
            require_still_committed(self._identity.sink, begin.newest_committed, proven=newest)
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """The receiver, if it can, applies everything and takes it back."""
        txns = [str(receipt.handle) for receipt in receipts if receipt.rows]
        if not txns or not (self._about or self._ask_about()).get("rehearses"):
            return
        reply = self._client.ask(
            "POST", "/rehearse", json_body={**self._owner(), "txns": txns}, reads=(404, 409, 410)
        )
        if reply.status != 200 or "rehearsed" not in reply.body:
            raise TryAgain(f"epoch {epoch} can't be rehearsed at {self._url}: {reply.text}")

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        txns = [str(receipt.handle) for receipt in receipts if receipt.rows]
        claims = sorted(claims_of(receipts))
        replies = self._at_once(lambda txn: self._commit_one(txn, claims), txns)
        self._require_not_taken(replies)
        lost = tuple(txn for txn, reply in zip(txns, replies, strict=True) if _is_lost(reply))
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {self._url} does not have {len(lost)} of {len(txns)} prepared "
                "transactions any more",
                "its data was restored from a backup, or another client aborted them",
                handles=lost,
            )
        for txn, reply in zip(txns, replies, strict=True):
            if reply.body.get("state") != _COMMITTED:
                raise _unexpected(f"commit of {txn}", reply)
        self._mark(epoch, txns, claims)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        self._at_once(self._abort_one, [str(receipt.handle) for receipt in receipts])

    def in_doubt(self) -> Sequence[InDoubt]:
        found: list[InDoubt] = []
        params = {"prefix": handle_prefix(self._identity.uid)}
        while True:
            body = self._client.ask("GET", "/transactions", params=params).body
            for one in _list(body, "transactions"):
                handle = Handle.parse(one["txn"])
                if handle is None or handle.sink == self._identity.tag:
                    age_s = one.get("age_s")
                    found.append(InDoubt(name=one["txn"], handle=handle, age_s=age_s))
            if not body.get("next"):
                return found
            params = {**params, "after": body["next"]}

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        if receipt.rows:
            path = f"/transactions/{receipt.handle}"
            reply = self._client.ask("GET", path, reads=(404, 410))
            if _is_lost(reply):
                return Proof.ABORTED
            if reply.body.get("state") != _COMMITTED:
                return Proof.UNKNOWN
        # The mark is the epoch's proof: without it `newest` does not show the epoch.
        newest = self._newest_epoch()
        return Proof.COMMITTED if newest is not None and newest >= epoch else Proof.UNKNOWN

    def newest(self) -> Sequence[Mark]:
        params = {"pipeline": self._identity.pipeline, "sink": self._identity.sink}
        body = self._client.ask("GET", "/marks", params=params).body
        return [
            Mark(uid=Uid(one["uid"]), epoch=EpochNumber(one["epoch"]), run=one.get("run"))
            for one in _list(body, "marks")
        ]

    def prune(self, below: EpochNumber) -> None:
        self._client.ask("DELETE", "/marks", params={**self._key(), "below": str(below)})

    def recount(self) -> Recount:
        """The visible rows, by epoch, counted by the receiver."""
        if not self._ask_about().get("counts"):
            return Recount(rows=None, because="the receiver keeps no rows, or can't count them")
        listed = _list(self._client.ask("GET", "/counts", params=self._key()).body, "epochs")
        epochs = {EpochNumber(one["epoch"]): int(one["rows"]) for one in listed}
        return Recount(
            rows=sum(epochs.values()),
            epochs=epochs,
            because="visible rows, counted by the receiver",
        )

    def drop(self, *, is_dry_run: bool) -> Dropped:
        """Delete all proofs below the newest, which readers of whole epochs still need."""
        newest = self._newest_epoch()
        if newest is None:
            return Dropped()
        if not is_dry_run:
            self.prune(newest)
        return Dropped(
            removed=[f"proofs of epochs below {newest}, as far as they are kept"],
            kept=f"the mark of epoch {newest}: readers of whole epochs need it",
        )

    def close(self) -> None:
        self._client.close()

    def _ask_about(self) -> Mapping[str, Any]:
        about = self._client.ask("GET", "/").body
        if about.get("protocol") != PROTOCOL or about.get("version") != VERSION:
            raise Misconfigured(
                f"{self._url} is no receiver of {PROTOCOL} {VERSION}: it answers "
                f"{about.get('protocol')} {about.get('version')}",
                'put `epochal receiver` in front of the service, or use mode="idempotency-key"',
            )
        self._about = about
        return about

    def _owner(self) -> dict[str, Json]:
        identity = self._identity
        return {"pipeline": identity.pipeline, "sink": identity.sink, "run": identity.run}

    def _key(self) -> dict[str, str]:
        return {"uid": self._identity.uid, "tag": self._identity.tag}

    def _newest_epoch(self) -> EpochNumber | None:
        """The newest epoch that is marked for this sink of this uid."""
        mine = (mark.epoch for mark in self.newest() if mark.uid == self._identity.uid)
        return max(mine, default=None)

    def _require_not_taken(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if reply.body.get("state") == _TAKEN:
                raise copy_at_work(f"sink {self._identity.sink!r} at {self._url}: {reply.text}")

    def _commit_one(self, txn: str, claims: Sequence[Claim]) -> Reply:
        headers = {"Idempotency-Key": f"{txn}-commit"}
        path = f"/commit/{quote(txn)}"
        return self._client.ask(
            "POST",
            path,
            json_body={**self._owner(), "claims": claims},
            headers=headers,
            reads=(404, 409, 410),
            is_final=True,
        )

    def _abort_one(self, txn: str) -> Reply:
        reply = self._client.ask("POST", f"/abort/{quote(txn)}", reads=(409,))
        state = reply.body.get("state")
        if state is None or (reply.status == 409 and state != _COMMITTED):
            raise _unexpected(f"abort of {txn}", reply)
        return reply

    def _mark(self, epoch: EpochNumber, txns: Sequence[str], claims: Sequence[Claim]) -> None:
        key = {**self._key(), "epoch": epoch}
        mark = {**self._owner(), **key, "txns": list(txns), "claims": claims}
        reply = self._client.ask("POST", "/marks", json_body=mark, reads=(409, 410), is_final=True)
        self._require_not_taken([reply])
        if reply.status != 200 or reply.body.get("epoch") != epoch:
            raise _unexpected(f"mark of epoch {epoch}", reply)

    def _at_once(self, verb: Callable[[str], Reply], txns: Sequence[str]) -> list[Reply]:
        """All of them, several at a time; the first error is raised once all are done."""
        if len(txns) < 2:
            return [verb(txn) for txn in txns]
        with ThreadPoolExecutor(min(self._threads, len(txns))) as pool:
            return [asked.result() for asked in [pool.submit(verb, txn) for txn in txns]]


def _is_lost(reply: Reply) -> bool:
    return reply.body.get("state") in _LOST


def _unexpected(what: str, reply: Reply) -> Exception:
    if reply.status == 200:
        return OutcomeUnknown(
            f"{what} was answered by something else than the receiver: {reply.text}", _IN_ITS_PLACE
        )
    if reply.body.get("state") == _FORGOTTEN:
        return OutcomeUnknown(
            f"{what}: {reply.text}",
            "a later epoch is settled there, so this one is: leave this driver stopped",
        )
    if "state" not in reply.body and reply.status == 404:
        return Misconfigured(
            f"{what} answered 404, and not by the receiver: {reply.text}", "is base_url right?"
        )
    return InvariantBroken(f"{what} answered {reply.status}: {reply.text}")


def _list(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """An answer without the list must not pass for an empty one."""
    found = body.get(name)
    if not isinstance(found, list):
        raise TryAgain(
            f"the receiver's answer has no {name}: {str(dict(body))[:200]}", _IN_ITS_PLACE
        )
    return found
