"""
The back ends of a Files sink: how a file is kept invisible until its epoch is decided.

A disk renames, S3 completes uploads, and stores that can only put whole objects show data by a
manifest. Formats, partitions, the ledger and the committer know none of that: they see two
`Stores`, the `Attempt` of a task, and the `Staging` of the driver.

Each back end's module is loaded where a path asks for it: a task loads one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from epochal.contract import EngineWritten
from epochal.errors import not_installed
from epochal.sinks.files import layout
from epochal.sinks.files.target import Options, Target
from epochal.storage import FileStore, Store
from epochal.terms import Ability, EpochNumber, Handle, Identity, InDoubt, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.files.s3 import S3Store

Uploads = Literal["auto", "multipart", "manifest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFile:
    """A file as its receipt describes it."""

    path: str
    """Below the root, or in the folder beside it (`layout.is_data`); with `/`."""
    rows: int | None
    """None where the format does not count them and Spark's writer wrote it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Where the rows are, and beside it all that is not for readers: see `layout`."""

    shown: FileStore
    ours: FileStore

    def of(self, path: str) -> FileStore:
        """The one that holds a file of a manifest."""
        return self.ours if layout.is_data(path) else self.shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """The ledger's note, put before the first file, that files of an epoch come to their place."""

    name: str
    """Where it is."""
    age_s: Callable[[], float | None]
    """How old it is; None where there is none, or of other attempts. Asked where files are gone."""


class Attempt(Protocol):
    """Where one attempt of one task prepares its files."""

    @property
    def ours(self) -> Store: ...

    @property
    def held_bytes(self) -> int:
        """What open files hold in memory because it is too little to be sent."""

    def errors(self) -> AbstractContextManager[None]:
        """Turns what writing to open files raises into one of our errors."""

    def create(self, relative: str) -> pa.NativeFile: ...

    def seal(self, relatives: Sequence[str]) -> list[dict[str, Json]]:
        """Make all files durable. Returns each one's fields in the receipt, beside its rows."""

    def discard(self) -> None:
        """Throw all files away, also those that are still open."""


class EngineAttempt(Attempt, Protocol):
    """Where one job of the engine's own writer prepares its files."""

    @property
    def job_url(self) -> str:
        """Where the engine writes them: made by the engine."""

    @property
    def is_listed(self) -> bool:
        """Whether the files stay there, and the engine lists those that count."""

    def make(self) -> None:
        """Make the attempt's marker, before the job."""

    def gather(
        self,
        written: EngineWritten,
        name: Callable[[int], str],
        footer_of: Callable[[Path], tuple[Any, int]] | None,
        has_rows: Callable[[Path], bool],
    ) -> dict[str, int | None]:
        """
        The files of a job that succeeded, as they wait for the decision, each with its rows where
        they are counted. `name`: that of the file with a number; for the rest see `engine_files`.
        """


class Staging(Protocol):
    """The prepared files of one sink of one pipeline, as the driver sees them."""

    @property
    def stores(self) -> Stores: ...

    @property
    def trusts_rehearsal(self) -> bool:
        """Whether to publish files without looking for them again after `rehearse`."""

    @property
    def shows_by_manifest(self) -> bool:
        """Whether readers see files by their manifest alone, and not one by one before it."""

    def check(self) -> Sequence[Ability]: ...

    def rehearse(self, receipts: Sequence[Receipt]) -> None:
        """Refuse, while it can be refused, what could not be published (I3)."""

    def require_prepared(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], showing: Showing
    ) -> None:
        """
        Raise `PreparedLost` where files are neither prepared nor published, or not as they were
        written; `InvariantBroken` where written again they could be there twice.

        A file that was published may have been taken away by a consumer since.
        """

    def publish(self, epoch: EpochNumber, receipts: Sequence[Receipt], showing: Showing) -> bool:
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

    @property
    def engine_location(self) -> str:
        """The URL below which jobs of the engine's own writer prepare."""

    def engine_refusal(self) -> str | None:
        """Why only tasks can prepare here, and no job of the engine's own writer."""

    def engine_attempt(self, handle: Handle) -> EngineAttempt | None:
        """Where a job of the engine's own writer prepares; None where only tasks can."""

    def remove_old_scratch(self) -> None:
        """Remove scratch files of killed processes."""


