"""
The back ends of a Files sink: how a file is kept invisible until its epoch is decided.

A disk renames, S3 completes uploads, and stores that can only put whole objects show data by a
manifest. Formats, partitions, the ledger and the committer know none of that: they see a `Store` of
small files, the `Attempt` of a task, and the `Staging` of the driver.

Each back end's module is loaded where a path asks for it: a task loads one of them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, cast

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.sinks.files import layout
from epochal.sinks.files.target import Options, Target
from epochal.terms import Ability, EpochNumber, Handle, Identity, InDoubt, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.files.s3 import S3Store

Uploads = Literal["auto", "multipart", "manifest"]
_READ_BYTES = 4 * 1024 * 1024


class Store(Protocol):
    """Small files below one root, by key. Each is whole or not there, and durable on return."""

    @property
    def root(self) -> str:
        """Where this is, for people and for Spark. Never a secret."""

    def read(self, key: str) -> bytes | None: ...

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Create a file: False where the key is taken, perhaps by an earlier try of this call."""

    def names(self, folder: str) -> list[str]:
        """The files and folders in a folder; nothing where there is no such folder."""

    def remove(self, key: str) -> None:
        """Remove a file, which may be gone."""

    def remove_empty(self, folder: str) -> None:
        """Remove a folder and the folders in it, as far as there is no file in them."""

    def open_to_read(self, key: str) -> IO[bytes]:
        """A file that can be read at any position."""


class Output(Protocol):
    """A file that is being written, with the methods that Arrow calls."""

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
        """Show on a scratch key that everything that is needed is allowed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFile:
    """A file as its receipt describes it."""

    path: str
    """Below the root, with `/`."""
    rows: int
    bytes: int
    upload: str = ""
    """The multipart upload that holds it, on S3."""
    parts: tuple[str, ...] = ()
    """The tags of that upload's parts, in order."""


def files_of(receipt: Receipt) -> list[PreparedFile]:
    token: Any = receipt.token
    return [
        PreparedFile(**{**file, "parts": tuple(file.get("parts", ()))})
        for file in token.get("files", ())
    ]


class Attempt(Protocol):
    """Where one attempt of one task prepares its files."""

    @property
    def store(self) -> Store: ...

    @property
    def held_bytes(self) -> int:
        """What open files hold in memory because it is too little to be sent."""

    def create(self, relative: str) -> pa.NativeFile: ...

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        """Make all files durable. Returns each one's fields in the receipt, beside its rows."""

    def discard(self) -> None:
        """Throw all files away, also those that are still open."""


