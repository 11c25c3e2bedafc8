"""`Callback`: the declaration of a function as a sink, and the epoch that the function is given."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, ClassVar

import pyarrow as pa

from epochal.contract import Committer, Task
from epochal.errors import Misconfigured
from epochal.kit.sink_base import Promises, SinkBase
from epochal.kit.spool.rows import RowSpool, SpoolingWriter, spool_url
from epochal.storage.urls import without_secrets
from epochal.terms import Ability, EpochNumber, Identity, Json, Limits, Receipt, owner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackEpoch:
    """What the function is given: a decided epoch with all its rows."""

    pipeline: str
    sink: str
    number: EpochNumber
    token: str
    """The same at every call for this epoch, and for no other: deduplicate by it."""
    rows: int
    _batches: Callable[[], Iterator[pa.RecordBatch]] = field(repr=False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in the same order at every call, read from the spool one batch at a time."""
        return self._batches()

    def table(self) -> pa.Table:
        """All rows at once, in memory."""
        return pa.Table.from_batches(list(self._batches()))


PROMISES = (
    Promises(
        sink="`Callback`",
        at_one_instant="what the function makes of it",
        readers_must="keep the token with what was done; else at least once",
        proof="the spool",
        limits=["at least once by design"],
        cannot={
            "refuse rows": "the function is called for decided epochs only",
            "be unreachable": "rows are prepared in the spool, without the function",
            "be misconfigured": "nobody but the function knows its target",
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class Callback(SinkBase):
    """
    A function that is called on the driver with each decided epoch that has rows.

    At least once per epoch, with a token that is the same at every call; never with rows of an
    epoch that is not decided. It can't refuse an epoch: after `TryAgain` or an `OSError` it is
    called again soon; any other exception, also that of `sys.exit()`, stops the query, and the next
    start calls it again.
    """

    kind: ClassVar[str] = "callback"

    function: Callable[[CallbackEpoch], Any] = field(kw_only=False)
    """Pickled as Spark pickles functions, and unpickled only where it is called."""
    spool: str | PathLike[str] | None = field(default=None, repr=False)
    """Where rows wait: a folder that driver and executors share, or an object store's URL."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise Misconfigured(
                f"Callback: {self.function!r} is not a function", "Callback(f, spool=…)"
            )
        if not isinstance(self.function, PicklableFunction):
            object.__setattr__(self, "function", PicklableFunction(self.function))
        object.__setattr__(self, "spool", spool_url("Callback", self.spool))
        super().__post_init__()

    @property
    def target(self) -> str:
        return str(self.function)

    def describe(self) -> Mapping[str, Json]:
        return {
            "kind": self.kind,
            "target": self.target,
            "mode": "append",
            "spool": without_secrets(str(self.spool)),
        }

    def writer(self, task: Task) -> SpoolingWriter:
        return SpoolingWriter(task, RowSpool.at(str(self.spool)))

    def committer(self, identity: Identity, limits: Limits) -> Committer:  # noqa: ARG002
        # Only the driver loads these.
        from epochal.kit.spool.committer import SpoolCommitter  # noqa: PLC0415
        from epochal.kit.spool.ledger import SpoolLedger  # noqa: PLC0415

        spool = RowSpool.at(str(self.spool))
        delivery = CallbackDelivery(identity, spool, self.function)
        return SpoolCommitter(identity, spool, SpoolLedger(spool.store, identity), delivery)


class PicklableFunction:
    """
    A function that is pickled as bytes and unpickled when it is called: executors only write to
    the spool, and need not have the function's module.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        module = getattr(function, "__module__", type(function).__module__)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = f"{module}.{name}"
        self._function: Callable[[Any], Any] | None = function
        self._pickled = b""

    def get(self) -> Callable[[Any], Any]:
        if self._function is None:
            self._function = pickle.loads(self._pickled)  # noqa: S301  our own bytes, see below
        return self._function

    def __call__(self, epoch: Any) -> Any:
        return self.get()(epoch)

    def __repr__(self) -> str:
        return self.name

    def __getstate__(self) -> dict[str, Any]:
        pickled = self._pickled if self._function is None else _pickled(self._function)
        return {"name": self.name, "_function": None, "_pickled": pickled}


def _pickled(function: Callable[[Any], Any]) -> bytes:
    """As Spark pickles functions, where Spark is loaded: also those of a notebook or script."""
    if "pyspark" not in sys.modules:
        return pickle.dumps(function)
    from pyspark import cloudpickle  # noqa: PLC0415  only where it is loaded already

    pickled: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]  # untyped there
    return pickled


class CallbackDelivery:
    """
    Calls the function with the rows of a decided epoch.

    Runs on the driver, once per commit; a commit that was interrupted calls again.
    """

    def __init__(
        self, identity: Identity, spool: RowSpool, function: Callable[[CallbackEpoch], Any]
    ) -> None:
        self._identity = identity
        self._spool = spool
        self._function = function

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:  # noqa: ARG002
        return [
            Ability(
                name="called once per epoch",
                granted=False,
                because="a driver that dies during the call calls again: deduplicate by token",
            )
        ]

    def deliver(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Mapping[str, Json]:
        ordered = sorted(receipts, key=lambda receipt: receipt.handle.partition)
        rows = sum(receipt.rows for receipt in ordered)

        def batches() -> Iterator[pa.RecordBatch]:
            for receipt in ordered:
                yield from self._spool.read(receipt.handle, rows=receipt.rows)

        if rows:
            # Of a driver with a copy of the epoch log, the same epoch may have other rows.
            claim = owner_of(ordered, self._identity)
            self._function(
                CallbackEpoch(
                    pipeline=self._identity.pipeline,
                    sink=self._identity.sink,
                    number=epoch,
                    token=f"epochal-{self._identity.uid}-s{self._identity.tag}-e{epoch}-{claim}",
                    rows=rows,
                    _batches=batches,
                )
            )
        return {"rows": rows}

    def kept(self) -> str:
        return ""

    def close(self) -> None:
        """What the function opened stays open."""
