"""What a catalog throws, sorted by what the caller may do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyiceberg import exceptions as iceberg

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain

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
"""Modules whose errors come from the way to a catalog, whichever one is in use."""


@contextmanager
def sorting(doing: str, *, scrub: Scrub, is_commit: bool = False) -> Iterator[None]:
    """
    Turn what pyiceberg throws into one of ours.

    Of a commit, anything but a clear refusal may have happened: its answer was perhaps lost.
    """
    try:
        yield
    except EpochalError:
        raise
    except Exception as error:
        sorted_ = _sorted(error, doing, scrub, is_commit=is_commit)
        if sorted_ is None:
            raise
        raise sorted_ from _shown(error, scrub)


def _sorted(error: Exception, doing: str, scrub: Scrub, *, is_commit: bool) -> EpochalError | None:
    fact = f"{doing}: {scrub(f'{type(error).__name__}: {error}')}"
    if isinstance(error, _ABSENT):
        return Misconfigured(fact, "make the table first, with the columns and partitions you want")
    if isinstance(error, _DENIED):
        return Misconfigured(fact, "see the guide for the least rights that this sink needs")
    if isinstance(error, PermissionError):
        return Misconfigured(fact, "the table's location must be readable, writable and listable")
    if isinstance(error, _BUSY):
        return TryAgain(fact)
    if isinstance(error, (iceberg.RESTError, OSError)) or _is_transport(error):
        return OutcomeUnknown(fact) if is_commit else TryAgain(fact)
    return None


def _is_transport(error: Exception) -> bool:
    return any(kind.__module__.startswith(_TRANSPORT) for kind in type(error).__mro__)


def _shown(error: Exception, scrub: Scrub) -> Exception | None:
    """The cause, unless its text would show a secret."""
    told = str(error)
    return error if scrub(told) == told else None
