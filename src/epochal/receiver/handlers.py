"""Handlers: a user's function that gets rows inside the transaction that commits them."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from epochal.errors import Misconfigured


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedCommit:
    """
    One committed transaction, for a handler.

    What the handler writes through `connection` is committed together with the proof: exactly once.
    Anything else it does may be repeated, also by a rehearsal that is rolled back. It must not
    begin, commit or roll back. An exception in a rehearsal fails the epoch before its decision; a
    later one is answered with 500, and the commit is tried again.
    """

    connection: sqlite3.Connection
    txn: str
    pipeline: str
    sink: str
    run: str | None
    epoch: int
    rows: Callable[[], Iterator[dict[str, Any]]]
    """The rows as dicts, read one part at a time."""


Handler = Callable[[ReceivedCommit], object]


def load_handler(name: str) -> Handler:
    """The function that `module:function` names, also from the working directory."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise Misconfigured(f"--handler {name} names no function", "module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise Misconfigured(f"--handler {name}: {error}", "name an importable function") from error
    if not callable(found):
        raise Misconfigured(f"--handler {name} is not a function", "module:function")
    handler: Handler = found
    return handler


@contextmanager
def without_transactions(connection: sqlite3.Connection) -> Iterator[None]:
    """Within it BEGIN, COMMIT and ROLLBACK are refused: only the receiver may use them."""
    connection.set_authorizer(
        lambda action, *_: (
            sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_TRANSACTION else sqlite3.SQLITE_OK
        )
    )
    try:
        yield
    finally:
        connection.set_authorizer(None)
