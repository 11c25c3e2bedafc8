"""Errors of pyiceberg and its catalogs, as ours, which say what the caller may do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyiceberg import exceptions as iceberg

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.local import disk_hint
from epochal.storage.urls import first_line

Scrub = Callable[[str], str]

_ABSENT = (iceberg.NoSuchTableError, iceberg.NoSuchNamespaceError, iceberg.NoSuchIdentifierError)
_DENIED = (iceberg.UnauthorizedError, iceberg.ForbiddenError, iceberg.OAuthError, iceberg.SignError)
_BUSY = (
    iceberg.ServiceUnavailableError,
    iceberg.TooManyRequestsError,
    iceberg.WaitingForLockException,
    iceberg.CommitFailedException,
)
_UNREADABLE = "does not yet support equality deletes"
"""In the error of pyiceberg where it reads a table that has some."""
_INSTALL_HINT = (
    "install it for the driver and for executors; a SQL catalog also needs its database's client"
)
_AWS_SETTINGS = frozenset(
    {
        "NoRegionError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "InvalidRegionError",
    }
)
"""Errors of botocore before a request: it may not be installed."""
_AWS_HINT = (
    "properties={'glue.region': …, 'glue.access-key-id': env(…), …}, or AWS's own configuration on "
    "the driver and on executors"
)
_TRANSPORT = ("requests.", "urllib3.", "sqlalchemy.", "thrift.", "botocore.", "sqlite3.", "psycopg")
"""Modules whose errors are a catalog's connection failing, of any kind of catalog."""
_AWAY = "check the catalog's properties, 'uri' first of all, and that its server is up"


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
    fact = f"{doing}: {first_line(scrub(f'{type(error).__name__}: {error}'))}"
    if (hint := _what_to_change(error)) is not None:
        return Misconfigured(fact, hint)
    if isinstance(error, _BUSY):
        return TryAgain(fact)
    if isinstance(error, OSError) or _is_catalog(error):
        hint = disk_hint(error) or (_AWAY if _is_catalog(error) else "")
        return OutcomeUnknown(fact, hint) if is_commit else TryAgain(fact, hint)
    return None


def _what_to_change(error: Exception) -> str | None:
    """The hint where only a person can help; None of every other error."""
    hints = (
        (isinstance(error, _ABSENT), "create the table first, with its columns and partitions"),
        (isinstance(error, _DENIED), "see the guide for the least rights that this sink needs"),
        (isinstance(error, iceberg.NotInstalledError), _INSTALL_HINT),
        (type(error).__name__ in _AWS_SETTINGS, _AWS_HINT),
        (
            _UNREADABLE in str(error),
            "mode='append' reads none; or have another engine merge them into the data files "
            "(rewrite_data_files with delete-file-threshold=1)",
        ),
        (
            isinstance(error, PermissionError),
            "the table's location must be readable, writable and listable",
        ),
    )
    return next((hint for is_so, hint in hints if is_so), None)


def _is_catalog(error: Exception) -> bool:
    """Whether it is the answer of a catalog, or that there was none."""
    return isinstance(error, iceberg.RESTError) or any(
        kind.__module__.startswith(_TRANSPORT) for kind in type(error).__mro__
    )


def _shown(error: Exception, scrub: Scrub) -> Exception | None:
    """The cause, unless its text would show a secret."""
    text = str(error)
    return error if scrub(text) == text else None
