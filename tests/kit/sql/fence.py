"""Many attempts, drivers and clearings at one pool of slots, in random order: `storm` is the judge.

Tasks and drivers are those of the sink; only their connections are slowed down and cut. A driver
here is as careless as the protocol allows: it crashes at any step, older ones wake up and go on
where they were, attempts come in two copies, and some of them sleep until their epoch is long over.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from sinks.life import Life

from epochal.contract import Begin, Task
from epochal.errors import EpochalError, PreparedLost
from epochal.kit.sql.rejects import Rejected
from epochal.sinks.memory import Memory
from epochal.terms import NO_ROWS, EpochNumber, Receipt

PARTITIONS = 2
ROWS = 5
PATIENCE_S = 60.0
KILL_EVERY_S = 0.5
_SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
BAD = -1
"""An id that the table refuses."""


_thread = threading.local()


class Wrong(AssertionError):
    """Rows were lost, doubled or mixed, staged or not, or an epoch can't be carried out."""


def pauses(
    monkeypatch: Any, chance: random.Random, *slowed_down: tuple[type, Sequence[str]]
) -> None:
    """
    Let every statement of drivers and tasks wait for a moment, some of them for long: each class
    with the names of its methods that send one.
    """

    def pause() -> None:
        if getattr(_thread, "is_sleepy", False):
            time.sleep(chance.random() * 0.3)
        elif chance.random() < 0.3:
            time.sleep(chance.random() ** 3 * 0.05)

    def slowed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *given: Any) -> Any:
            pause()
            return method(self, *given)

        return run

    for kind, names in slowed_down:
        for name in names:
            monkeypatch.setattr(kind, name, slowed(getattr(kind, name)))


@dataclass(frozen=True)
class Old:
    """A driver that others take for dead, and where it was."""

    life: Life
    epoch: int
    receipts: list[Receipt]
    tables: list[str]
    """The slots of its receipts."""


