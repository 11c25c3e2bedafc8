"""A bucket of S3, or of a server that speaks as it does, by boto3.

One client a process and set of options: it may be used by many threads. Requests are repeated below
us where S3 throttles or fails; all that is asked here may be repeated.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import IO, Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from epochal.errors import Misconfigured
from epochal.sinks.files import layout, ranges
from epochal.sinks.files.places import Output
from epochal.sinks.files.s3_errors import RAISED, code_of, is_denied, sorted_error
from epochal.sinks.files.sending import PART_BYTES, PartStream, Sender
from epochal.sinks.files.urls import Options
from epochal.terms import Ability, Handle

_HANDLE = "epochal-handle"
"""Metadata of an upload, set when it begins: by it an object is known to be of one attempt."""
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 60
_ATTEMPTS = 5
_CONNECTIONS = 16
_SESSION_OPTIONS = {
    "profile": "profile_name",
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region_name",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Which bucket, and how it is spoken to. Secrets are held as such."""

    name: str
    prefix: str
    """Without a slash at its end; empty for the whole bucket."""
    options: Options = ()

    def option(self, name: str) -> str | None:
        return _option(self.options, name)

    @property
    def url(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An incomplete multipart upload, as the bucket lists it."""

    key: str
    id: str
    age_s: float


def _option(options: Options, name: str) -> str | None:
    value = dict(options).get(name)
    return value if isinstance(value, str) or value is None else value.reveal()


@lru_cache
def _client(options: Options) -> Any:
    """One for all buckets and folders: a client takes long to make, and holds connections."""
    session = boto3.Session(
        **{
            theirs: value
            for ours, theirs in _SESSION_OPTIONS.items()
            if (value := _option(options, ours)) is not None
        }
    )
    style = _option(options, "addressing_style") or "auto"
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        max_pool_connections=_CONNECTIONS,
        s3={"addressing_style": style},
        # Parts carry an MD5, which every server checks; newer sums not every server knows.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return session.client("s3", endpoint_url=_option(options, "endpoint_url"), config=config)


class S3Store:
    """Small objects and multipart uploads below one prefix."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @property
    def root(self) -> str:
        return self._bucket.url

    # Small objects

    def read(self, key: str) -> bytes | None:
        answer = self._call("get_object", key, missing=("NoSuchKey",))
        if answer is None:
            return None
        with self._sorting("get_object"):
            content: bytes = answer["Body"].read()
        return content

    def put_if_absent(self, key: str, content: bytes) -> bool:
        answer = self._call(
            "put_object",
            key,
            missing=("PreconditionFailed",),
            Body=content,
            ContentMD5=_md5(content),
            IfNoneMatch="*",
            **self._encryption,
        )
        return answer is not None

    def names(self, folder: str) -> list[str]:
        top = self._key(f"{folder}/")
        pages = self._pages("list_objects_v2", Prefix=top, Delimiter="/")
        found = [
            (entry.get("Key") or entry["Prefix"]).removeprefix(top).rstrip("/")
            for page in pages
            for entry in (*page.get("Contents", ()), *page.get("CommonPrefixes", ()))
        ]
        return [name for name in found if name]

    def aged(self, prefix: str) -> dict[str, float]:
        now = datetime.now(UTC)
        pages = self._pages("list_objects_v2", Prefix=self._key(prefix))
        return {
            self._below(entry["Key"]): max(0.0, (now - entry["LastModified"]).total_seconds())
            for page in pages
            for entry in page.get("Contents", ())
        }

    def remove(self, key: str) -> None:
        self._call("delete_object", key)

    def remove_empty(self, folder: str) -> None:
        """A bucket has no folders."""

    def size(self, key: str) -> int | None:
        found = self._head(key)
        return None if found is None else int(found["ContentLength"])

    def open_to_read(self, key: str) -> IO[bytes]:
        return ranges.opened(self, key)

    def open_to_write(self, key: str) -> Output:
        return _WholeObject(self, key)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        answer = self._call("get_object", key, Range=f"bytes={start}-{end - 1}")
        with self._sorting("get_object"):
            content: bytes = answer["Body"].read()
        return content

    # Uploads

    def begin_upload(self, key: str) -> str:
        handle = layout.handle_in(key)
        metadata = {} if handle is None else {_HANDLE: str(handle)}
        answer = self._call("create_multipart_upload", key, Metadata=metadata, **self._encryption)
        return str(answer["UploadId"])

    def put_part(self, key: str, upload: str, number: int, content: bytes) -> str:
        answer = self._call(
            "upload_part",
            key,
            UploadId=upload,
            PartNumber=number,
            Body=content,
            ContentMD5=_md5(content),
        )
        return str(answer["ETag"]).strip('"')

    def complete(self, key: str, upload: str, parts: Sequence[str]) -> bool:
        """False where there is no such upload any more: it was completed, or thrown away."""
        listed = [{"ETag": f'"{tag}"', "PartNumber": at} for at, tag in enumerate(parts, start=1)]
        answer = self._call(
            "complete_multipart_upload",
            key,
            missing=("NoSuchUpload",),
            UploadId=upload,
            MultipartUpload={"Parts": listed},
        )
        return answer is not None

    def abort_upload(self, key: str, upload: str) -> None:
        self._call("abort_multipart_upload", key, missing=("NoSuchUpload",), UploadId=upload)

    def uploads(self, prefix: str = "") -> list[Upload]:
        pages = self._pages("list_multipart_uploads", Prefix=self._key(prefix))
        now = datetime.now(UTC)
        return [
            Upload(
                key=self._below(entry["Key"]),
                id=entry["UploadId"],
                age_s=max(0.0, (now - entry["Initiated"]).total_seconds()),
            )
            for page in pages
            for entry in page.get("Uploads", ())
        ]

    def is_object_of(self, key: str, handle: Handle, size: int) -> bool:
        """The object at this key is what this attempt uploaded: its metadata says so."""
        found = self._head(key)
        return (
            found is not None
            and found.get("Metadata", {}).get(_HANDLE) == str(handle)
            and found["ContentLength"] == size
        )

    # What the bucket can promise

    def check(self, scratch: str) -> Sequence[Ability]:
        """Put, list, read and remove scratch objects: then all of it is allowed here."""
        probe = f"{scratch}{secrets.token_hex(8)}"
        if self.put_if_absent(probe, b"") and self.put_if_absent(probe, b""):
            raise Misconfigured(
                f"{self.root} overwrites where it was asked to put if absent",
                "use a server that honours If-None-Match on PUT",
            )
        self.read(probe)
        self.names(layout.SCRATCH)
        self.remove(probe)
        return [
            Ability(
                name="put if absent",
                granted=True,
                because=f"{self.root} refused to put one key twice",
            )
        ]

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        answer = self._call(
            "get_bucket_lifecycle_configuration", missing=("NoSuchLifecycleConfiguration",)
        )
        rules: Sequence[Mapping[str, Any]] = () if answer is None else answer.get("Rules", ())
        return rules

    def full_key(self, key: str) -> str:
        return self._key(key)

    # How it is asked

    @property
    def _encryption(self) -> dict[str, str]:
        kind, key = self._bucket.option("encryption"), self._bucket.option("kms_key_id")
        return {
            **({} if kind is None else {"ServerSideEncryption": kind}),
            **({} if key is None else {"SSEKMSKeyId": key}),
        }

    def _head(self, key: str) -> Any | None:
        return self._call("head_object", key, missing=("404", "NoSuchKey", "NotFound"))

    def _key(self, key: str) -> str:
        return f"{self._bucket.prefix}/{key}" if self._bucket.prefix else key

    def _below(self, full: str) -> str:
        return full.removeprefix(self._key(""))

    def _call(
        self, verb: str, key: str | None = None, *, missing: Sequence[str] = (), **given: Any
    ) -> Any:
        """Ask; None where the answer is one of the errors in `missing`."""
        where = {} if key is None else {"Key": self._key(key)}
        with self._sorting(verb):
            try:
                return getattr(self._client, verb)(Bucket=self._bucket.name, **where, **given)
            except ClientError as error:
                if code_of(error) in missing:
                    return None
                raise

    def _pages(self, verb: str, **given: Any) -> Iterator[Mapping[str, Any]]:
        with self._sorting(verb):
            pages = self._client.get_paginator(verb).paginate(Bucket=self._bucket.name, **given)
            yield from pages

    @property
    def _client(self) -> Any:
        return _client(self._bucket.options)

    @contextmanager
    def _sorting(self, verb: str) -> Iterator[None]:
        try:
            yield
        except RAISED as error:
            if is_denied(error):
                # Keys may have been changed meanwhile: they are read again at the next call.
                _client.cache_clear()
            raise sorted_error(error, f"{verb} on {self.root}") from None


class _WholeObject(PartStream):
    """An object that is there once it is closed."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store = store
        self._own = Sender(store, file_bytes_max=PART_BYTES)
        super().__init__(key, self._own)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            sent = self.sent()
            self._store.complete(self.key, sent.upload, sent.parts)
        finally:
            self._own.stop()

    def abandon(self) -> None:
        if self.closed:
            return
        self._own.stop()
        super().close()
        if (upload := self.begun()) is not None:
            self._store.abort_upload(self.key, upload)


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
