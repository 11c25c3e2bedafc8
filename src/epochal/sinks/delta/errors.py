"""Errors of deltalake, as ours, which say what the caller may do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from epochal.errors import EpochalError, Misconfigured, TryAgain

_CATALOG_MANAGED = "catalog-managed"
"""In the error of deltalake's kernel where it opens such a table; it has no class of its own."""


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Raise one of our errors instead of deltalake's, but for a refused commit and no table."""
    try:
        yield
    except (EpochalError, TableNotFoundError, CommitFailedError):
        raise
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise Misconfigured(
            f"{doing}: {error}", "the table asks for what deltalake can't do"
        ) from error
    except (DeltaError, OSError) as error:
        if _CATALOG_MANAGED in str(error):
            raise Misconfigured(
                f"{doing}: a catalog manages the table (the feature catalogManaged, as Unity "
                "Catalog has it): its versions are decided there, and deltalake can't take part",
                "a table without that feature (ALTER TABLE … DROP FEATURE catalogManaged), or one "
                "at a location of its own",
            ) from error
        raise TryAgain(f"{doing}: {error}") from error
