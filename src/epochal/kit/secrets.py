"""Secrets: values that say where they are kept, and are read where they are used.

A declared sink is pickled to executors and printed in logs, so it carries the place of a secret and
not the secret: `env` and `file` are read anew at every connection, also after the password was
changed. A function is called there: for tokens that expire. A password that was written into a URL
is carried, for there is nowhere else to find it, and never shown.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from epochal.errors import EpochalError, Misconfigured, TryAgain


@dataclass(frozen=True, slots=True)
class EnvironmentSecret:
    """The value of an environment variable, of whichever process opens the connection."""

    variable: str

    def reveal(self) -> str:
        try:
            return os.environ[self.variable]
        except KeyError:
            raise Misconfigured(
                f"the environment variable {self.variable}, named as a secret, is not set",
                "it is read on the driver and on every executor: Spark passes it on with "
                f"spark.executorEnv.{self.variable}, or keep the secret in a file(path)",
            ) from None


@dataclass(frozen=True, slots=True)
class FileSecret:
    """The content of a file, without the newline at its end."""

    path: str

    def reveal(self) -> str:
        try:
            return Path(self.path).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise Misconfigured(
                f"the file {self.path}, named as a secret, can't be read: {error.strerror}",
                "it is read on the driver and on every executor: it must be at this path on each",
            ) from None


@dataclass(frozen=True, slots=True)
class HeldSecret:
    """A secret that was given as plain text: it travels with the sink, and its repr hides it."""

    _value: str = field(repr=False)

    def reveal(self) -> str:
        return self._value


class CalledSecret:
    """What a function returns, called at every connection, of whichever process opens it."""

    def __init__(self, function: Callable[[], str]) -> None:
        self._function = function
        self._last = ""
        try:
            self._pickled = pickle.dumps(function)
        except Exception as error:  # noqa: BLE001  picklers of other types raise anything
            raise Misconfigured(
                f"the function that is to return a secret can't be pickled: {type(error).__name__}",
                "it is called on the driver and on every executor: define it in a module, by def",
            ) from None

    def reveal(self) -> str:
        try:
            secret = self._function()
        except EpochalError:
            raise
        except Exception as error:  # noqa: BLE001  a vault that is away, or whatever it raises
            # Its message may quote what it was given.
            raise TryAgain(
                f"{self!r}, which is to return a secret, raised {type(error).__name__}",
                "call it yourself to see why; it is called for each new connection",
            ) from None
        if not isinstance(secret, str):
            raise Misconfigured(
                f"{self!r} returned a {type(secret).__name__}, not a str",
                "password= takes a function without arguments that returns the password or token",
            )
        self._last = secret
        return secret

    @property
    def last(self) -> str:
        """What it returned the last time in this process, to be taken out of messages."""
        return self._last

    def __repr__(self) -> str:
        named = getattr(self._function, "__qualname__", type(self._function).__name__)
        return f"CalledSecret({named})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CalledSecret) and self._pickled == other._pickled

    def __hash__(self) -> int:
        return hash(self._pickled)

    def __reduce__(self) -> tuple[type[CalledSecret], tuple[Callable[[], str]]]:
        return CalledSecret, (self._function,)


Secret: TypeAlias = EnvironmentSecret | FileSecret | HeldSecret | CalledSecret


def env(variable: str) -> EnvironmentSecret:
    """A secret in an environment variable."""
    return EnvironmentSecret(variable)


def file(path: str | os.PathLike[str]) -> FileSecret:
    """A secret in a file."""
    return FileSecret(os.fspath(path))
