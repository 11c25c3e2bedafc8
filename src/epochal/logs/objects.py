"""An epoch log in an object store: S3, Google Cloud Storage, Azure and what speaks as they do.

A put with `If-None-Match: *` (or what the store has in its place) either creates a whole object or
is refused. Some servers that speak S3 ignore the condition and overwrite; then no driver could be
fenced. So each log asks once, before its first put, by filling one name of its own twice.

Requests are repeated below us, and a repeated put may meet the object that its first attempt made:
"taken" does not say by whom. The journal's nonces do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
)
from obstore.store import from_url

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs.names import PROBE, first_line, record_name, record_number, without_secrets

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_REQUEST_TIMEOUT_S = 20
_CONNECT_TIMEOUT_S = 5
_RETRIES_MAX = 3
_RETRY_TIMEOUT_S = 30

_CONFLICT = "ConditionalRequestConflict"
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "token request")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_CREDENTIALS_HINT = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID …, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_…) or from the machine's own role; they need list, get, put and delete here"
)
# By the answer's text, as the library sorts the same answer differently from verb to verb.
_FOR_A_PERSON = {
    "status code: 401": _CREDENTIALS_HINT,
    "status code: 403": _CREDENTIALS_HINT,
    "status code: 404": "the bucket or container must exist",
    "redirect without LOCATION": "name the bucket's region, in AWS_REGION",
}


class ObjectsLog:
    """Records as objects under one prefix of one bucket. Usable from any thread."""

    def __init__(self, store: ObjectStore, *, place: str) -> None:
        self._store = store
        self._place = without_secrets(place)
        self._refuses_second_put = False
        self._has_answered = False

    @classmethod
    def at(cls, url: str) -> ObjectsLog:
        """The log under `url`; credentials and endpoints come from the usual variables."""
        return cls(open_store(url), place=url)

    @property
    def place(self) -> str:
        return self._place

    def put_if_absent(self, number: int, record: bytes) -> bool:
        with self._sorting_errors("ask"):
            self._ask_for_put_if_absent()
        with self._sorting_errors("write to", is_put=True):
            return self._create(record_name(number), record)

    def numbers(self) -> Sequence[int]:
        with self._sorting_errors("list"):
            objects = obstore.list_with_delimiter(self._store)["objects"]
        names = (entry["path"] for entry in objects)
        return sorted(number for name in names if (number := record_number(name)) is not None)

    def read(self, number: int) -> bytes | None:
        with self._sorting_errors("read from"):
            try:
                return bytes(obstore.get(self._store, record_name(number)).bytes())
            except FileNotFoundError:
                return None

    def delete(self, numbers: Sequence[int]) -> None:
        names = [record_name(number) for number in numbers]
        with self._sorting_errors("delete from"):
            try:
                obstore.delete(self._store, names)
            except FileNotFoundError:
                # Some stores stop at the first name that is empty already.
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, name)

    def close(self) -> None:
        """Connections belong to the library's own pool."""

    def _create(self, name: str, content: bytes) -> bool:
        try:
            # One request: a multipart upload would not carry the condition.
            obstore.put(self._store, name, content, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if _CONFLICT in str(error):
                raise  # two puts met; the slot may still be empty
            return False
        return True

    def _ask_for_put_if_absent(self) -> None:
        if self._refuses_second_put:
            return
        if self._create(PROBE, b"") and self._create(PROBE, b""):
            raise Misconfigured(
                f"the object store of {self.place} overwrites where it was asked to put if absent",
                hint="use a server that honours If-None-Match on PUT, or keep the epoch log "
                "elsewhere: a folder, or sqlite:///path",
            )
        self._refuses_second_put = True

    @contextmanager
    def _sorting_errors(self, verb: str, *, is_put: bool = False) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            # The library's own message would follow as the cause, with all that was cut out of it.
            raise self._sorted(error, verb, is_put=is_put) from None
        self._has_answered = True

    def _sorted(self, error: Exception, verb: str, *, is_put: bool) -> EpochalError:
        fact = f"cannot {verb} the epoch log {self.place}: {first_line(str(error))}"
        return sorted_error(error, fact, is_put=is_put, has_answered=self._has_answered)


def open_store(url: str) -> ObjectStore:
    """The object store at a URL; credentials and endpoints come from the usual variables."""
    try:
        return from_url(url, client_options=_client_options(), retry_config=_retries())
    except (BaseError, ValueError) as error:
        raise Misconfigured(
            f"no object store opens at {without_secrets(url)}: {first_line(str(error))}",
            hint="s3://bucket/folder, gs://bucket/folder or "
            "abfss://container@account.dfs.core.windows.net/folder",
        ) from None


def sorted_error(
    error: Exception, fact: str, *, is_put: bool = False, has_answered: bool = False
) -> EpochalError:
    """What an object store said, as an error of ours, by what the caller may do next."""
    told = first_line(str(error))
    if any(sign in told for sign in _NO_CREDENTIALS):
        # Nothing was sent. Where it worked before, the machine's role is only out of reach now.
        kind = TryAgain if has_answered else Misconfigured
        return kind(fact, hint=_CREDENTIALS_HINT)
    for sign, hint in _FOR_A_PERSON.items():
        if sign in told:
            return Misconfigured(fact, hint)
    return OutcomeUnknown(fact) if is_put else TryAgain(fact)


def _client_options() -> ClientConfig:
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=_REQUEST_TIMEOUT_S),
    }
    endpoints = (os.environ.get(name, "") for name in _ENDPOINT_VARIABLES)
    if any(endpoint.startswith("http://") for endpoint in endpoints):
        options["allow_http"] = True
    return options


def _retries() -> RetryConfig:
    return {
        "max_retries": _RETRIES_MAX,
        "retry_timeout": timedelta(seconds=_RETRY_TIMEOUT_S),
    }
