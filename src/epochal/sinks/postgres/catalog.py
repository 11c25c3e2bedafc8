"""The server's catalog: a table with its columns and unique indexes, and what lies below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epochal.kit.sql.client import Session
from epochal.kit.sql.names import TableName
from epochal.sinks.postgres.dialect import DIALECT
from epochal.sinks.postgres.types import Column, Table, Type, UniqueIndex

KINDS_WRITTEN = {"r": "table", "p": "partitioned table", "v": "view", "f": "foreign table"}
_KINDS = {
    **KINDS_WRITTEN,
    "m": "materialized view",
    "S": "sequence",
    "c": "composite type",
    "i": "index",
}
BELOW = """
WITH RECURSIVE below(oid) AS (
  SELECT {table}::oid
  UNION
  SELECT x.oid FROM below b CROSS JOIN LATERAL (
    SELECT i.inhrelid FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = b.oid AND (c.relispartition OR {children})
    UNION ALL
    SELECT d.refobjid FROM pg_rewrite r JOIN pg_depend d
      ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
      AND d.refclassid = 'pg_class'::regclass
    WHERE r.ev_class = b.oid AND r.ev_type = '1' AND d.refobjid <> b.oid) x(oid))
SELECT c.oid::regclass::text, c.relkind, c.relpersistence
FROM below JOIN pg_class c USING (oid) WHERE c.relkind IN ('r', 'f') ORDER BY 1
"""
"""Partitions, tables below views, and, where rows change or go, children by inheritance."""
SEQUENCES = """
SELECT d.refobjid::regclass::text, a.attname FROM pg_attrdef v
JOIN pg_attribute a ON a.attrelid = v.adrelid AND a.attnum = v.adnum
JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = v.oid
  AND d.refclassid = 'pg_class'::regclass
JOIN pg_class c ON c.oid = d.refobjid AND c.relkind = 'S'
WHERE v.adrelid = {table}
  AND CASE WHEN c.relkind = 'S' THEN NOT has_sequence_privilege(c.oid, 'USAGE') END
"""
"""Sequences that this role may not use, and the columns that they number."""
_FIND = """
SELECT c.oid, n.nspname, c.relname, c.relkind, NOT (row_security_active(c.oid) OR c.relhasrules)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = {}
"""
_COLUMNS = """
SELECT a.attname, format_type(b.oid, -1), format_type(b.oid, b.typmod), b.typname, b.typcategory,
       b.typtype = 'e', a.attnotnull OR nn.is_strict, a.atthasdef, a.attidentity <> '',
       a.attidentity = 'a', a.attgenerated <> '', e.typname, e.typcategory, b.typmod,
       CASE WHEN c.collname <> 'default' THEN format('%I.%I', n.nspname, c.collname) ELSE '' END,
       b.typtype = 'b' AND b.typcategory <> 'A' AND NOT pg_type_is_visible(b.oid)
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
CROSS JOIN LATERAL (
  WITH RECURSIVE under(oid, typtype, typbasetype, typtypmod, typmod) AS (
    SELECT oid, typtype, typbasetype, typtypmod, a.atttypmod FROM pg_type WHERE oid = a.atttypid
    UNION ALL
    SELECT p.oid, p.typtype, p.typbasetype, p.typtypmod, u.typtypmod
    FROM under u JOIN pg_type p ON p.oid = u.typbasetype WHERE u.typtype = 'd')
  SELECT p.*, u.typmod FROM under u JOIN pg_type p USING (oid) WHERE u.typtype <> 'd') b
CROSS JOIN LATERAL (SELECT t.typtype = 'd' AND t.typnotnull AS is_strict) nn
LEFT JOIN pg_type e ON e.oid = b.typelem AND b.typcategory = 'A'
LEFT JOIN pg_collation c ON c.oid = a.attcollation
LEFT JOIN pg_namespace n ON n.oid = c.collnamespace
WHERE a.attrelid = {} AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_UNIQUE = """
SELECT i.indexrelid::regclass::text, i.indisunique, i.indisexclusion, i.indimmediate,
       i.indpred IS NULL AND i.indexprs IS NULL AND i.indisvalid AND i.indrelid = {table},
       ARRAY(SELECT a.attname FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
             WHERE k.place <= i.indnkeyatts ORDER BY k.place)::text[]
FROM pg_index i
WHERE (i.indisunique OR i.indisexclusion) AND (i.indrelid = {table}
   OR i.indrelid IN (SELECT relid FROM pg_partition_tree({table})))
ORDER BY i.indrelid <> {table}, i.indisprimary DESC, 1
"""

