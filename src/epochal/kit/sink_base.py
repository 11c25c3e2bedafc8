"""What every declared sink has in common: a name, and which rows and columns it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from epochal.contract import APPEND_ONLY, Select, Sink
from epochal.errors import Misconfigured
from epochal.terms import SinkName


@dataclass(frozen=True, kw_only=True)
class SinkBase(ABC):
    """The part of a sink's declaration that does not depend on its target."""

    kind: ClassVar[str]

    name: SinkName = SinkName("")
    """Unique within a pipeline; kind and target where it is not given."""
    where: str | None = None
    """A SQL condition: the rows this sink takes."""
    select: Select = None
    """SQL expressions or a function of the DataFrame: the columns this sink takes."""

    def __post_init__(self) -> None:
        if isinstance(self.select, str):
            raise Misconfigured(
                f"{self.kind}: select={self.select!r} is one string, not a list of expressions",
                f"select=[{self.select!r}]",
            )
        if not self.name:
            object.__setattr__(self, "name", SinkName(f"{self.kind}:{self.target}"))

    @property
    @abstractmethod
    def target(self) -> str:
        """Where the rows go, for names and messages. Never a secret."""

    @property
    def output_modes(self) -> frozenset[str]:
        return APPEND_ONLY

    @property
    def prepares_last(self) -> bool:
        return False

    @property
    def rejects_to(self) -> Sink | None:
        return None

    @property
    def transaction_key(self) -> str | None:
        return None
