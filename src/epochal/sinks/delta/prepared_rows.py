"""SQL on prepared files, before any reader sees a row: by the engine inside deltalake.

Files of an object store are copied to a temporary folder first. A local file is reached through a
link with a plain name, as the engine would take `%` in a path for an escape.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import QueryBuilder

from epochal.sinks.delta.table_files import TableFiles

_EXACT_NAMES = {"datafusion.sql_parser.enable_ident_normalization": "false"}
_SQL_TYPES = {
    "string": "VARCHAR",
    "long": "BIGINT",
    "integer": "INT",
    "short": "SMALLINT",
    "byte": "TINYINT",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "float": "REAL",
    "double": "DOUBLE",
    "binary": "BYTEA",
    "timestamp": "TIMESTAMP WITH TIME ZONE",
    "timestamp_ntz": "TIMESTAMP",
}
ROWS = "epochal_rows"
PARTITIONS_MAX = 100
"""Of one query: with some thousand DataFusion's stack overflows, which ends the process."""


class PreparedRows:
    """The rows of some files, as the table `epochal_rows`."""

    def __init__(self, engine: QueryBuilder) -> None:
        self._engine = engine

    def reader(self, sql: str) -> Any:
        return self._engine.execute(sql)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pa.table(self.reader(sql).read_all()).to_pylist()
        return found


@contextmanager
def prepared_rows(
    table_files: TableFiles, files: Sequence[Mapping[str, Any]], missing: Mapping[str, str]
) -> Iterator[PreparedRows]:
    """
    Open files for queries. `missing` are columns that files lack, with their Delta types: those
    that are in the names of partition folders, and those that no task writes.
    """
    with tempfile.TemporaryDirectory(prefix="epochal-") as name:
        engine = QueryBuilder(_EXACT_NAMES)
        parts = []
        for number, (values, some) in enumerate(_by_partition(files)):
            folder = Path(name) / str(number)
            folder.mkdir()
            for at, file in enumerate(some):
                _link_or_copy(table_files, file["path"], folder / f"{at}.parquet")
            parts.append(_registered(engine, f"part{number}", folder, values, missing))
        _run(engine, f"CREATE VIEW {ROWS} AS {' UNION ALL '.join(parts)}")
        yield PreparedRows(engine)


@contextmanager
def no_rows(schema: pa.Schema) -> Iterator[PreparedRows]:
    """A table without rows, to learn whether an expression can be evaluated at all."""
    with tempfile.TemporaryDirectory(prefix="epochal-") as name:
        pq.write_table(schema.empty_table(), f"{name}/0.parquet")
        engine = QueryBuilder(_EXACT_NAMES)
        _run(engine, f"CREATE EXTERNAL TABLE {ROWS} STORED AS PARQUET LOCATION {text(name + '/')}")
        yield PreparedRows(engine)


def portions(files: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Files of some partitions at a time, as many as one query takes."""
    parts = [some for _, some in _by_partition(files)]
    for first in range(0, len(parts), PARTITIONS_MAX):
        yield [file for some in parts[first : first + PARTITIONS_MAX] for file in some]


def quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def text(value: str) -> str:
    escaped = value.replace("'", "''")
    return f"'{escaped}'"


def _by_partition(
    files: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, str | None], list[Mapping[str, Any]]]]:
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for file in files:
        found.setdefault(tuple(sorted(file["partition"].items())), []).append(file)
    return [(dict(values), some) for values, some in found.items()]


def _link_or_copy(files: TableFiles, relative: str, to: Path) -> None:
    if files.local is not None:
        to.symlink_to(files.local / relative)
        return
    with files.open(relative) as source, to.open("wb") as target:
        shutil.copyfileobj(source, target)


def _registered(
    engine: QueryBuilder,
    name: str,
    folder: Path,
    values: Mapping[str, str | None],
    missing: Mapping[str, str],
) -> str:
    _run(engine, f"CREATE EXTERNAL TABLE {name} STORED AS PARQUET LOCATION {text(f'{folder}/')}")
    added = [
        f"CAST({'NULL' if values.get(column) is None else text(str(values[column]))}"
        f" AS {_SQL_TYPES.get(kind, kind)}) AS {quoted(column)}"
        for column, kind in missing.items()
        if kind in _SQL_TYPES or kind.startswith("decimal(")
    ]
    return f"SELECT {', '.join(['*', *added])} FROM {name}"  # noqa: S608  names are quoted


def _run(engine: QueryBuilder, statement: str) -> None:
    engine.execute(statement).read_all()
