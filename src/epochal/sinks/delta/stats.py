"""
What a file's entry in the log says of its values: rows, nulls, the least and the greatest.

Readers skip files by it, so it must never claim too little: a value that can't be told exactly is
left out, or rounded outwards. Nulls are counted of every column, as NOT NULL is judged by them.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from epochal.terms import Json

_TEXT_MAX = 32
_DIGITS_MAX = 15
"""Decimal digits that a JSON number carries whatever reads it."""
_GREATEST = "\U0010ffff"


class Statistics:
    """Gathered while one file is written."""

    def __init__(self, schema: pa.Schema, columns_max: int) -> None:
        self._told = [field.name for field in schema if not pa.types.is_nested(field.type)]
        self._told = self._told[:columns_max]
        self._floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        self._has_nan: set[str] = set()
        self.rows = 0
        self.nulls = dict.fromkeys(schema.names, 0)

    def take(self, rows: pa.Table) -> None:
        self.rows += rows.num_rows
        for name in self.nulls:
            self.nulls[name] += rows.column(name).null_count
        for name in self._floats:
            # Readers order NaN above all numbers, and parquet's statistics pass over it.
            if name not in self._has_nan and pc.any(pc.is_nan(rows.column(name))).as_py():
                self._has_nan.add(name)

    def told(self, footer: pq.FileMetaData) -> str:
        """As the log wants it, from the footer that the writer closed the file with."""
        least: dict[str, Json] = {}
        greatest: dict[str, Json] = {}
        for name, groups in _by_column(footer).items():
            if name not in self._told or name in self._has_nan:
                continue
            bounds = _bounds(groups)
            if bounds is None:
                continue
            low, high = _told_low(bounds[0]), _told_high(bounds[1])
            if low is not None and high is not None:
                least[name], greatest[name] = low, high
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": least,
                "maxValues": greatest,
                "nullCount": {name: self.nulls[name] for name in self._told},
            }
        )


def _by_column(footer: pq.FileMetaData) -> Mapping[str, Sequence[Any]]:
    """The statistics of each top-level column, one of every row group."""
    found: dict[str, list[Any]] = {}
    for group in range(footer.num_row_groups):
        rows = footer.row_group(group)
        for column in range(rows.num_columns):
            chunk = rows.column(column)
            found.setdefault(chunk.path_in_schema, []).append(chunk.statistics)
    return found


def _bounds(groups: Sequence[Any]) -> tuple[Any, Any] | None:
    """The least and greatest of all row groups; None where one of them does not say."""
    told = [group for group in groups if group is not None and group.has_min_max]
    silent = [group for group in groups if group is None or not group.has_min_max]
    if not told or any(group is None or group.num_values for group in silent):
        return None
    try:
        return min(group.min for group in told), max(group.max for group in told)
    except (ValueError, OverflowError, TypeError):
        return None  # a year that Python has no date for


def _told_low(value: Any) -> Json:
    if isinstance(value, str):
        return value[:_TEXT_MAX]
    return _told(value)


def _told_high(value: Any) -> Json:
    if isinstance(value, str):
        if len(value) <= _TEXT_MAX:
            return value
        is_topped = value[_TEXT_MAX] != _GREATEST
        return value[:_TEXT_MAX] + _GREATEST if is_topped else None
    return _told(value)


def _told(value: Any) -> Json:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if abs(value) != float("inf") else None
    if isinstance(value, decimal.Decimal):
        return float(value) if len(value.as_tuple().digits) <= _DIGITS_MAX else None
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return f"{text}Z" if value.tzinfo else text
    return value.isoformat() if isinstance(value, dt.date) else None
