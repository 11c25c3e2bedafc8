"""What a server's or its library's error means for what we may do next.

The number decides, never the text. What came from the network is told apart: where it met a COMMIT
nobody knows what became of it (I9), anywhere else nothing did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, RowRejected, TryAgain


class Faults(ABC):
    """The errors of one database, by their numbers."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """What the database's library raises."""
    duplicate: ClassVar[int]
    missing: ClassVar[frozenset[int]]
    lock_waits: ClassVar[frozenset[int]]
    not_prepared: ClassVar[frozenset[int]]
    transient: ClassVar[frozenset[int]]
    data: ClassVar[frozenset[int]]
    hints: ClassVar[Mapping[int, str]]

    @abstractmethod
    def number_of(self, error: BaseException) -> int:
        """The server's number for it; 0 where it did not come from the server."""

    @abstractmethod
    def is_network(self, error: BaseException) -> bool: ...

    @abstractmethod
    def told(self, error: BaseException) -> str:
        """The server's own words, in one line, with its number for the error."""

    def hint(self, error: BaseException) -> str:
        return self.hints.get(self.number_of(error), "")

    def is_duplicate(self, error: BaseException) -> bool:
        return self.number_of(error) == self.duplicate

    def is_data_error(self, error: BaseException) -> bool:
        """The server refuses what is in the rows, whoever asks and however often."""
        return self.number_of(error) in self.data

    def is_lock_wait(self, error: BaseException) -> bool:
        return self.number_of(error) in self.lock_waits

    def is_missing(self, error: BaseException) -> bool:
        """There is no such schema or table."""
        return self.number_of(error) in self.missing

    def is_not_prepared(self, error: BaseException) -> bool:
        """There is no prepared transaction of this name, or none that may be ended yet."""
        return self.number_of(error) in self.not_prepared

    def sqlstate(self, error: BaseException) -> str:
        """The standard's code for it, where the library tells it."""
        return str(getattr(error, "sqlstate", None) or "")

    def sort(self, error: Exception, doing: str, *, is_commit: bool = False) -> EpochalError:
        """The same error as one of ours. `is_commit`: a lost reply leaves the outcome open."""
        if isinstance(error, EpochalError):
            return error
        fact, hint = f"{doing}: {self.told(error)}", self.hint(error)
        if self.is_network(error):
            return (OutcomeUnknown if is_commit else TryAgain)(fact, hint)
        if self.number_of(error) in self.transient:
            return TryAgain(fact, hint)
        if self.is_data_error(error):
            return RowRejected(fact, hint)
        return Misconfigured(fact, hint)

    @contextmanager
    def sorting(self, doing: str, *, is_commit: bool = False) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            raise self.sort(error, doing, is_commit=is_commit) from error
