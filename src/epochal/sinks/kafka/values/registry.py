"""`Registry`: a schema registry; `RegistryValue`: what Avro and Protobuf values have in common.

Only the driver asks it: tasks get the id. Answers are kept for the life of the process, since an id
never changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from epochal.errors import Misconfigured, TryAgain, not_installed
from epochal.kit.secrets import HeldSecret, Secret
from epochal.sinks.kafka.values import gathered, struct_sql, written

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

MAGIC = b"\x00"
_TIMEOUT_S = 10
_RETRIES = 2
_RETRY_WAIT_MS = (50, 500)
_ANSWERS_MAX = 256
_NOT_FOUND, _CONFLICT, _UNPROCESSABLE, _SERVER_FAULT = 404, 409, 422, 500
_ADDRESS = "registry=… names its address: is this a schema registry?"
_NO_RIGHT = (401, 403)

Answer = TypeVar("Answer")
AskRegistry: TypeAlias = "Callable[[SchemaRegistryClient, bool], Answer]"
"""Asks about a schema; the second argument is whether it may be registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """One registry, or several addresses of it with commas between. Opens nothing by itself."""

    url: str
    username: str | None = None
    password: Secret | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        for address in self.url.split(","):
            parts = urlsplit(address.strip())
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise Misconfigured(
                    "the schema registry's address is not a URL of http or https",
                    'registry="http://host:8081"',
                )
            if parts.username or parts.password:
                raise Misconfigured(
                    f"the address of the schema registry at {parts.hostname} holds a name or a "
                    "password, and would be shown with it",
                    'username="…", password=env("REGISTRY_PASSWORD")',
                )

    @contextmanager
    def client(self, about: str) -> Iterator[SchemaRegistryClient]:
        """A client for the length of a block; its errors are raised as ours."""
        types = _client_types()
        client = types.client(self._settings())
        try:
            with client:
                yield client
        except types.refusal as error:
            raise self._error_for(error, about) from error
        except Exception as error:
            if not _is_unanswered(error):
                raise
            raise TryAgain(
                f"the schema registry at {self.url} can't be reached for the schema {about}: "
                f"{str(error) or type(error).__name__}",
                "registry=… names its address; is it running?",
            ) from error

    def _settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "url": self.url,
            "timeout": _TIMEOUT_S,
            "max.retries": _RETRIES,
            "retries.wait.ms": _RETRY_WAIT_MS[0],
            "retries.max.wait.ms": _RETRY_WAIT_MS[1],
        }
        if self.username is not None:
            secret = "" if self.password is None else self.password.reveal()
            found["basic.auth.user.info"] = f"{self.username}:{secret}"
        given = {
            "ssl.ca.location": self.ca_file,
            "ssl.certificate.location": self.certificate_file,
            "ssl.key.location": self.key_file,
        }
        return found | {name: value for name, value in given.items() if value is not None}

    def _error_for(self, error: Any, about: str) -> Misconfigured | TryAgain:
        status, message = error.http_status_code, error.error_message
        place = f"the schema registry at {self.url}"
        if status in _NO_RIGHT:
            return Misconfigured(
                f"{place} denies access to the schema {about}: {message} (HTTP {status})",
                'username="…", password=env(…), with the right to read and to write the subject',
            )
        if status == _NOT_FOUND:
            return Misconfigured(
                f"{place} does not know the schema {about}: {message}",
                # Without a code of its own it is another server's answer.
                _ADDRESS if error.error_code < 0 else "register it first, or auto_register=True",
            )
        if status == _CONFLICT:
            return Misconfigured(
                f"{place} refuses the schema {about} as incompatible with earlier ones: {message}",
                "keep to the subject's compatibility, or name another subject=",
            )
        if status == _UNPROCESSABLE:
            return Misconfigured(
                f"{place} refuses the schema {about} as invalid: {message}", "correct the schema"
            )
        if status >= _SERVER_FAULT:
            return TryAgain(f"{place} failed for the schema {about}: {message} (HTTP {status})")
        return Misconfigured(
            f"{place} refused the schema {about}: {message} (HTTP {status})", _ADDRESS
        )


def _is_unanswered(error: Exception) -> bool:
    """By name: releases of the client differ in the HTTP library that they raise it from."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def registry_at(
    url: str, username: str | None, password: Secret | str | None, **files: str | None
) -> Registry:
    secret = HeldSecret(password) if isinstance(password, str) else password
    return Registry(url=url, username=username, password=secret, **files)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryValue:
    """Columns as one record whose schema is in a registry."""

    columns: tuple[str, ...]
    registry: Registry
    subject: str | None
    auto_register: bool

    def __str__(self) -> str:
        return written(type(self).__name__.lower(), self.columns)

    def sql(self) -> str:
        return struct_sql(self.columns)

    def gather(self, rows: pa.RecordBatch) -> pa.Array:
        return gathered(rows, self.columns)

    def check(self, schema: pa.Schema) -> None:
        """Types are checked by `ready`, which has the registry's schema."""

    def subject_of(self, topic: str) -> str:
        return self.subject or f"{topic}-value"

    def registered(self, subject: str, schema: Hashable, ask: AskRegistry[Answer]) -> Answer:
        """The answer about a schema, registered where that is allowed; asked once per process."""
        key = (self.registry, subject, self.auto_register, schema)
        if key not in _answers:
            if len(_answers) >= _ANSWERS_MAX:
                _answers.clear()
            with self.registry.client(f"of {subject}") as client:
                _answers[key] = ask(client, self.auto_register)
        found: Answer = _answers[key]
        return found

    def tried(
        self, subject: str, ask: AskRegistry[Answer], new_schema: Callable[[], Any] | None
    ) -> Answer | None:
        """
        The same without registering anything; None where the schema is new and would be accepted.
        `new_schema` makes it, or None where it must be there.
        """
        about = f"of {subject}"
        try:
            with self.registry.client(about) as client:
                return ask(client, False)
        except Misconfigured as error:
            is_new = getattr(error.__cause__, "http_status_code", None) == _NOT_FOUND
            if not (self.auto_register and new_schema is not None and is_new):
                raise
        schema = new_schema()
        if schema is not None:
            with self.registry.client(about) as client:
                _require_compatible(client, subject, schema, about)
        return None


_answers: dict[Any, Any] = {}


def _require_compatible(
    client: SchemaRegistryClient, subject: str, schema: Any, about: str
) -> None:
    """Raise where a schema would be refused, without registering it."""
    types = _client_types()
    try:
        is_taken = client.test_compatibility(subject, schema)
    except types.refusal as error:
        if error.http_status_code == _NOT_FOUND:
            return  # the first of its subject
        raise
    if not is_taken:
        raise Misconfigured(
            f"the schema {about} is incompatible with the latest of its subject",
            "keep to the subject's compatibility, or name another subject=",
        )


@dataclass(frozen=True, slots=True)
class _ClientTypes:
    client: Any
    refusal: type[SchemaRegistryError]


def _client_types() -> _ClientTypes:
    try:
        from confluent_kafka.schema_registry import (  # noqa: PLC0415  on the driver only
            SchemaRegistryClient,
            SchemaRegistryError,
        )
    except ImportError as error:
        raise missing(error) from error
    return _ClientTypes(SchemaRegistryClient, SchemaRegistryError)


def missing(error: ImportError) -> Misconfigured:
    return not_installed("values with a schema registry", error.name, "registry")