class Staging(Protocol):
    """The prepared files of one sink of one pipeline, as the driver sees them."""

    @property
    def store(self) -> Store: ...

    @property
    def trusts_rehearsal(self) -> bool:
        """Whether to publish files without looking for them again after `rehearse`."""

    def check(self) -> Sequence[Ability]: ...

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        """Refuse, while it can be refused, what could not be published (I3)."""

    def require_prepared(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Raise `PreparedLost` where files are neither prepared nor published."""

    def publish(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        """Bring every file to its place: True where this call did it for each of them."""

    def is_published(self, receipt: Receipt) -> bool:
        """A file of it is in its place: only a decision can have put it there (I3)."""

    def is_prepared(self, receipt: Receipt) -> bool:
        """Something of it is prepared and not in its place."""

    def discard(self, receipt: Receipt) -> None:
        """Throw prepared files away. They may be gone, or being removed by somebody else."""

    def clear(self, receipts: Sequence[Receipt]) -> None:
        """Remove what committed attempts leave beside their files."""

    def listed(self) -> Sequence[InDoubt]:
        """All that is prepared under this pipeline's uid, of any sink."""

    def clear_listed(self, found: InDoubt) -> None:
        """Remove what is listed of an attempt whose files are all in their place."""

    def remove_old_scratch(self) -> None:
        """Remove scratch files of killed processes."""


class Backend(Protocol):
    def store(self) -> Store: ...

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt: ...

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging: ...


@dataclass(frozen=True, slots=True)
class LocalBackend:
    root: Path

    def store(self, *, scratch: str = f"{layout.SCRATCH}/-") -> Store:
        from epochal.sinks.files.local import LocalStore  # noqa: PLC0415  one back end per process

        return LocalStore(self.root, scratch=scratch)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        from epochal.sinks.files.local import LocalAttempt, LocalStore  # noqa: PLC0415

        scratch = layout.scratch_of(handle.uid, handle.sink)
        return LocalAttempt(LocalStore(self.root, scratch=scratch), handle)

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging:  # noqa: ARG002
        from epochal.sinks.files.local import LocalStaging, LocalStore  # noqa: PLC0415

        scratch = layout.scratch_of(identity.uid, identity.tag)
        return LocalStaging(LocalStore(self.root, scratch=scratch), identity)


@dataclass(frozen=True, slots=True)
class MultipartBackend:
    """S3, with multipart uploads that are completed once the epoch is decided."""

    target: Target
    options: Options

    def store(self) -> Store:
        return _s3(self.target, self.options)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        from epochal.sinks.files.s3_multipart import MultipartAttempt  # noqa: PLC0415  boto3

        store = _s3(self.target, self.options)
        return MultipartAttempt(store, file_bytes_max=file_bytes_max)

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging:
        from epochal.sinks.files.s3_multipart import MultipartStaging  # noqa: PLC0415  boto3

        store = _s3(self.target, self.options)
        return MultipartStaging(store, identity, recovery_days=recovery_days)


@dataclass(frozen=True, slots=True)
class WholeObjectBackend:
    """Any object store, with whole objects that only a manifest shows."""

    target: Target
    options: Options

    def store(self) -> WholeStore:
        if self.target.scheme == "s3":
            return _s3(self.target, self.options)
        from epochal.sinks.files.objects import ObjectsStore  # noqa: PLC0415  loads its client

        return ObjectsStore(self.target.text, self.options)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        from epochal.sinks.files.whole_objects import WholeObjectAttempt  # noqa: PLC0415

        return WholeObjectAttempt(self.store(), handle)

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging:  # noqa: ARG002
        from epochal.sinks.files.whole_objects import WholeObjectStaging  # noqa: PLC0415

        return WholeObjectStaging(self.store(), identity)


def backend_for(target: Target, uploads: Uploads, options: Options) -> Backend:
    if target.scheme == "s3" and find_spec("boto3") is None:
        raise Misconfigured(
            "files on S3 need a package that is not installed: boto3", "pip install 'epochal[s3]'"
        )
    if target.scheme == "file":
        return LocalBackend(Path(target.text))
    if target.scheme == "s3" and uploads != "manifest":
        return MultipartBackend(target, options)
    return WholeObjectBackend(target, options)


def _s3(target: Target, options: Options) -> S3Store:
    from epochal.sinks.files.s3 import Bucket, S3Store  # noqa: PLC0415  needs boto3

    return S3Store(Bucket(name=target.bucket, prefix=target.prefix, options=options))


class Ranged(Protocol):
    """A store whose objects can be read in pieces."""

    @property
    def root(self) -> str: ...

    def size(self, key: str) -> int | None: ...

    def read_range(self, key: str, start: int, end: int) -> bytes: ...


def open_ranged(store: Ranged, key: str) -> IO[bytes]:
    """An object as a file that can be read at any position."""
    size = store.size(key)
    if size is None:
        raise FileNotFoundError(f"{store.root}/{key}")
    return cast("IO[bytes]", io.BufferedReader(_RangeReader(store, key, size), _READ_BYTES))


class _RangeReader(io.RawIOBase):
    def __init__(self, store: Ranged, key: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        content = self._store.read_range(self._key, self._position, end)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
