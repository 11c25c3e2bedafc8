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
        raise TryAgain(f"{doing}: {error}") from error
