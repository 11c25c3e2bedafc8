"""Which back end a sink's path asks for: the one module that knows all of them.

S3's driver is loaded only where a path names a bucket of S3.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from epochal.errors import Misconfigured
from epochal.sinks.files import layout
from epochal.sinks.files.hidden import HiddenAttempt, HiddenPlace
from epochal.sinks.files.local import LocalPlace, LocalStore, PreparedFolder
from epochal.sinks.files.places import Attempt, Place, Store, WholeStore
from epochal.sinks.files.urls import Options, Target
from epochal.terms import Handle, Identity

if TYPE_CHECKING:
    from epochal.sinks.files.s3 import S3Store

Uploads = Literal["auto", "multipart", "manifest"]


class BackEnd(Protocol):
    def store(self) -> Store: ...

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt: ...

    def place(self, identity: Identity, *, recovery_days: int) -> Place: ...


@dataclass(frozen=True, slots=True)
class LocalBackEnd:
    root: Path

    def store(self) -> LocalStore:
        return LocalStore(self.root)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        scratch = layout.scratch_of(handle.uid, handle.sink)
        return PreparedFolder(LocalStore(self.root, scratch=scratch), handle)

    def place(self, identity: Identity, *, recovery_days: int) -> LocalPlace:  # noqa: ARG002
        scratch = layout.scratch_of(identity.uid, identity.tag)
        return LocalPlace(LocalStore(self.root, scratch=scratch), identity)


@dataclass(frozen=True, slots=True)
class S3BackEnd:
    target: Target
    options: Options

    def store(self) -> Store:
        return _s3(self.target, self.options)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        from epochal.sinks.files.uploads import UploadAttempt  # noqa: PLC0415  needs boto3

        store = _s3(self.target, self.options)
        return UploadAttempt(store, file_bytes_max=file_bytes_max)

    def place(self, identity: Identity, *, recovery_days: int) -> Place:
        from epochal.sinks.files.uploads import UploadPlace  # noqa: PLC0415  needs boto3

        store = _s3(self.target, self.options)
        return UploadPlace(store, identity, recovery_days=recovery_days)


@dataclass(frozen=True, slots=True)
class HiddenBackEnd:
    target: Target
    options: Options

    def store(self) -> WholeStore:
        if self.target.scheme == "s3":
            return _s3(self.target, self.options)
        from epochal.sinks.files.objects import ObjectsStore  # noqa: PLC0415  not in every task

        return ObjectsStore(self.target.text, self.options)

    def attempt(self, handle: Handle, *, file_bytes_max: int) -> Attempt:  # noqa: ARG002
        return HiddenAttempt(self.store(), handle)

    def place(self, identity: Identity, *, recovery_days: int) -> Place:  # noqa: ARG002
        return HiddenPlace(self.store(), identity)


def back_end(target: Target, uploads: Uploads, options: Options) -> BackEnd:
    if target.scheme == "s3" and find_spec("boto3") is None:
        raise Misconfigured(
            "files on S3 need a package that is not installed: boto3", "pip install 'epochal[s3]'"
        )
    if target.scheme == "file":
        return LocalBackEnd(Path(target.text))
    if target.scheme == "s3" and uploads != "manifest":
        return S3BackEnd(target, options)
    return HiddenBackEnd(target, options)


def _s3(target: Target, options: Options) -> S3Store:
    from epochal.sinks.files.s3 import Bucket, S3Store  # noqa: PLC0415  needs boto3

    return S3Store(Bucket(name=target.bucket, prefix=target.prefix, options=options))
