"""The declaration of a function as a sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, ClassVar

from epochal.contract import Limits, Task
from epochal.errors import Misconfigured
from epochal.kit.sink_base import SinkBase
from epochal.kit.spool import RowSpool, SpoolCommitter, SpoolingWriter, SpoolLedger, spool_url
from epochal.logs.names import without_secrets
from epochal.sinks.callback.carrying import CarriedFunction
from epochal.sinks.callback.delivery import CallbackDelivery, CallbackEpoch
from epochal.terms import Identity, Json


@dataclass(frozen=True, kw_only=True)
class Callback(SinkBase):
    """
    A function that is called on the driver with each decided epoch that has rows.

    At least once an epoch, with a token that is the same at every call; never with rows of an
    epoch that is not decided. It has no way to say no: what it raises is `TryAgain` or an `OSError`
    (called again soon) or stops the query (called again at the next start).
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
        if not isinstance(self.function, CarriedFunction):
            object.__setattr__(self, "function", CarriedFunction(self.function))
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

    def committer(self, identity: Identity, limits: Limits) -> SpoolCommitter:  # noqa: ARG002
        spool = RowSpool.at(str(self.spool))
        delivery = CallbackDelivery(identity, spool, self.function)
        return SpoolCommitter(identity, spool, SpoolLedger(spool.place, identity), delivery)
