"""The `Store` interface: bytes by key, durable on return, never half of anything.

Used by the epoch log, spools, histories, markers of lakes and the reader of Spark's checkpoint, on
drivers and in tasks. A back end is one module with one class and one table of errors; the class is
usable from any thread, and opening it creates nothing.

A key is relative, with slashes between its parts: `history/live.json`. Its last part does not begin
with a dot: those names belong to the back end. A key is never a folder of another key.

    verb            afterwards                                      after an error
    put             the key holds this content, whole and durable   TryAgain: it holds what it held
    put_if_absent   True: this call created it. False: another      TryAgain: nothing was written
                    did, perhaps a lost attempt of this very call
    names, entries  every put that returned before is listed        TryAgain
    delete          the keys are gone, or were never there          TryAgain: some may be gone

Either put raises `OutcomeUnknown` where the reply is lost. To read the key then proves nothing, as
the put may still be on its way. Only the same put again closes the question: afterwards the key
exists, and its content names the winner.

    process A    put_if_absent k -> no reply        read k -> None          (still on its way)
    network      delivers the put of A              k holds A's content
    process A    put_if_absent k -> False           read k -> A's content: it was A's own

Every verb raises `Misconfigured` where a person must act: permissions, credentials, a missing
bucket. Why False may mean "my own": clients of object stores repeat a request whose reply was lost,
and the repetition meets the object that the first attempt made. A caller that must know puts a
nonce into the content and reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable

from epochal.errors import TryAgain
from epochal.terms import Ability

UNFINISHED = ".part"
"""How the name of a file ends while it is written by `create`, on stores that list such files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key that exists."""

    name: str
    """The last part of the key."""
    size: int
    """In bytes."""
    modified_at: float
    """In seconds since 1970, by the clock of the store."""


class Store(Protocol):
    """Bytes by key below one location. Every verb may be repeated."""

    @property
    def location(self) -> str:
        """Where this is, for messages. Never a secret."""

    def put(self, key: str, content: bytes) -> None:
        """
        Write a key or replace it. A reader sees the old content or the new one.

        Raises `OutcomeUnknown` where the reply is lost; repeating it is always right.
        """

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """
        Create a key: of any number of processes that try, exactly one gets True.

        False is reported only once the other's content is durable and can be read. Raises
        `TryAgain` where nothing was written, `OutcomeUnknown` where that can't be known.
        """

    def read(self, key: str) -> bytes | None:
        """The content of a key, None where it does not exist."""

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """
        The bytes of a key from `start` up to `end`, or up to its end, without the others.

        Raises `TryAgain` where the key does not exist: its size was asked for before.
        """

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        """
        The last parts of the keys directly in a folder, in rising order; no folders. Only those
        behind `after`, where that is given: a long folder need not be listed for its end.
        """

    def folders(self, folder: str = "") -> Sequence[str]:
        """The names of the folders directly in a folder, in rising order."""

    def entries(self, folder: str = "") -> Sequence[Entry]:
        """As `names`, with sizes and times."""

    def entry(self, key: str) -> Entry | None:
        """Size and time of one key, None where it does not exist."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, and folders that become empty. Keys that do not exist are no error."""

    def beside(self, name: str) -> Store:
        """
        Another store at the same location, with keys of its own: a history beside its log.

        The two share neither locks nor connections: a call that hangs in one delays nothing in
        the other. It keeps nothing open between calls, so it need not be closed. Where keys are
        files, it is the folder `name`.
        """

    def close(self) -> None:
        """Close connections. Content stays."""


@runtime_checkable
class ScannedStore(Protocol):
    """A store that reads several keys in one request."""

    def read_after(self, folder: str, after: str, most: int) -> Mapping[str, bytes]:
        """The first keys that `names` would list, at most so many, with their contents."""


@runtime_checkable
class ServedStore(Protocol):
    """A store on servers that can be asked how they are; `epochal doctor` and `grants` do."""

    def check(self) -> Sequence[Ability]:
        """What the servers promise. What is not granted is a problem for a person."""

    def grants(self) -> Sequence[str]:
        """Commands that give a user the least privileges that the store needs."""


class Output(Protocol):
    """A file that is being written. Nothing exists under its key before `finish` returns."""

    def write(self, piece: bytes | memoryview) -> None: ...

    def finish(self) -> None:
        """Make it whole, durable and visible. Raises `TryAgain` where it was deleted meanwhile."""

    def discard(self) -> None:
        """Give it up. A killed process leaves a part that is listed, or that expires."""


class FileStore(Store, Protocol):
    """A store that also takes and gives large files piece by piece: a folder, an object store."""

    def create(self, key: str) -> Output:
        """
        Write a large file in the place of one that may be there.

        Until it is finished, a local folder lists it as key + UNFINISHED; deleting that makes
        `finish` fail. Object stores list nothing.
        """

    def discard_unfinished(self, folder: str) -> None:
        """
        Remove what killed processes left of files that were being created below a folder, as far
        as the store can list it apart from `names`.
        """

    def open(self, key: str) -> BinaryIO | None:
        """For reading at any position, None where it does not exist."""


def gone(location: str, key: str) -> TryAgain:
    """What `read_range` raises of a key that does not exist."""
    return TryAgain(f"cannot read {location}/{key}: it was deleted meanwhile")


def checked(key: str) -> str:
    """The key itself, if it is one."""
    *folders, name = key.split("/")
    is_clean = not any(part in {"", ".", ".."} for part in folders) and "\0" not in key
    if not is_clean or not name or name.startswith("."):
        raise ValueError(f"{key!r} is not a key of a store")
    return key
