"""
A bucket of S3, or of a compatible server, by boto3: small objects, and files in parts.

One client per process and set of options: it may be used by many threads. Requests are repeated
below us where S3 throttles or fails; every request made here may be repeated.

A file goes up in parts of bounded size, several at a time, while the next ones are encoded. A part
that is not the last must have a least size, so each open file holds up to one part in memory. Of
parts that are being sent there are never more than a few: a writer that is faster than the network
waits.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from threading import Semaphore
from typing import Any, BinaryIO, Protocol, cast

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from epochal.errors import EpochalError, Misconfigured
from epochal.kit.marked_files import at_once
from epochal.sinks.files import layout
from epochal.sinks.files.errors import RAISED, code_of, error_of, is_denied
from epochal.sinks.files.target import Options
from epochal.storage import Entry
from epochal.storage.store import gone
from epochal.terms import Ability, Handle

_SENDS_MAX = 4
PART_BYTES = 8 * 1024 * 1024
_PARTS_MAX = 5_000
"""Half of what S3 allows: a row group may make a file larger than it was meant to be."""


class PartReceiver(Protocol):
    def begin_upload(self, key: str) -> str: ...

    def put_part(self, key: str, upload: str, number: int, content: bytes) -> str: ...


class Completion(Enum):
    """What became of a request to complete an upload."""

    DONE = "this request did it"
    GONE = "there was no such upload: it was completed before, or thrown away"
    UNSURE = "there is no such upload, and the request was sent more than once"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFile:
    upload: str
    parts: tuple[str, ...]
    bytes: int


class PartSender:
    """Sends the parts of one attempt's files."""

    def __init__(self, receiver: PartReceiver, *, file_bytes_max: int) -> None:
        self._receiver = receiver
        self._pool = ThreadPoolExecutor(_SENDS_MAX)
        self._slots = Semaphore(_SENDS_MAX)
        self.part_bytes = max(PART_BYTES, file_bytes_max // _PARTS_MAX)
        self.is_stopped = False

    def begin(self, key: str) -> Future[str]:
        return self._pool.submit(self._unless_stopped, lambda: self._receiver.begin_upload(key))

    def send(self, key: str, upload: Future[str], number: int, content: bytes) -> Future[str]:
        self._slots.acquire()
        return self._pool.submit(self._send, key, upload, number, content)

    def stop(self) -> None:
        """Send nothing more, and return when nothing is being sent."""
        self.is_stopped = True
        self._pool.shutdown(wait=True)

    def _send(self, key: str, upload: Future[str], number: int, content: bytes) -> str:
        try:
            # It was submitted before this, and waits for nothing: it is running or done.
            begun = upload.result()
            return self._unless_stopped(
                lambda: self._receiver.put_part(key, begun, number, content)
            )
        finally:
            self._slots.release()

    def _unless_stopped(self, call: Callable[[], str]) -> str:
        if self.is_stopped:
            raise OSError("the attempt was given up")
        return call()


class PartStream(io.RawIOBase):
    """One file: what is written is sent part by part."""

    def __init__(self, key: str, sender: PartSender) -> None:
        super().__init__()
        self.key = key
        self._sender = sender
        self._waiting = bytearray()
        self._upload: Future[str] | None = None
        self._parts: list[Future[str]] = []
        self._size = 0

    @property
    def held_bytes(self) -> int:
        return len(self._waiting)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: bytes) -> int:  # type: ignore[override] # Arrow gives bytes
        if self._sender.is_stopped:
            return len(content)
        self._waiting += content
        self._size += len(content)
        while len(self._waiting) >= self._sender.part_bytes:
            self._cut(self._sender.part_bytes)
        return len(content)

    def close(self) -> None:
        if not self.closed and not self._sender.is_stopped and (self._waiting or not self._parts):
            self._cut(len(self._waiting))
        super().close()

    def sent(self) -> SentFile:
        """The upload and its parts; waits for those that are being sent, and raises what failed."""
        parts = tuple(part.result() for part in self._parts)
        if self._upload is None or not self.closed:
            raise ValueError(f"{self.key} is still open")
        return SentFile(upload=self._upload.result(), parts=parts, bytes=self._size)

    def begun(self) -> str | None:
        """Its upload, if it has one, once the sender has stopped."""
        if self._upload is None or self._upload.exception() is not None:
            return None
        return self._upload.result()

    def _cut(self, size: int) -> None:
        if self._upload is None:
            self._upload = self._sender.begin(self.key)
        part = bytes(memoryview(self._waiting)[:size])
        del self._waiting[:size]
        self._raise_what_failed()
        number = len(self._parts) + 1
        self._parts.append(self._sender.send(self.key, self._upload, number, part))

    def _raise_what_failed(self) -> None:
        for part in self._parts:
            if part.done():
                part.result()


