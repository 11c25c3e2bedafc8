"""A store in S3, Google Cloud Storage, Azure and compatible servers. The module that calls obstore.

A put with `If-None-Match: *` (or what the service has in its place) either creates a whole object
or is refused. Some servers that claim to be S3 ignore the condition and overwrite; then no driver
could be fenced. So each store is asked once, before its first `put_if_absent`, by creating one name
of its own twice.

Requests are repeated below us, and a repeated put may meet the object that its first attempt made:
"exists" does not say by whom. The nonces in the records of the epoch log do.

Large files go up in parts. What a killed process sent of one is invisible, and the bucket's rule
for incomplete uploads removes it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.store import Entry, checked, gone
from epochal.storage.urls import first_line, without_secrets

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

PROBE = ".put-if-absent"
"""An object beside the keys by which a server shows that it refuses to create one name twice."""

_REQUEST_TIMEOUT_S = 20
_CONNECT_TIMEOUT_S = 5
_RETRIES_MAX = 3
_RETRY_TIMEOUT_S = 30
_PART_BYTES = 8 * 1024 * 1024

_CONFLICT = "ConditionalRequestConflict"
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_CREDENTIALS = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID …, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_…) or from the machine's own role; they need list, get, put and delete here"
)
# By the text of the answer, as the library gives the same answer another class from verb to verb.
_ERRORS: Mapping[str, tuple[type[EpochalError], str]] = {
    "status code: 401": (Misconfigured, _CREDENTIALS),
    "status code: 403": (Misconfigured, _CREDENTIALS),
    "status code: 404": (Misconfigured, "the bucket or container must exist"),
    "redirect without LOCATION": (Misconfigured, "name the bucket's region, in AWS_REGION"),
}
"""What an answer means; without one a read may be repeated, and a put has an unknown outcome."""
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "token request")


class ObjectStore:
    """Keys as objects under one prefix of one bucket."""

    def __init__(self, client: Client, *, location: str, folder: str = "") -> None:
        self._client = client
        self._location = without_secrets(location)
        self._prefix = f"{folder}/" if folder else ""
        self._refuses_second_put = False
        self._has_answered = False

    @property
    def location(self) -> str:
        return f"{self._location.rstrip('/')}/{self._prefix}".rstrip("/")

    def put(self, key: str, content: bytes) -> None:
        with self._errors("write", key, is_put=True):
            obstore.put(self._client, self._at(key), content, use_multipart=False)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        with self._errors("write", PROBE):
            self._require_put_if_absent()
        with self._errors("write", key, is_put=True):
            return self._create(self._at(key), content)

    def read(self, key: str) -> bytes | None:
        with self._errors("read", key):
            try:
                return bytes(obstore.get(self._client, self._at(key)).bytes())
            except FileNotFoundError:
                return None

    def read_range(self, key: str, start: int, end: int) -> bytes:
        with self._errors("read", key):
            try:
                return bytes(obstore.get_range(self._client, self._at(key), start=start, end=end))
            except FileNotFoundError:
                raise gone(self.location, key) from None

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        if not after:
            return [entry.name for entry in self.entries(folder)]
        top = f"{self._prefix}{folder}/" if folder else self._prefix
        with self._errors("list", folder):
            # Of all that is below the folder: there is no listing of one level from a name on.
            pages = obstore.list(self._client, top.rstrip("/") or None, offset=top + after)
            found = [one["path"].removeprefix(top) for page in pages for one in page]
        return sorted(name for name in found if "/" not in name and not name.startswith("."))

    def folders(self, folder: str = "") -> Sequence[str]:
        prefixes = self._listed(folder)["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes)

    def entries(self, folder: str = "") -> Sequence[Entry]:
        entries = [_entry(found) for found in self._listed(folder)["objects"]]
        shown = [entry for entry in entries if not entry.name.startswith(".")]
        return sorted(shown, key=lambda entry: entry.name)

    def entry(self, key: str) -> Entry | None:
        with self._errors("read", key):
            try:
                return _entry(obstore.head(self._client, self._at(key)))
            except FileNotFoundError:
                return None

    def delete(self, keys: Sequence[str]) -> None:
        paths = [self._at(key) for key in keys]
        with self._errors("delete", ", ".join(keys)):
            try:
                if paths:
                    obstore.delete(self._client, paths)
            except FileNotFoundError:
                # Some servers stop at the first key that does not exist.
                for path in paths:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._client, path)

    def beside(self, name: str) -> ObjectStore:
        inner = self._prefix + name
        return ObjectStore(self._client, location=self._location, folder=inner)

    def close(self) -> None:
        """Connections belong to the library's own pool."""

    def create(self, key: str) -> ObjectOutput:
        with self._errors("write", key):
            upload = obstore.open_writer(self._client, self._at(key), buffer_size=_PART_BYTES)
        return ObjectOutput(self, key, upload)

    def discard_unfinished(self, folder: str) -> None:
        """obstore can't list uploads: the store itself ends them after a time."""

    def open(self, key: str) -> BinaryIO | None:
        with self._errors("read", key):
            try:
                reader = obstore.open_reader(self._client, self._at(key), buffer_size=_PART_BYTES)
            except FileNotFoundError:
                return None
        return cast("BinaryIO", _Input(self, key, reader))

    def _at(self, key: str) -> str:
        return self._prefix + checked(key)

    def _listed(self, folder: str) -> Any:
        prefix = (self._prefix + folder).rstrip("/")
        with self._errors("list", folder):
            return obstore.list_with_delimiter(self._client, prefix or None)

    def _create(self, path: str, content: bytes) -> bool:
        try:
            # One request: a multipart upload would not carry the condition.
            obstore.put(self._client, path, content, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if _CONFLICT in str(error):
                raise  # two puts met; the key may still not exist
            return False
        return True

    def _require_put_if_absent(self) -> None:
        if self._refuses_second_put:
            return
        if self._create(PROBE, b"") and self._create(PROBE, b""):
            raise Misconfigured(
                f"the server of {self.location} overwrites where it was asked to put if absent",
                hint="use a server that honours If-None-Match on PUT, a folder, or sqlite:///path",
            )
        self._refuses_second_put = True

    @contextmanager
    def _errors(self, verb: str, key: str, *, is_put: bool = False) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            # The library's own message would follow as the cause, with all that was cut out of it.
            raise self._error(error, verb, key, is_put=is_put) from None
        self._has_answered = True

    def _error(self, error: Exception, verb: str, key: str, *, is_put: bool) -> EpochalError:
        reason = first_line(str(error))
        place = f"{self.location}/{key}" if key else self.location
        fact = f"cannot {verb} {place}: {reason}"
        if any(sign in reason for sign in _NO_CREDENTIALS):
            # Nothing was sent. Where it worked before, the machine's role is only out of reach now.
            return (TryAgain if self._has_answered else Misconfigured)(fact, _CREDENTIALS)
        for sign, (kind, hint) in _ERRORS.items():
            if sign in reason:
                return kind(fact, hint)
        return OutcomeUnknown(fact) if is_put else TryAgain(fact)


class ObjectOutput:
    """An object that goes up in parts and appears as a whole."""

    def __init__(self, store: ObjectStore, key: str, upload: Any) -> None:
        self._store = store
        self._key = key
        self._upload = upload

    def write(self, piece: bytes | memoryview) -> None:
        with self._store._errors("write", self._key):
            self._upload.write(bytes(piece))

    def finish(self) -> None:
        with self._store._errors("write", self._key, is_put=True):
            self._upload.close()

    def discard(self) -> None:
        """An upload that is not closed is never completed."""


class _Input(io.RawIOBase):
    """An object as a file that can be read at any position."""

    def __init__(self, store: ObjectStore, key: str, reader: Any) -> None:
        self._store = store
        self._key = key
        self._reader = reader

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._reader.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._store._errors("read", self._key):
            return int(self._reader.seek(offset, whence))

    def read(self, size: int | None = -1) -> bytes:
        """As many bytes as asked for: the client stops at the edge of its own buffer."""
        with self._store._errors("read", self._key):
            if size is None or size < 0:
                return bytes(self._reader.read(None))
            pieces = []
            while size and (piece := bytes(self._reader.read(size))):
                pieces.append(piece)
                size -= len(piece)
            return b"".join(pieces)


def open_at(url: str, options: Mapping[str, str] | None = None) -> ObjectStore:
    """
    The store below a URL.

    Credentials and endpoints come from the usual variables, and from `options` under the names of
    these variables.
    """
    try:
        client = from_url(
            url,
            config=cast("Any", dict(options or {})),
            client_options=_client_options(options or {}),
            retry_config=_retries(),
        )
    except (BaseError, ValueError) as error:
        raise Misconfigured(
            f"no object store opens at {without_secrets(url)}: {first_line(str(error))}",
            hint="s3://bucket/folder, gs://bucket/folder or "
            "abfss://container@account.dfs.core.windows.net/folder",
        ) from None
    return ObjectStore(client, location=url)


def _entry(found: ObjectMeta) -> Entry:
    return Entry(
        name=found["path"].rpartition("/")[2],
        size=found["size"],
        modified_at=found["last_modified"].timestamp(),
    )


def _client_options(given: Mapping[str, str]) -> ClientConfig:
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=_REQUEST_TIMEOUT_S),
    }
    endpoints = [os.environ.get(name, "") for name in _ENDPOINT_VARIABLES]
    if any(endpoint.startswith("http://") for endpoint in (*endpoints, *given.values())):
        options["allow_http"] = True
    return options


def _retries() -> RetryConfig:
    return {
        "max_retries": _RETRIES_MAX,
        "retry_timeout": timedelta(seconds=_RETRY_TIMEOUT_S),
    }
