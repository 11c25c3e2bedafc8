"""
`KeyedDelivery`: calls to a service with one endpoint, from the spool, after the decision.

The decided receipts fix the rows, their order and the rows per call. So every call has a number,
and its key is the same however often it is made:

    epochal-<uid>-s<sink>-e<epoch>-p<partition>-<claim>-c<call>

    driver 1   call 0 ─► taken, acknowledged │ call 1 ─► taken │ ✗ dies before it records call 1
    driver 2   skips call 0; repeats call 1 with the same key: the service answers, and does nothing

A service that keeps keys takes each call once. One that does not takes call 1 twice: at least once.

The claim is that of the decided attempt. Where a copy of the epoch log delivers the same epoch from
a spool of its own, its calls have other keys: they may hold other rows, which a service must not
take for repetitions. No ledger is shared then, so both are delivered.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from epochal.errors import InvariantBroken, RowRejected, TryAgain
from epochal.kit import json_lines
from epochal.kit.spool.ledger import SpoolLedger
from epochal.kit.spool.rows import RowSpool
from epochal.sinks.http.check import require_json
from epochal.sinks.http.writer import ROWS_PER_CALL
from epochal.terms import Ability, Claim, EpochNumber, Identity, Json, Receipt, quantity

if TYPE_CHECKING:
    from epochal.sinks.http.client import Client

_FLUSH_EVERY_S = 1.0
_FLUSH_CALLS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    partition: int
    claim: Claim
    number: int
    """From 0, within its partition."""
    rows: Sequence[bytes]
    """Each a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How calls are made, from the sink's declaration."""

    method: str
    body: Literal["json", "ndjson"]
    key_header: str
    concurrency: int
    order: Literal["none", "partition", "epoch"]
    on_reject: Literal["stop", "keep"]


class Acknowledged:
    """The calls of an epoch that were taken: in the ledger, and not in the ledger yet."""

    def __init__(self, ledger: SpoolLedger, epoch: EpochNumber) -> None:
        self._ledger = ledger
        self._epoch = epoch
        self._lock = threading.Lock()
        self._known = set(_calls_in(ledger.acknowledged(epoch) or ()))
        self._fresh: list[tuple[int, int]] = []
        self._flushed_s = time.monotonic()

    def __contains__(self, call: Call) -> bool:
        return (call.partition, call.number) in self._known

    def __len__(self) -> int:
        return len(self._known) + len(self._fresh)

    def add(self, call: Call) -> None:
        with self._lock:
            self._fresh.append((call.partition, call.number))
            is_due = time.monotonic() - self._flushed_s > _FLUSH_EVERY_S
            if is_due or len(self._fresh) >= _FLUSH_CALLS:
                self._flush()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._fresh:
            self._ledger.acknowledge(self._epoch, _runs(self._fresh))
            self._known.update(self._fresh)
            self._fresh = []
        self._flushed_s = time.monotonic()