BASIS = """
SELECT md5(concat_ws('/', c.oid, c.relkind,
  (SELECT string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attcollation,
                               a.attnotnull OR t.typnotnull, a.atthasdef, a.attidentity,
                               a.attgenerated), ',' ORDER BY a.attnum)
   FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
   WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
  (SELECT string_agg(concat_ws(' ', i.indexrelid, i.indkey, i.indnkeyatts, i.indisunique,
                               i.indisexclusion, i.indimmediate, i.indisvalid,
                               i.indpred IS NULL AND i.indexprs IS NULL), ',' ORDER BY i.indexrelid)
   FROM pg_index i WHERE i.indrelid = c.oid),
  CASE WHEN c.relkind = 'p' AND EXISTS (SELECT FROM pg_foreign_table)
   THEN (SELECT string_agg(f.ftrelid::text, ',' ORDER BY f.ftrelid)
         FROM pg_partition_tree(c.oid) p JOIN pg_foreign_table f ON f.ftrelid = p.relid) END))
FROM pg_class c WHERE c.oid = {table}
"""
"""
Everything that can change in what the queries above find of a table and decides a statement, and
its partitions on other servers.
"""


def read_table(session: Session, name: TableName) -> Table | None:
    """The table of this name, found by the server's search path where no schema is given."""
    return _table(session.query_all(_table_queries(name)))


def read_with_staged(
    session: Session, name: TableName, staging: str
) -> tuple[Table | None, dict[str, Column]]:
    """The same, and the columns of a staging table, whose name is quoted."""
    *found, staged = session.query_all(
        [*_table_queries(name), _COLUMNS.format(f"to_regclass({DIALECT.literal(staging)})")]
    )
    return _table(found), _by_name(staged)


def _table_queries(name: TableName) -> list[str]:
    oid = f"to_regclass({DIALECT.literal(DIALECT.quote(*name.parts))})"
    return [_FIND.format(oid), _COLUMNS.format(oid), _UNIQUE.format(table=oid)]


def _table(read: Sequence[Sequence[Any]]) -> Table | None:
    found, columns, unique = read
    if not found:
        return None
    ((oid, schema, table, kind, takes_copies),) = found
    return Table(
        oid=oid,
        schema=schema,
        name=table,
        kind=_KINDS.get(kind, kind),
        takes_copies=takes_copies,
        columns=_by_name(columns),
        unique=_unique(unique),
    )


def _by_name(rows: Sequence[Sequence[Any]]) -> dict[str, Column]:
    columns = map(_column, rows)
    return {column.name: column for column in columns}


def _column(row: Sequence[Any]) -> Column:
    (name, written, full, base, category, is_enum, is_not_null, has_default, is_identity) = row[:9]
    (is_always, is_generated, element, element_category, typmod, collation, is_unseen) = row[9:]
    return Column(
        name=name,
        type=Type(
            written=written,
            full=full,
            base=element or base,
            category=element_category or category,
            is_array=element is not None,
            typmod=typmod,
            collation=collation or "",
            is_unseen=is_unseen,
        ),
        is_enum=is_enum,
        is_not_null=is_not_null,
        has_default=has_default,
        is_numbered=is_identity,
        is_always_identity=is_always,
        is_generated=is_generated,
    )


def _unique(rows: Sequence[Sequence[Any]]) -> tuple[UniqueIndex, ...]:
    return tuple(
        UniqueIndex(
            name=name,
            columns=tuple(columns),
            is_exclusion=not is_unique or is_exclusion,
            is_immediate=is_immediate,
            is_plain=is_plain,
        )
        for name, is_unique, is_exclusion, is_immediate, is_plain, columns in rows
    )