class Backend(Protocol):
    def stores(self) -> Stores: ...

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt: ...

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging: ...


@dataclass(frozen=True, slots=True)
class LocalBackend:
    root: Path

    def stores(self) -> Stores:
        from epochal.sinks.files.local import stores_at  # noqa: PLC0415

        return stores_at(self.root)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        from epochal.sinks.files.local import LocalAttempt  # noqa: PLC0415  one back end per task

        return LocalAttempt(self.root, handle)

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging:  # noqa: ARG002
        from epochal.sinks.files.local import LocalStaging  # noqa: PLC0415

        return LocalStaging(self.root, identity)


@dataclass(frozen=True, slots=True)
class MultipartBackend:
    """S3, with multipart uploads that are completed once the epoch is decided."""

    target: Target
    options: Options

    def stores(self) -> Stores:
        shown, ours = _s3(self.target, self.options)
        return Stores(shown=shown, ours=ours)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        from epochal.sinks.files.s3_multipart import MultipartAttempt  # noqa: PLC0415  boto3

        shown, ours = _s3(self.target, self.options)
        return MultipartAttempt(shown, ours, file_bytes_max=file_bytes_max)

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging:
        from epochal.sinks.files.s3_multipart import MultipartStaging  # noqa: PLC0415  boto3

        shown, ours = _s3(self.target, self.options)
        return MultipartStaging(shown, ours, identity, recovery_days=recovery_days)


@dataclass(frozen=True, slots=True)
class WholeObjectBackend:
    """Any object store, with whole objects that only a manifest shows."""

    target: Target
    options: Options

    def stores(self) -> Stores:
        if self.target.scheme == "s3":
            shown, ours = _s3(self.target, self.options)
            return Stores(shown=shown, ours=ours)
        return object_stores(self.target.text, self.options)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        from epochal.sinks.files.whole_objects import WholeObjectAttempt  # noqa: PLC0415

        return WholeObjectAttempt(self.stores().ours, handle)

    def staging(self, identity: Identity, *, recovery_days: int) -> Staging:
        from epochal.sinks.files.whole_objects import WholeObjectStaging  # noqa: PLC0415

        stores = self.stores()
        return WholeObjectStaging(
            stores, identity, lifecycle=_lifecycle_check(stores, recovery_days=recovery_days)
        )


def backend_for(target: Target, uploads: Uploads, options: Options) -> Backend:
    if target.scheme == "s3" and find_spec("boto3") is None:
        raise not_installed("files on S3", "boto3", "s3")
    if target.scheme == "file":
        return LocalBackend(Path(target.text))
    if target.scheme == "s3" and uploads != "manifest":
        return MultipartBackend(target, options)
    return WholeObjectBackend(target, options)


@lru_cache
def object_stores(url: str, options: Options) -> Stores:
    """The stores at a URL of Google Cloud Storage or Azure: one of each per process."""
    from epochal.storage.objects import open_at  # noqa: PLC0415  loads the object store's client

    revealed = {
        name: value if isinstance(value, str) else value.reveal() for name, value in options
    }
    return Stores(shown=open_at(url, revealed), ours=open_at(layout.beside(url), revealed))


def _lifecycle_check(stores: Stores, *, recovery_days: int) -> Callable[[], Ability] | None:
    """A look at the rules by which a bucket of S3 removes objects; None of other stores."""
    if not stores.ours.location.startswith("s3://"):
        return None
    from epochal.sinks.files.s3 import S3Store, check_lifecycle  # noqa: PLC0415  needs boto3

    if not isinstance(stores.shown, S3Store) or not isinstance(stores.ours, S3Store):
        return None
    return partial(check_lifecycle, stores.shown, stores.ours, recovery_days=recovery_days)


def _s3(target: Target, options: Options) -> tuple[S3Store, S3Store]:
    """The store of the rows, and the one beside it."""
    from epochal.sinks.files.s3 import Bucket, S3Store  # noqa: PLC0415  needs boto3

    shown = Bucket(name=target.bucket, prefix=target.prefix, options=options)
    return S3Store(shown), S3Store(replace(shown, prefix=layout.beside(target.prefix)))
