"""What a back end gives: small files by key, a place for one attempt, and what a driver does there.

A disk, S3 and stores that can only put whole objects differ in how a file is kept invisible and
then shown. Formats, partitions, manifests and the committer know none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Protocol, TypeVar

import pyarrow as pa

from epochal.terms import Ability, EpochNumber, InDoubt, Json, Receipt

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_THREADS = 8


class Store(Protocol):
    """Small files below one root, by key. Each is whole or not there, and durable on return."""

    @property
    def root(self) -> str:
        """Where this is, for people and for Spark. Never a secret."""

    def read(self, key: str) -> bytes | None: ...

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create a file: False where the key is taken, perhaps by an earlier try of this call."""

    def names(self, folder: str) -> list[str]:
        """What a folder holds, files and folders; nothing where there is no such folder."""

    def remove(self, key: str) -> None:
        """Remove a file, which may be gone."""

    def remove_empty(self, folder: str) -> None:
        """Remove a folder and the folders in it, as far as there is no file in them."""

    def open_to_read(self, key: str) -> IO[bytes]:
        """A file that can be read at any place."""


class Output(Protocol):
    """A file that is being written, with what Arrow asks of one."""

    def write(self, content: bytes) -> int: ...

    def tell(self) -> int: ...

    def close(self) -> None:
        """It is there as a whole when this returns."""

    def abandon(self) -> None:
        """It will never be there; what is written or closed from now on goes nowhere."""


class WholeStore(Store, Protocol):
    """A store that also takes large objects, each one there as a whole once it is closed."""

    def open_to_write(self, key: str) -> Output: ...

    def aged(self, prefix: str) -> dict[str, float]:
        """Every key that begins so, however deep, with its age in seconds."""

    def size(self, key: str) -> int | None: ...

    def check(self, scratch: str) -> Sequence[Ability]:
        """Show on a scratch key that all that is needed is allowed here."""


class Attempt(Protocol):
    """Where one attempt of one task prepares its files."""

    @property
    def store(self) -> Store: ...

    @property
    def held_bytes(self) -> int:
        """What open files hold in memory because it is too little to be sent."""

    def create(self, relative: str) -> pa.NativeFile: ...

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        """Make all files durable; what a receipt says of each: path, bytes, and what it needs."""

    def discard(self) -> None:
        """Throw all files away, also those that are still open."""


class Place(Protocol):
    """A back end as the driver uses it, for one sink of one pipeline."""

    @property
    def store(self) -> Store: ...

    def check(self) -> Sequence[Ability]: ...

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        """Refuse, while it can be refused, what could not be shown (I3)."""

    def show(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        """Bring every file to its place: True where this call did it for each of them."""

    def is_shown(self, receipt: Receipt) -> bool:
        """A file of it is in its place: only a decision can have put it there (I3)."""

    def waits(self, receipt: Receipt) -> bool:
        """Something of it is prepared and not in its place."""

    def discard(self, receipt: Receipt) -> None:
        """Throw prepared files away. They may be gone, or going."""

    def clear(self, receipts: Sequence[Receipt]) -> None:
        """Remove what committed attempts leave beside their files."""

    def listed(self) -> Sequence[InDoubt]:
        """All that is prepared under this pipeline's uid, of any sink."""

    def clear_surplus(self, found: InDoubt) -> None:
        """Remove what is listed of an attempt whose files are all in their place."""

    def tidy(self) -> None:
        """Remove old scratch of killed processes."""


def at_once(
    verb: Callable[[_Item], _Result], items: Iterable[_Item], *, at_least: int = 2
) -> list[_Result]:
    """Do the same to many files: a disk, and more so a network, answers several at a time."""
    listed = list(items)
    if len(listed) < at_least:
        return [verb(item) for item in listed]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(verb, listed))
