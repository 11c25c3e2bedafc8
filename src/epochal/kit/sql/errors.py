"""Classification of a database's errors by what the caller may do next.

The code decides, never the text, which may be translated. An error of the network has a meaning of
its own: where it answers a COMMIT the outcome is unknown (I9), anywhere else nothing happened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, TypeAlias

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, RowRejected, TryAgain

Code: TypeAlias = int | str
"""A number of the vendor's, or an SQLSTATE."""
GRANTS = "`epochal grants PIPELINE` prints the least privileges that the sink needs"
BAD_ROWS = (
    "correct the row in the query, drop it with where=, or send such rows elsewhere: "
    "on_reject=<sink>"
)


class ErrorTable(ABC):
    """The errors of one database, by their codes."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """What the database's library raises."""
    duplicate: ClassVar[Collection[Code]]
    missing: ClassVar[Collection[Code]]
    """There is no such schema or table."""
    exists: ClassVar[Collection[Code]] = frozenset()
    """There is such a table already; needed where CREATE knows no IF NOT EXISTS."""
    lock_waits: ClassVar[Collection[Code]]
    deadlocks: ClassVar[Collection[Code]]
    not_prepared: ClassVar[Collection[Code]]
    """There is no prepared transaction of this name, or another session still holds it."""
    transient: ClassVar[Collection[Code]]
    data: ClassVar[Collection[Code]]
    """The server refuses the rows themselves: another attempt would be refused, too."""
    corrupt: ClassVar[Collection[Code]] = frozenset()
    """The server finds its own files damaged."""
    hints: ClassVar[Mapping[Code, str]]

    @abstractmethod
    def code_of(self, error: BaseException) -> Code:
        """The server's code; 0 or empty where the error did not come from the server."""

    @abstractmethod
    def is_network(self, error: BaseException) -> bool: ...

    @abstractmethod
    def text_of(self, error: BaseException) -> str:
        """The server's message, in one line, with its code."""

    def sqlstate(self, error: BaseException) -> str:
        """The standard's code, where the library reports it."""
        return str(getattr(error, "sqlstate", None) or "")

    def is_one_of(self, error: BaseException, codes: Collection[Code]) -> bool:
        return self.code_of(error) in codes

    def is_duplicate(self, error: BaseException) -> bool:
        return self.is_one_of(error, self.duplicate)

    def is_data_error(self, error: BaseException) -> bool:
        return self.is_one_of(error, self.data) and not self.is_one_of(error, self.transient)

    def may_be_rows(self, error: BaseException) -> bool:
        """
        Whether a row may have caused it. Locks, connections, resources and deadlines never are a
        row's fault; of any other error the code does not tell, as triggers raise what they like.
        """
        passing = (*self.transient, *self.corrupt)
        return not self.is_network(error) and not self.is_one_of(error, passing)

    def is_lock_wait(self, error: BaseException) -> bool:
        return self.is_one_of(error, self.lock_waits)

    def is_deadlock(self, error: BaseException | None) -> bool:
        """Whether somebody else's transaction was preferred: it has passed by now."""
        return error is not None and self.is_one_of(error, self.deadlocks)

    def is_missing(self, error: BaseException) -> bool:
        return self.is_one_of(error, self.missing)

    def is_not_prepared(self, error: BaseException) -> bool:
        return self.is_one_of(error, self.not_prepared)

    def is_from_database(self, error: BaseException) -> bool:
        """Raised by the server or a library of its client, not by our code."""
        return isinstance(error, self.errors)

    def hint(self, error: BaseException) -> str:
        return self.hints.get(self.code_of(error), "")

    def classify(self, error: Exception, doing: str, *, is_commit: bool = False) -> EpochalError:
        """The same error as one of ours. `is_commit`: a lost reply leaves the outcome unknown."""
        if isinstance(error, EpochalError):
            return error
        fact, hint = f"{doing}: {self.text_of(error)}", self.hint(error)
        if self.is_network(error):
            return (OutcomeUnknown if is_commit else TryAgain)(fact, hint)
        if self.is_one_of(error, self.transient):
            return TryAgain(fact, hint)
        if self.is_data_error(error):
            return RowRejected(fact, hint or BAD_ROWS)
        return Misconfigured(fact, hint or "the server refuses this for good: its message says why")

    @contextmanager
    def classified(self, doing: str, *, is_commit: bool = False) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            raise self.classify(error, doing, is_commit=is_commit) from error