@dataclass
class Storm:
    place: Any
    chance: random.Random
    other: Any
    """The same place by another connection, which ends sessions."""
    decided: dict[int, list[Receipt]] = field(default_factory=dict)
    wanted: dict[str, list[int]] = field(default_factory=dict)
    """The good ids of each attempt, by its handle."""
    old: list[Old] = field(default_factory=list)
    late: list[Any] = field(default_factory=list)
    crashes: int = 0

    def run(self, epochs: int) -> None:
        self.life = self._next_driver(0)
        with ThreadPoolExecutor(16) as self.threads, self._killing():
            for epoch in range(epochs):
                deadline_s = time.monotonic() + PATIENCE_S
                while epoch not in self.decided:
                    if time.monotonic() > deadline_s:
                        raise Wrong(f"epoch {epoch} can't be decided")
                    with suppress(EpochalError):
                        self._decide(epoch)
                    self._sweep(epoch)
                self._carry_out(epoch, deadline_s)
                self._wake_an_old_one()
                self._sweep(epoch)
            wait(self.late)
        self._sweep(epochs)
        self._judge()

    # Drivers

    def _next_driver(self, generation: int) -> Life:
        on_reject = Memory(name="refused")
        life = self.place.life(generation=generation, on_reject=on_reject, lock_timeout_s=5)
        while True:
            with suppress(EpochalError):
                life.committer.check(_SCHEMA)
                return life

    def _crash(self, epoch: int, receipts: list[Receipt]) -> None:
        self.crashes += 1
        handles = [str(one.handle) for one in receipts]
        old = Old(self.life, epoch, receipts, self.place.slots_used(handles))
        self.old.append(old)
        self._wake(old)
        self.life = self._next_driver(self.life.generation + 1)

    def _decide(self, epoch: int) -> None:
        handout = self.life.committer.begin(Begin(epoch=EpochNumber(epoch)))
        receipts = self._prepare(epoch, handout)
        if self.chance.random() < 0.1:
            self._crash(epoch, receipts)
            return
        life = self.life
        try:
            life.rehearse(epoch, receipts)
        except EpochalError as error:
            if isinstance(error.__cause__, PreparedLost):
                # Only this driver may throw its attempts away, and it did not.
                raise Wrong(f"epoch {epoch}: {error}") from error
            with suppress(EpochalError):
                life.committer.abort(EpochNumber(epoch), receipts)
            raise
        if self.chance.random() < 0.1:
            self._crash(epoch, receipts)
            return
        self.decided[epoch] = receipts

    def _carry_out(self, epoch: int, deadline_s: float) -> None:
        receipts = self.decided[epoch]
        if self.chance.random() < 0.3:
            self._crash(epoch, receipts)
        while True:
            try:
                self.life.commit(epoch, receipts)
            except PreparedLost as error:
                raise Wrong(
                    f"epoch {epoch} is decided and can't be carried out: {error}"
                ) from error
            except EpochalError as error:
                if time.monotonic() > deadline_s:
                    raise Wrong(f"epoch {epoch} is decided and stuck: {error}") from error
                if self.chance.random() < 0.2:
                    self._crash(epoch, receipts)
            else:
                return

    def _sweep(self, epoch: int) -> None:
        """As the protocol allows: nothing of a later generation, nothing that is decided."""
        named = {one.handle for one in self.decided.get(epoch, ())}
        with suppress(EpochalError):
            found = [one.handle for one in self.life.committer.in_doubt()]
            self.life.committer.abort(
                EpochNumber(epoch),
                [_bare(handle) for handle in found if handle is not None and handle not in named],
            )

    def _wake_an_old_one(self) -> None:
        if self.old and self.chance.random() < 0.7:
            self._wake(self.chance.choice(self.old))

    def _wake(self, old: Old) -> None:
        """It goes on where it was, slowly: sets rows apart, rehearses, aborts or commits."""
        life, epoch, receipts = old.life, old.epoch, old.receipts
        verbs: list[Callable[[], Any]] = [lambda: life.rehearse(epoch, receipts)]
        if self.decided.get(epoch) == receipts:
            verbs.append(lambda: life.commit(epoch, receipts))
        else:
            verbs.append(lambda: self._set_apart(old))
            verbs.append(lambda: life.committer.abort(EpochNumber(epoch), receipts))

        def wake(verb: Callable[[], Any]) -> None:
            _thread.is_sleepy = True
            with suppress(EpochalError):
                verb()
            with suppress(EpochalError):
                life.committer.transaction.give_up()
            _thread.is_sleepy = False

        self.late.append(self.threads.submit(wake, self.chance.choice(verbs)))

    def _set_apart(self, old: Old) -> None:
        """As if its table had refused every row of its attempts."""
        apart = old.life.committer.apart
        apart.begin(EpochNumber(old.epoch), old.receipts)
        apart.add(
            [
                Rejected(table=table, place=place, part=0, row="", sqlstate="", reason="")
                for table in old.tables
                for place in map(self.place.row_place.format, range(1, 100))
            ]
        )
        old.life.committer.remove_apart()

    # Tasks

    def _prepare(self, epoch: int, handout: Any) -> list[Receipt]:
        """One receipt a partition, of any of its attempts."""
        receipts = []
        for partition in range(PARTITIONS):
            running = [
                self.threads.submit(self._attempt, self.life, epoch, partition, handout)
                for _ in range(self.chance.choice([1, 1, 2, 3]))
            ]
            self.late += running
            first = self.chance.choice(running)
            wait([first])
            error = first.exception()
            if error is not None:
                raise error
            receipts.append(first.result())
        return receipts

    def _attempt(self, life: Life, epoch: int, partition: int, handout: Any) -> Receipt:
        handle = life.next_handle(epoch, partition)
        first = handle.attempt * 10 + handle.generation * 10_000_000
        ids = [first + number for number in range(self.chance.randrange(1, ROWS + 1))]
        self.wanted[str(handle)] = ids
        rows = [*ids, BAD] if self.chance.random() < 0.3 else ids
        names = [str(handle)] * len(rows)
        writer = life.sink.writer(Task(handle=handle, schema=_SCHEMA, handout=handout))
        writer.write(pa.record_batch({"id": pa.array(rows, pa.int64()), "name": names}))
        if self.chance.random() < 0.1:
            time.sleep(self.chance.random())
        return writer.prepare()

    # Trouble

    @contextmanager
    def _killing(self) -> Iterator[None]:
        over = threading.Event()

        def kill() -> None:
            while not over.wait(self.chance.random() * KILL_EVERY_S * 2):
                self.other.kill_any_session()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _judge(self) -> None:
        winners = [str(one.handle) for some in self.decided.values() for one in some]
        wanted = sorted((number, name) for name in winners for number in self.wanted[name])
        found = sorted(self.place.rows())
        if found != wanted:
            lost, more = set(wanted) - set(found), set(found) - set(wanted)
            raise Wrong(f"{len(lost)} rows lost, {len(more)} not decided, {len(found)} in all")
        if self.place.leftovers():
            raise Wrong(f"left: {self.place.leftovers()}")


def _bare(handle: Any) -> Receipt:
    return Receipt(handle=handle, fingerprint=NO_ROWS)
