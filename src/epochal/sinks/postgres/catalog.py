"""Reads a table from the server's catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epochal.kit.sql.client import Session
from epochal.kit.sql.names import TableName
from epochal.sinks.postgres.dialect import DIALECT
from epochal.sinks.postgres.plan import Column, Table, UniqueIndex
from epochal.sinks.postgres.types import Type

_KINDS_WRITTEN = {"r": "table", "p": "partitioned table", "v": "view", "f": "foreign table"}

_FIND = """
SELECT c.oid, n.nspname, c.relname, c.relkind, row_security_active(c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass({})
"""
_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, NULL), b.typname, b.typcategory, b.typtype = 'e',
       a.attnotnull OR nn.is_strict, a.atthasdef, a.attidentity <> '', a.attidentity = 'a',
       a.attgenerated <> '', e.typname, e.typcategory, t.typtype = 'd',
       CASE WHEN b.typname = 'numeric' AND a.atttypmod > 4 THEN (a.atttypmod - 4) & 2047 ELSE -1 END
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
CROSS JOIN LATERAL (
  WITH RECURSIVE under(oid, typtype, typbasetype) AS (
    SELECT oid, typtype, typbasetype FROM pg_type WHERE oid = a.atttypid
    UNION ALL
    SELECT p.oid, p.typtype, p.typbasetype FROM under u JOIN pg_type p ON p.oid = u.typbasetype
    WHERE u.typtype = 'd')
  SELECT p.* FROM under u JOIN pg_type p USING (oid) WHERE u.typtype <> 'd') b
CROSS JOIN LATERAL (SELECT t.typtype = 'd' AND t.typnotnull AS is_strict) nn
LEFT JOIN pg_type e ON e.oid = b.typelem AND b.typcategory = 'A'
WHERE a.attrelid = {} AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_UNIQUE = """
SELECT i.indexrelid::regclass::text, i.indisunique, i.indisexclusion, i.indimmediate,
       i.indpred IS NULL AND i.indexprs IS NULL AND i.indisvalid,
       ARRAY(SELECT a.attname FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
             WHERE k.place <= i.indnkeyatts ORDER BY k.place)::text[]
FROM pg_index i
WHERE (i.indisunique OR i.indisexclusion) AND (i.indrelid = {table}
   OR i.indrelid IN (SELECT relid FROM pg_partition_tree({table})))
ORDER BY i.indrelid <> {table}, i.indisprimary DESC, 1
"""


def read_table(session: Session, name: TableName) -> Table | None:
    """The table of this name, found by the server's search path where no schema is given."""
    found = session.query(_FIND.format(DIALECT.literal(DIALECT.quote(*name.parts))))
    if not found:
        return None
    ((oid, schema, table, kind, has_row_security),) = found
    return Table(
        oid=oid,
        schema=schema,
        name=table,
        kind=_KINDS_WRITTEN.get(kind, kind),
        has_row_security=has_row_security,
        columns=read_columns(session, str(oid)),
        unique=_unique(session, oid),
    )


def read_columns(session: Session, table: str) -> dict[str, Column]:
    """The columns of a table, given by its oid or as a `regclass`."""
    columns = [_column(row) for row in session.query(_COLUMNS.format(table))]
    return {column.name: column for column in columns}


def _column(row: Sequence[Any]) -> Column:
    (name, written, base, category, is_enum, is_not_null, has_default, is_identity) = row[:8]
    (is_always, is_generated, element, element_category, is_domain, scale) = row[8:]
    return Column(
        name=name,
        type=Type(
            written=written,
            base=element or base,
            category=element_category or category,
            is_array=element is not None,
            is_domain=is_domain,
            scale=max(scale, 0) if scale >= 0 else 1,
        ),
        is_enum=is_enum,
        is_not_null=is_not_null,
        has_default=has_default,
        is_identity=is_identity,
        is_always_identity=is_always,
        is_generated=is_generated,
    )


def _unique(session: Session, oid: int) -> tuple[UniqueIndex, ...]:
    return tuple(
        UniqueIndex(
            name=name,
            columns=tuple(columns),
            is_exclusion=not is_unique or is_exclusion,
            is_immediate=is_immediate,
            is_plain=is_plain,
        )
        for name, is_unique, is_exclusion, is_immediate, is_plain, columns in session.query(
            _UNIQUE.format(table=oid)
        )
    )
