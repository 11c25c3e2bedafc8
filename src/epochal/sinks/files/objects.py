"""Google Cloud Storage, Azure and others by obstore: whole objects, put if absent."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, cast

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.logs.names import first_line, without_secrets
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Output, open_ranged
from epochal.sinks.files.target import Options
from epochal.terms import Ability

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_PART_BYTES = 8 * 1024 * 1024
_CONNECT_TIMEOUT_S = 5
_REQUEST_TIMEOUT_S = 60
_RETRIES_MAX = 5
_RETRY_TIMEOUT_S = 60
_CREDENTIALS_HINT = (
    "credentials come from the environment (GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_…), from "
    "the machine's own role, or from storage_options; they need list, get, put and delete"
)
_FOR_A_PERSON = {
    "status code: 401": _CREDENTIALS_HINT,
    "status code: 403": _CREDENTIALS_HINT,
    "status code: 404": "the bucket or container must exist",
    "169.254.169.254": _CREDENTIALS_HINT,
    "metadata.google.internal": _CREDENTIALS_HINT,
}


@lru_cache
def _opened(url: str, options: Options) -> ObjectStore:
    given: Mapping[str, Any] = {
        name: value if isinstance(value, str) else value.reveal() for name, value in options
    }
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=_REQUEST_TIMEOUT_S),
        "allow_http": any(str(value).startswith("http://") for value in given.values()),
    }
    retries: RetryConfig = {
        "max_retries": _RETRIES_MAX,
        "retry_timeout": timedelta(seconds=_RETRY_TIMEOUT_S),
    }
    return from_url(url, config=cast("Any", given), client_options=client, retry_config=retries)


class ObjectsStore:
    """Objects below one URL."""

    def __init__(self, url: str, options: Options) -> None:
        self._url = url
        self._options = options

    @property
    def root(self) -> str:
        return without_secrets(self._url)

    def read(self, key: str) -> bytes | None:
        with self._errors("read"):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def put_if_absent(self, key: str, content: bytes) -> bool:
        with self._errors("put"):
            try:
                # One request: a multipart upload would not carry the condition.
                obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def names(self, folder: str) -> list[str]:
        with self._errors("list"):
            found = obstore.list_with_delimiter(self._store, folder)
        files = (entry["path"] for entry in found["objects"])
        return [layout.name_of(path.rstrip("/")) for path in (*files, *found["common_prefixes"])]

    def aged(self, prefix: str) -> dict[str, float]:
        folder, _, start = prefix.rpartition("/")
        now = datetime.now(UTC)
        with self._errors("list"):
            found = [entry for page in obstore.list(self._store, folder) for entry in page]
        return {
            entry["path"]: max(0.0, (now - entry["last_modified"]).total_seconds())
            for entry in found
            if entry["path"].removeprefix(f"{folder}/").startswith(start)
        }

    def remove(self, key: str) -> None:
        with self._errors("remove"), suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def remove_empty(self, folder: str) -> None:
        """A bucket has no folders."""

    def size(self, key: str) -> int | None:
        with self._errors("ask"):
            try:
                return int(obstore.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    def open_to_read(self, key: str) -> IO[bytes]:
        return open_ranged(self, key)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        with self._errors("read"):
            return bytes(obstore.get_range(self._store, key, start=start, end=end))

    def open_to_write(self, key: str) -> Output:
        with self._errors("write"):
            opened = obstore.open_writer(self._store, key, buffer_size=_PART_BYTES)
        return _Written(opened, self)

    def check(self, scratch: str) -> Sequence[Ability]:
        probe = f"{scratch}{secrets.token_hex(8)}"
        if self.put_if_absent(probe, b"") and self.put_if_absent(probe, b""):
            raise Misconfigured(
                f"{self.root} overwrites where it was asked to put if absent",
                "use a store that can put if absent",
            )
        self.names(layout.SCRATCH)
        self.remove(probe)
        return [
            Ability(
                name="put if absent",
                granted=True,
                because=f"{self.root} refused to put one key twice",
            )
        ]

    @property
    def _store(self) -> ObjectStore:
        try:
            return _opened(self._url, self._options)
        except (BaseError, ValueError) as error:
            raise Misconfigured(
                f"no object store opens at {self.root}: {first_line(str(error))}",
                "gs://bucket/folder, az://container/folder, "
                "abfss://container@account.dfs.core.windows.net/folder",
            ) from None

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise error_of(error, f"cannot {verb} below {self.root}") from None


class _Written:
    """An object that is there once it is closed; only errors that are ours come out of it."""

    def __init__(self, opened: Any, store: ObjectsStore) -> None:
        self._opened = opened
        self._errors = store._errors
        self._size = 0
        self.closed = False

    def write(self, content: bytes) -> int:
        if self.closed:
            return len(content)
        with self._errors("write"):
            self._opened.write(content)
        self._size += len(content)
        return len(content)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """A part goes when it is full."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with self._errors("write"):
                self._opened.close()

    def abandon(self) -> None:
        self.closed = True


def error_of(error: Exception, what: str) -> EpochalError:
    reason = first_line(str(error))
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return Misconfigured(f"{what}: {reason}", _CREDENTIALS_HINT)
    for sign, hint in _FOR_A_PERSON.items():
        if sign in str(error):
            return Misconfigured(f"{what}: {reason}", hint)
    return TryAgain(f"{what}: {reason}")
