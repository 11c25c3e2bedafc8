"""
One call of a driver to the outside, as a value.

Log, targets and the engine's checkpoint are all that outlives a driver, and a driver reaches them
by calls only. So a call is where everything bad happens: a crash before or after its effect, a
reply that is lost, an effect that lands late or twice. The scheduler of a run sees each call as
it is issued and chooses; the stand-ins below do nothing but make the call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epochal.contract import APPEND_ONLY, Begin, Select, Task
from epochal.protocol.admission import Position
from epochal.terms import (
    Ability,
    EpochNumber,
    Fingerprint,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Offsets,
    Proof,
    Receipt,
    SinkName,
)
from epochal.testing.crash import READS

LOG = "log"
SPARK = "spark"
TARGET = "target"

_HASH_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Call:
    actor: str
    room: str
    """LOG, SPARK or TARGET."""
    name: str
    """Which target; empty in the other rooms."""
    verb: str
    args: tuple[Hashable, ...] = ()
    identity: Identity | None = None

    @property
    def changes_something(self) -> bool:
        return self.verb not in READS

    def __str__(self) -> str:
        where = f"{self.room}:{self.name}" if self.name else self.room
        return f"{self.actor} {where}.{self.verb}({', '.join(_short(arg) for arg in self.args)})"


Send = Callable[[Call], Any]
"""Makes a call and gives its answer, or raises what the caller is to see."""


def _short(arg: object) -> str:
    if isinstance(arg, bytes):
        return f"{len(arg)} bytes"
    if isinstance(arg, tuple):
        return "[" + ", ".join(_short(one) for one in arg) + "]"
    if isinstance(arg, Receipt):
        return _short_handle(str(arg.handle))
    return _short_handle(str(arg))


def _short_handle(text: str) -> str:
    handle = Handle.parse(text)
    if handle is None:
        return text
    return f"g{handle.generation}.e{handle.epoch}.p{handle.partition}.t{handle.attempt}"


def row_hash(row: Hashable) -> int:
    """A hash of one row that is the same in every process."""
    state = 0xCBF29CE484222325
    for byte in repr(row).encode():
        state = (state ^ byte) * 0x100000001B3 % _HASH_MODULUS
    return state


class SimLog:
    """An epoch log whose every verb is a call."""

    place = "the simulated log"

    def __init__(self, send: Send, actor: str) -> None:
        self._send = send
        self._actor = actor

    def _call(self, verb: str, *args: Hashable) -> Any:
        return self._send(Call(self._actor, LOG, "", verb, args))

    def put_if_absent(self, number: int, record: bytes) -> bool:
        return bool(self._call("put_if_absent", number, record))

    def numbers(self) -> Sequence[int]:
        found: Sequence[int] = self._call("numbers")
        return found

    def read(self, number: int) -> bytes | None:
        found: bytes | None = self._call("read", number)
        return found

    def delete(self, numbers: Sequence[int]) -> None:
        self._call("delete", tuple(numbers))

    def put_list(self, name: str, content: bytes) -> None:
        self._call("put_list", name, content)

    def read_list(self, name: str) -> bytes | None:
        found: bytes | None = self._call("read_list", name)
        return found

    def list_names(self) -> Sequence[str]:
        found: Sequence[str] = self._call("list_names")
        return found

    def delete_lists(self, names: Sequence[str]) -> None:
        self._call("delete_lists", tuple(names))

    def close(self) -> None:
        """Nothing to let go."""


class SimSpark:
    """What a driver asks its engine: the checkpoint, and whether a task runs twice."""

    def __init__(self, send: Send, actor: str, *, idles: bool = False) -> None:
        self._send = send
        self._actor = actor
        self._idles = idles

    def _call(self, verb: str, *args: Hashable) -> Any:
        return self._send(Call(self._actor, SPARK, "", verb, args))

    def position(self) -> Position:
        found: Position = self._call("position")
        return found

    def plan(self, epoch: EpochNumber) -> bool:
        return bool(self._call("plan", epoch))

    def offsets(self, epoch: EpochNumber) -> Offsets:
        found: Offsets = self._call("offsets", epoch)
        return found

    def finish(self, epoch: EpochNumber) -> None:
        self._call("finish", epoch)

    def twice(self, epoch: EpochNumber, partition: int) -> bool:
        """Whether a speculative copy of a task also runs to its end."""
        return bool(self._call("twice", epoch, partition))

    def idle(self) -> bool:
        """Whether the source is idle; not even asked where it never is."""
        return self._idles and bool(self._call("idle"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSink:
    """A sink whose target is simulated."""

    name: SinkName
    send: Send
    actor: str
    target: str = "the simulated target"
    kind: str = "sim"
    where: str | None = None
    select: Select = None
    output_modes: frozenset[str] = APPEND_ONLY
    prepares_last: bool = False
    rejects_to: None = None
    transaction_key: None = None

    def describe(self) -> Mapping[str, Json]:
        return {"kind": self.kind, "target": self.target}

    def writer(self, task: Task) -> SimWriter:
        return SimWriter(self, task)

    def committer(self, identity: Identity, limits: Limits) -> SimCommitter:  # noqa: ARG002
        return SimCommitter(self, identity)


class SimWriter:
    def __init__(self, sink: SimSink, task: Task) -> None:
        self._sink = sink
        self._task = task
        self._rows: list[Hashable] = []

    def write(self, batch: Any) -> None:
        self._rows += batch

    def prepare(self) -> Receipt:
        rows = tuple(self._rows)
        args = (str(self._task.handle), rows)
        self._sink.send(Call(self._sink.actor, TARGET, self._sink.name, "prepare", args))
        hashed = sum(row_hash(row) for row in rows) % _HASH_MODULUS
        return Receipt(
            handle=self._task.handle, fingerprint=Fingerprint(len(rows), hashed), bytes=len(rows)
        )

    def abort(self) -> None:
        """A simulated task ends by being killed."""


class SimCommitter:
    def __init__(self, sink: SimSink, identity: Identity) -> None:
        self._sink = sink
        self._identity = identity
        self._after = identity.committed

    def _call(self, verb: str, *args: Hashable) -> Any:
        sink = self._sink
        return sink.send(Call(sink.actor, TARGET, sink.name, verb, args, self._identity))

    def check(self, schema: Any) -> Sequence[Ability]:  # noqa: ARG002
        return ()

    def begin(self, begin: Begin) -> Json:
        self._after = begin.newest_committed
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._call("rehearse", epoch, tuple(receipts), self._after)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._call("commit", epoch, tuple(receipts), self._after)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._call("abort", epoch, tuple(receipts))

    def in_doubt(self) -> Sequence[InDoubt]:
        found: Sequence[InDoubt] = self._call("in_doubt")
        return found

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        found: Proof = self._call("outcome", epoch, receipt)
        return found

    def newest(self) -> Sequence[Mark]:
        found: Sequence[Mark] = self._call("newest")
        return found

    def prune(self, below: EpochNumber) -> None:
        self._call("prune", below)

    def close(self) -> None:
        """Nothing is kept open."""