class KeyedDelivery:
    def __init__(
        self,
        identity: Identity,
        spool: RowSpool,
        ledger: SpoolLedger,
        client: Client,
        options: CallOptions,
    ) -> None:
        self._identity = identity
        self._spool = spool
        self._ledger = ledger
        self._client = client
        self._options = options

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        if schema is not None:
            require_json(schema)
        return [
            Ability(
                name="each call taken once",
                granted=False,
                because=f"only the service can do that, by {self._options.key_header}: calls whose "
                "reply is lost are repeated with the same key",
            ),
            Ability(
                name="refuses before the decision",
                granted=False,
                because="calls are made after it; a call refused then is kept or stops the query "
                "(on_reject)",
            ),
        ]

    def deliver(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Mapping[str, Json]:
        ordered = sorted(receipts, key=lambda receipt: receipt.handle.partition)
        acknowledged = Acknowledged(self._ledger, epoch)
        rejected = _Rejected(self._spool, self._identity, epoch)

        def make(calls: Iterator[Call]) -> None:
            for call in calls:
                if call not in acknowledged:
                    self._make(epoch, call, rejected)
                    acknowledged.add(call)

        try:
            _in_parallel(make, self._jobs(ordered), self._options.concurrency)
        except TryAgain as error:
            raise TryAgain(
                f"epoch {epoch}: {error.message}; {quantity(len(acknowledged), 'call')} taken"
            ) from error
        finally:
            acknowledged.flush()
        rows = sum(receipt.rows for receipt in ordered)
        return {"rows": rows, "rejected": rejected.count()}

    def kept(self) -> str:
        store, folder = self._spool.store, _rejected_folder(self._identity)
        if not store.folders(folder):
            return ""
        return f"{store.location}/{folder}: calls that the service refused, kept for a person"

    def close(self) -> None:
        self._client.close()

    def _jobs(self, receipts: Sequence[Receipt]) -> Iterator[Iterator[Call]]:
        """Streams of calls that may run in parallel; within each, one call follows another."""
        streams = (self._calls(receipt) for receipt in receipts)
        if self._options.order == "partition":
            yield from streams
        elif self._options.order == "epoch":
            yield (call for stream in streams for call in stream)
        else:
            yield from (iter((call,)) for stream in streams for call in stream)

    def _calls(self, receipt: Receipt) -> Iterator[Call]:
        size = receipt.token.get(ROWS_PER_CALL)
        if not isinstance(size, int) or size < 1:
            raise InvariantBroken(f"the receipt of {receipt.handle} names {size} rows per call")
        handle = receipt.handle
        buffer: list[bytes] = []
        number = 0
        for batch in self._spool.read(receipt.handle, rows=receipt.rows):
            buffer += json_lines.lines(batch).to_pybytes().split(b"\n")[:-1]
            first = 0
            while len(buffer) - first >= size:
                rows = buffer[first : first + size]
                yield Call(partition=handle.partition, claim=handle.claim, number=number, rows=rows)
                first, number = first + size, number + 1
            buffer = buffer[first:]
        if buffer:
            yield Call(partition=handle.partition, claim=handle.claim, number=number, rows=buffer)

    def _make(self, epoch: EpochNumber, call: Call, rejected: _Rejected) -> None:
        key = self._key(epoch, call)
        content, kind = _body(call.rows, self._options.body)
        headers = {"Content-Type": kind, self._options.key_header: key}
        try:
            self._client.ask(self._options.method, content=content, headers=headers)
        except RowRejected as error:
            if self._options.on_reject == "stop":
                raise RowRejected(
                    f"{key}: {error.message}",
                    "no row was lost: correct the service and start again; or keep such rows aside "
                    'with on_reject="keep"; or, for this epoch, `epochal resolve give-up`',
                ) from error
            rejected.keep(call, key, error)

    def _key(self, epoch: EpochNumber, call: Call) -> str:
        owner = f"epochal-{self._identity.uid}-s{self._identity.tag}"
        return f"{owner}-e{epoch}-p{call.partition}-{call.claim}-c{call.number}"


class _Rejected:
    """Calls that the service will never take, kept beside the spool for a person."""

    def __init__(self, spool: RowSpool, identity: Identity, epoch: EpochNumber) -> None:
        self._store = spool.store
        self._folder = f"{_rejected_folder(identity)}/{epoch:020d}"

    def keep(self, call: Call, key: str, error: RowRejected) -> None:
        kept = {"key": key, "because": error.message, "rows": [json.loads(r) for r in call.rows]}
        name = f"{self._folder}/p{call.partition}-c{call.number}.json"
        self._store.put(name, json.dumps(kept, ensure_ascii=False).encode())

    def count(self) -> int:
        return len(self._store.names(self._folder))


def _rejected_folder(identity: Identity) -> str:
    return f"rejected/{identity.uid}-s{identity.tag}"


def _body(rows: Sequence[bytes], body: str) -> tuple[bytes, str]:
    if body == "ndjson":
        return b"\n".join(rows) + b"\n", "application/x-ndjson"
    if len(rows) == 1:
        return rows[0], "application/json"
    return b"[" + b",".join(rows) + b"]", "application/json"


def _in_parallel(
    verb: Callable[[Iterator[Call]], None], jobs: Iterator[Iterator[Call]], most: int
) -> None:
    """Run all jobs, `most` at a time; the first error stops the rest."""
    with ThreadPoolExecutor(most) as pool:
        running: set[Future[None]] = set()
        for job in jobs:
            running.add(pool.submit(verb, job))
            if len(running) >= most:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    one.result()
        for one in running:
            one.result()


def _runs(calls: Sequence[tuple[int, int]]) -> list[Json]:
    """Calls as [partition, first, last], consecutive ones together."""
    runs: list[list[int]] = []
    for partition, number in sorted(calls):
        if runs and runs[-1][0] == partition and runs[-1][2] == number - 1:
            runs[-1][2] = number
        else:
            runs.append([partition, number, number])
    return list(runs)


def _calls_in(runs: Sequence[Json]) -> Iterator[tuple[int, int]]:
    for run in runs:
        if not isinstance(run, list) or not all(isinstance(part, int) for part in run):
            raise InvariantBroken(f"{run!r} is not a range of calls, as this sink records them")
        partition, first, last = run
        yield from ((partition, number) for number in range(first, last + 1))
