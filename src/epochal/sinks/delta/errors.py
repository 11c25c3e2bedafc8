"""Errors of deltalake, as ours, which say what the caller may do next."""

from __future__ import annotations

import re
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
from epochal.storage.urls import first_line

_CATALOG_MANAGED = "catalog-managed"
"""In the error of deltalake's kernel where it opens such a table; it has no class of its own."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m|↳")
_CREDENTIALS = (
    "credentials come from storage_options (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, …) or the "
    "environment, for the driver and for executors; they need list, get, put and delete here"
)
_FOR_A_PERSON = {
    "401 Unauthorized": _CREDENTIALS,
    "403 Forbidden": _CREDENTIALS,
    "169.254.169.254": _CREDENTIALS,
    "NoSuchBucket": "the bucket must exist: it is never created",
    "scheme is not allowed": 'storage_options={"AWS_ALLOW_HTTP": "true"} for a server without TLS',
}
"""By the text of the answer, as deltalake gives all of them one class."""
_NO_ANSWER = "error sending request"
_AWAY = "check AWS_ENDPOINT_URL and AWS_REGION in storage_options, and the network"


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Raise one of our errors instead of deltalake's, but for a refused commit and no table."""
    try:
        yield
    except (EpochalError, TableNotFoundError, CommitFailedError):
        raise
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise Misconfigured(
            f"{doing}: {plain_text(error)}", "the table asks for what deltalake can't do"
        ) from error
    except (DeltaError, OSError) as error:
        if _CATALOG_MANAGED in str(error):
            raise Misconfigured(
                f"{doing}: a catalog manages the table (the feature catalogManaged, as Unity "
                "Catalog has it): its versions are decided there, and deltalake can't take part",
                "a table without that feature (ALTER TABLE … DROP FEATURE catalogManaged), or one "
                "at a location of its own",
            ) from error
        fact = f"{doing}: {plain_text(error)}"
        for sign, hint in _FOR_A_PERSON.items():
            if sign in str(error):
                # The cause would follow with all that was cut out of it.
                raise Misconfigured(fact, hint) from None
        raise TryAgain(fact, _AWAY if _NO_ANSWER in str(error) else "") from None


def plain_text(error: Exception) -> str:
    """A message of deltalake in one line, without colours, secrets and the request itself."""
    return first_line(" ".join(_COLOURS.sub("", str(error)).split()))