_HANDLE = "epochal-handle"
"""Metadata of an upload, set when it begins: it names the attempt that an object is of."""
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 60
_ATTEMPTS = 5
_READ_BYTES = 4 * 1024 * 1024
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
    """A bucket and how to reach it. Secrets are held as such."""

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
    endpoint = _option(options, "endpoint_url")
    try:
        return session.client("s3", endpoint_url=endpoint, config=config)
    except ValueError:
        raise Misconfigured(
            f"storage_options: endpoint_url={endpoint!r} is no address", "http://host:port"
        ) from None


class S3Store:
    """A store of objects below one prefix, and multipart uploads there."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @property
    def location(self) -> str:
        return self._bucket.url

    # Small objects

    def read(self, key: str) -> bytes | None:
        answer = self._call("get_object", key, missing=("NoSuchKey",))
        if answer is None:
            return None
        with self._errors("get_object"):
            content: bytes = answer["Body"].read()
        return content

    def put(self, key: str, content: bytes) -> None:
        self._put(key, content)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        answer = self._put(key, content, missing=("PreconditionFailed",), IfNoneMatch="*")
        return answer is not None

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        return [entry.name for entry in self.entries(folder) if entry.name > after]

    def folders(self, folder: str = "") -> Sequence[str]:
        found = (
            self._name(one["Prefix"].rstrip("/"))
            for page in self._listed(folder)
            for one in page.get("CommonPrefixes", ())
        )
        return sorted(found)

    def entries(self, folder: str = "") -> Sequence[Entry]:
        found = [
            Entry(
                name=self._name(one["Key"]),
                size=int(one["Size"]),
                modified_at=one["LastModified"].timestamp(),
            )
            for page in self._listed(folder)
            for one in page.get("Contents", ())
        ]
        return sorted((one for one in found if one.name), key=lambda one: one.name)

    def entry(self, key: str) -> Entry | None:
        found = self._head(key)
        if found is None:
            return None
        return Entry(
            name=self._name(key),
            size=int(found["ContentLength"]),
            modified_at=found["LastModified"].timestamp(),
        )

    def delete(self, keys: Sequence[str]) -> None:
        at_once(lambda key: self._call("delete_object", key), keys)

    def beside(self, name: str) -> S3Store:
        return S3Store(replace(self._bucket, prefix=self._key(name)))

    def close(self) -> None:
        """The client belongs to the process."""

    def create(self, key: str) -> S3Output:
        return S3Output(self, key)

    def discard_unfinished(self, folder: str) -> None:
        # Some servers don't list uploads, or don't allow it: there the bucket's own rules end them.
        with suppress(Misconfigured):
            for upload in self.uploads(f"{folder}/"):
                self.abort_upload(upload.key, upload.id)

    def open(self, key: str) -> BinaryIO | None:
        found = self.entry(key)
        if found is None:
            return None
        reader = io.BufferedReader(_RangeReader(self, key, found.size), _READ_BYTES)
        return cast("BinaryIO", reader)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        span = f"bytes={start}-{end - 1}"
        answer = self._call("get_object", key, missing=("NoSuchKey",), Range=span)
        if answer is None:
            raise gone(self.location, key)
        with self._errors("get_object"):
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

    def complete(self, key: str, upload: str, parts: Sequence[str]) -> Completion:
        listed = [{"ETag": f'"{tag}"', "PartNumber": at} for at, tag in enumerate(parts, start=1)]
        verb, whole = "complete_multipart_upload", {"Parts": listed}
        with self._errors(verb):
            try:
                self._client.complete_multipart_upload(
                    Bucket=self._bucket.name,
                    Key=self._key(key),
                    UploadId=upload,
                    MultipartUpload=whole,
                )
            except ClientError as error:
                if code_of(error) != "NoSuchUpload":
                    raise
                is_repeated = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)
                return Completion.UNSURE if is_repeated else Completion.GONE
        return Completion.DONE

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
        """Whether this attempt uploaded the object at this key, by its metadata and size."""
        found = self._head(key)
        return (
            found is not None
            and found.get("Metadata", {}).get(_HANDLE) == str(handle)
            and found["ContentLength"] == size
        )

    def lifecycle_rules(self) -> Sequence[Mapping[str, Any]]:
        answer = self._call(
            "get_bucket_lifecycle_configuration", missing=("NoSuchLifecycleConfiguration",)
        )
        rules: Sequence[Mapping[str, Any]] = () if answer is None else answer.get("Rules", ())
        return rules

    def full_key(self, key: str) -> str:
        return self._key(key)

    # Requests

    def _put(self, key: str, content: bytes, **given: Any) -> Any:
        return self._call(
            "put_object",
            key,
            Body=content,
            ContentMD5=_md5(content),
            **given,
            **self._encryption,
        )

    def _listed(self, folder: str) -> Iterator[Mapping[str, Any]]:
        top = self._key(f"{folder}/" if folder else "")
        return self._pages("list_objects_v2", Prefix=top, Delimiter="/")

    def _name(self, key: str) -> str:
        return key.rpartition("/")[2]

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
        """Send a request; None where the answer is one of the errors in `missing`."""
        where = {} if key is None else {"Key": self._key(key)}
        with self._errors(verb):
            try:
                return getattr(self._client, verb)(Bucket=self._bucket.name, **where, **given)
            except ClientError as error:
                if code_of(error) in missing:
                    return None
                raise

    def _pages(self, verb: str, **given: Any) -> Iterator[Mapping[str, Any]]:
        with self._errors(verb):
            pages = self._client.get_paginator(verb).paginate(Bucket=self._bucket.name, **given)
            yield from pages

    @property
    def _client(self) -> Any:
        return _client(self._bucket.options)

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except RAISED as error:
            if is_denied(error):
                # Keys may have been changed meanwhile: they are read again at the next call.
                _client.cache_clear()
            raise error_of(error, f"{verb} on {self.location}") from None


def check_lifecycle(rows: S3Store, ours: S3Store, *, recovery_days: int) -> Ability:
    """
    Whether the bucket's rules leave prepared uploads alone, and the objects beside the rows: the
    manifests, and where they alone show rows, the rows themselves.
    """
    name = "kept by the bucket's lifecycle rules"
    try:
        rules = [rule for rule in rows.lifecycle_rules() if rule.get("Status") == "Enabled"]
    except EpochalError as error:
        return Ability(
            name=name,
            granted=False,
            because=f"the rules can't be read ({error.message}): make sure that none aborts "
            f"incomplete uploads within {recovery_days} days, or expires objects below "
            f"{ours.location}",
        )
    days = {
        "aborts incomplete uploads": _shortest(rules, rows, _ABORT),
        "expires objects": _shortest(rules, ours, _EXPIRE),
    }
    for what, shortest in days.items():
        if shortest is not None and shortest < recovery_days:
            raise Misconfigured(
                f"a lifecycle rule of {rows.location} {what} after {shortest} days, and a decided "
                f"epoch must stay recoverable for {recovery_days}",
                f"leave {ours.location} out of the rule, raise it to {recovery_days} days or more, "
                "or lower recovery_days=",
            )
    found = [f"a rule {what} after {at} days" for what, at in days.items() if at is not None]
    return Ability(
        name=name,
        granted=days["expires objects"] is None,
        because="; ".join(found) or "no rule aborts uploads or expires objects",
    )


_ABORT = ("AbortIncompleteMultipartUpload", "DaysAfterInitiation")
_EXPIRE = ("Expiration", "Days")


def _shortest(
    rules: Sequence[Mapping[str, Any]], store: S3Store, action: tuple[str, str]
) -> int | None:
    """After how many days rules do this to a part of a store; None where none does."""
    ours = store.full_key("")
    found = []
    for rule in rules:
        chosen = rule.get("Filter", {})
        prefix = chosen.get("Prefix", chosen.get("And", {}).get("Prefix", rule.get("Prefix", "")))
        days = rule.get(action[0], {}).get(action[1])
        if days is not None and (ours.startswith(prefix) or prefix.startswith(ours)):
            found.append(int(days))
    return min(found, default=None)


class S3Output:
    """An object that goes up in parts and appears as a whole."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store = store
        self._sender = PartSender(store, file_bytes_max=PART_BYTES)
        self._stream = PartStream(key, self._sender)

    def write(self, piece: bytes | memoryview) -> None:
        self._stream.write(bytes(piece))

    def finish(self) -> None:
        self._stream.close()
        try:
            sent = self._stream.sent()
            self._store.complete(self._stream.key, sent.upload, sent.parts)
        finally:
            self._sender.stop()

    def discard(self) -> None:
        self._sender.stop()
        self._stream.close()
        if (upload := self._stream.begun()) is not None:
            self._store.abort_upload(self._stream.key, upload)


class _RangeReader(io.RawIOBase):
    def __init__(self, store: S3Store, key: str, size: int) -> None:
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


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
