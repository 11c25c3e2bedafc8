"""`Registry`: a schema registry, and requests to it.

Only the driver asks it: tasks get the id. Answers are kept for the life of the process, since an id
never changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.secrets import HeldSecret, Secret

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

MAGIC = b"\x00"
_TIMEOUT_S = 10
_RETRIES = 2
_RETRY_WAIT_MS = (50, 500)
_ANSWERS_MAX = 256
_NOT_FOUND, _CONFLICT, _UNPROCESSABLE, _SERVER_FAULT = 404, 409, 422, 500
_NO_RIGHT = (401, 403)

Answer = TypeVar("Answer")


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
                f"the schema registry at {self.url} can't be reached {about}: "
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
                f"{place} denies access {about}: {message} (HTTP {status})",
                'username="…", password=env(…), with the right to read and to write the subject',
            )
        if status == _NOT_FOUND:
            return Misconfigured(
                f"{place} does not know the schema {about}: {message}",
                "register it first, or auto_register=True",
            )
        if status == _CONFLICT:
            return Misconfigured(
                f"{place} refuses the schema {about} as incompatible with earlier ones: {message}",
                "keep to the subject's compatibility, or name another subject=",
            )
        if status == _UNPROCESSABLE:
            return Misconfigured(f"{place} refuses the schema {about} as invalid: {message}")
        if status >= _SERVER_FAULT:
            return TryAgain(f"{place} failed {about}: {message} (HTTP {status})")
        return Misconfigured(f"{place} refused {about}: {message} (HTTP {status})")


def _is_unanswered(error: Exception) -> bool:
    """By name: releases of the client differ in the HTTP library that they raise it from."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def registry_at(
    url: str, username: str | None, password: Secret | str | None, **files: str | None
) -> Registry:
    secret = HeldSecret(password) if isinstance(password, str) else password
    return Registry(url=url, username=username, password=secret, **files)


def is_unknown_schema(error: Misconfigured | TryAgain) -> bool:
    """Whether the registry answered that it has no such schema."""
    cause = error.__cause__
    return getattr(cause, "http_status_code", None) == _NOT_FOUND


def require_compatible(client: SchemaRegistryClient, subject: str, schema: Any, about: str) -> None:
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


_answers: dict[Any, Any] = {}


def cached(key: Any, ask: Callable[[], Answer]) -> Answer:
    """An answer of the registry, asked once per process."""
    if key not in _answers:
        if len(_answers) >= _ANSWERS_MAX:
            _answers.clear()
        _answers[key] = ask()
    found: Answer = _answers[key]
    return found


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
    return Misconfigured(
        f"values with a schema registry need a package that is not installed: {error.name}",
        'pip install "epochal[registry]"',
    )
