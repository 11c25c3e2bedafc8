"""Staging where rows that their columns can't hold are kept too, for the sink that gets them.

A load does not stop at such a row: it changes the value, and warns with the row's number. So every
row is loaded under a number of its own; those that the server warned of are taken out again, and
stand below 0 as text, with the reason. They are durable with the others, and nothing is applied
from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.rejects import row_text, too_many
from epochal.kit.sql.writing import whole_column
from epochal.sinks.mysql.connecting import Link
from epochal.sinks.mysql.dialect import DIALECT
from epochal.sinks.mysql.types import TEXT
from epochal.sinks.mysql.writer import AT_ROW, StagedWriter, load_statement, rows_of

_WARNINGS_MAX = 65_535
"""More than this no server lists."""


class KeepingWriter(StagedWriter):
    _numbering: ClassVar[str] = ""
    """Rows bring their numbers along."""
    _kept_rows = 0

    def _columns(self) -> list[tuple[str, str]]:
        text = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        return [*super()._columns(), *((name, text) for name in UNFIT)]

    def _begin(self, connection: Link) -> None:
        self._run(connection, f"SET SESSION max_error_count = {_WARNINGS_MAX}")
        super()._begin(connection)

    def _send(self, block: pa.Table, first: int) -> None:
        link = self._get_ready()
        reasons = self._unfit(block)
        places = [place for place in range(block.num_rows) if place not in reasons]
        if places:
            fitting = block.take(places) if reasons else block
            reasons |= self._load(link, fitting, [first + place for place in places], first)
        if reasons:
            self._keep(link, block, first, reasons)

    def _unfit(self, block: pa.Table) -> dict[int, str]:
        """Rows, by their places, whose values the server would change without a word."""
        reasons: dict[int, str] = {}
        for one in self._plan:
            values = whole_column(block.column(one.arrives_as))
            for bad, why in self._unfitting(one, values):
                for place in pc.indices_nonzero(pc.fill_null(bad, False)).to_pylist():
                    value = values[place].as_py()
                    reasons.setdefault(place, f'field "{one.arrives_as}" is {value}: {why}')
        return reasons

    def _load(
        self, link: Link, rows: pa.Table, numbers: Sequence[int], first: int
    ) -> dict[int, str]:
        """Load rows under these numbers of this task; the places of those that did not fit."""
        going = self._going()
        at = pa.array([number + 1 for number in numbers], pa.int64())
        data = rows_of([at.cast(TEXT), *(self._converted(one, rows, first) for one, _ in going)])
        columns = [(DIALECT.at, None), *((name, one.expression) for one, name in going)]
        statement = load_statement(self._place(), columns)
        arrived, warnings = self._sorted("load", lambda: link.load(statement, data))
        if arrived != rows.num_rows:
            raise self._refused(link, rows, first, arrived)
        if not warnings:
            return {}
        told = self._warned(link, rows, first)
        changed = ", ".join(str(numbers[place] + 1) for place in told)
        take_out = f"DELETE FROM {self._place()} WHERE {DIALECT.quote(DIALECT.at)} IN ({changed})"
        self._sorted("take unfit rows out", lambda: self._run(link, take_out))
        return {numbers[place] - first: why for place, why in told.items()}

    def _warned(self, link: Link, rows: pa.Table, first: int) -> dict[int, str]:
        """What the server says of each row that it changed, by its place in the load."""
        with link.cursor() as cursor:
            cursor.execute("SHOW WARNINGS")
            listed = cursor.fetchall()
        reasons: dict[int, str] = {}
        for _, number, words in listed:
            told, found = f"{AT_ROW.sub('', words)} [{number}]", AT_ROW.search(words)
            if found is None or len(listed) >= _WARNINGS_MAX:
                place = None if found is None else int(found[1]) - 1
                raise self._refusal(rows, place, first, told)
            reasons.setdefault(int(found[1]) - 1, told)
        return reasons

    def _keep(self, link: Link, block: pa.Table, first: int, reasons: Mapping[int, str]) -> None:
        places = sorted(reasons)
        fields = [one.arrives_as for one in self._plan]
        texts = [row_text(row) for row in block.select(fields).take(places).to_pylist()]
        limit = self._sink.rejects_max
        self._kept_rows += len(places)
        if self._kept_rows > limit:
            shown = f"row {texts[0]}: {reasons[places[0]]}"
            raise too_many(self._where(), self._sink.table, limit, shown)
        names = ", ".join(map(DIALECT.quote, (DIALECT.at, *UNFIT)))
        statement = f"INSERT INTO {self._place()} ({names}) VALUES (%s, %s, %s)"
        rows = [
            (-(first + place) - 1, text, reasons[place])
            for place, text in zip(places, texts, strict=True)
        ]

        def insert() -> None:
            with link.cursor() as cursor:
                cursor.executemany(statement, rows)

        self._sorted("keep unfit rows", insert)
