"""Errors of pyiceberg and its catalogs, as ours, which say what the caller may do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyiceberg import exceptions as iceberg

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.local import disk_hint

Scrub = Callable[[str], str]

_ABSENT = (iceberg.NoSuchTableError, iceberg.NoSuchNamespaceError, iceberg.NoSuchIdentifierError)
_DENIED = (iceberg.UnauthorizedError, iceberg.ForbiddenError, iceberg.OAuthError, iceberg.SignError)
_BUSY = (
    iceberg.ServiceUnavailableError,
    iceberg.TooManyRequestsError,
    iceberg.WaitingForLockException,
    iceberg.CommitFailedException,
)
_TRANSPORT = ("requests.", "urllib3.", "sqlalchemy.", "thrift.", "botocore.", "sqlite3.", "psycopg")
"""Modules whose errors are a catalog's connection failing, of any kind of catalog."""


@contextmanager
def translate_errors(doing: str, *, scrub: Scrub, is_commit: bool = False) -> Iterator[None]:
    """
    Raise one of our errors instead of pyiceberg's.

    Of a commit, anything but a clear refusal leaves the outcome unknown: the reply may be lost.
    """
    try:
        yield
    except EpochalError:
        raise
    except Exception as error:
        translated = _translated(error, doing, scrub, is_commit=is_commit)
        if translated is None:
            raise
        raise translated from _shown(error, scrub)


def _translated(
    error: Exception, doing: str, scrub: Scrub, *, is_commit: bool
) -> EpochalError | None:
    fact = f"{doing}: {scrub(f'{type(error).__name__}: {error}')}"
    if isinstance(error, _ABSENT):
        return Misconfigured(fact, "create the table first, with its columns and partitions")
    if isinstance(error, _DENIED):
        return Misconfigured(fact, "see the guide for the least rights that this sink needs")
    if isinstance(error, PermissionError):
        return Misconfigured(fact, "the table's location must be readable, writable and listable")
    if isinstance(error, _BUSY):
        return TryAgain(fact)
    if isinstance(error, (iceberg.RESTError, OSError)) or _is_transport(error):
        hint = disk_hint(error)
        return OutcomeUnknown(fact, hint) if is_commit else TryAgain(fact, hint)
    return None


def _is_transport(error: Exception) -> bool:
    return any(kind.__module__.startswith(_TRANSPORT) for kind in type(error).__mro__)


def _shown(error: Exception, scrub: Scrub) -> Exception | None:
    """The cause, unless its text would show a secret."""
    text = str(error)
    return error if scrub(text) == text else None
