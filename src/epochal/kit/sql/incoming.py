"""The rows that will come, as a start knows them: their fields, and which columns take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from epochal.kit.sql.columns import columns_of, steering_fields
from epochal.kit.sql.declaring import TableSink

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming(Generic[S]):
    sent: Mapping[str, S]
    """How each field travels."""
    sink: TableSink

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key."""
        columns = self._created()
        return tuple(columns.get(key, key) for key in self.sink.write_mode.keys)

    def created(self) -> dict[str, S]:
        """The columns of a table of our making, with what each takes."""
        return {column: self.sent[field] for field, column in self._created().items()}

    def missing(self, there: Collection[str]) -> dict[str, S]:
        """The columns that the table lacks, with what each is to take."""
        wanted = columns_of(self.sent, there, self.sink.column_map, self.sink.write_mode)
        return {column: self.sent[field] for field, column in wanted.items() if column not in there}

    def written(self, there: Collection[str]) -> frozenset[str]:
        """The columns of the table that rows fill."""
        wanted = columns_of(self.sent, there, self.sink.column_map, self.sink.write_mode)
        return frozenset(wanted.values())

    def _created(self) -> dict[str, str]:
        names, columns, mode = list(self.sent), self.sink.column_map, self.sink.write_mode
        if columns is not None:
            return {name: column for name, column in columns.items() if name in names}
        only_steers = steering_fields(names, mode) if mode.delete_when else ()
        return {name: name for name in names if name not in only_steers or name in mode.order_by}
