"""The generated page about types: what columns of each database do with what arrives.

The tests of each database compare it with a real server: the catalog, and values at the edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypeAlias

import pyarrow as pa

from epochal.sinks.mysql import types as mysql
from epochal.sinks.oracle import types as oracle
from epochal.sinks.postgres import types as postgres

Verdict: TypeAlias = Literal["kept", "rounded", "refused"]

ARRIVING: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "decimal(6,0)": pa.decimal128(6, 0),
    "decimal(10,2)": pa.decimal128(10, 2),
    "decimal(38,18)": pa.decimal128(38, 18),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
    "array<int>": pa.list_(pa.int32()),
    "array<double>": pa.list_(pa.float64()),
    "array<string>": pa.list_(pa.string()),
    "struct": pa.struct([("a", pa.int32())]),
}
"""Spark's types, as they arrive."""


def _postgres(base: str, category: str, typmod: int = -1) -> postgres.Type:
    is_array = base.endswith("[]")
    base = base.removesuffix("[]")
    return postgres.Type(
        written=base, full=base, base=base, category=category, typmod=typmod, is_array=is_array
    )


_DIGITS_10_2 = (10 << 16 | 2) + 4
POSTGRES: Mapping[str, postgres.Type] = {
    "smallint": _postgres("int2", "N"),
    "integer": _postgres("int4", "N"),
    "bigint": _postgres("int8", "N"),
    "real": _postgres("float4", "N"),
    "double precision": _postgres("float8", "N"),
    "numeric": _postgres("numeric", "N"),
    "numeric(10,2)": _postgres("numeric", "N", _DIGITS_10_2),
    "money": _postgres("money", "N"),
    "boolean": _postgres("bool", "B"),
    "text": _postgres("text", "S"),
    "varchar(60)": _postgres("varchar", "S", 64),
    "char(60)": _postgres("bpchar", "S", 64),
    "name": _postgres("name", "S"),
    '"char"': _postgres("char", "Z"),
    "bytea": _postgres("bytea", "U"),
    "date": _postgres("date", "D"),
    "time": _postgres("time", "D"),
    "time(0)": _postgres("time", "D", 0),
    "timestamp": _postgres("timestamp", "D"),
    "timestamp(0)": _postgres("timestamp", "D", 0),
    "timestamptz": _postgres("timestamptz", "D"),
    "timestamptz(3)": _postgres("timestamptz", "D", 3),
    "interval": _postgres("interval", "T"),
    "interval(0)": _postgres("interval", "T", 0x7FFF << 16),
    "interval hour to minute": _postgres("interval", "T", 0xC00 << 16 | 0xFFFF),
    "uuid": _postgres("uuid", "U"),
    "inet": _postgres("inet", "I"),
    "bit(4)": _postgres("bit", "V", 4),
    "json": _postgres("json", "U"),
    "jsonb": _postgres("jsonb", "U"),
    "integer[]": _postgres("int4[]", "N"),
    "numeric(10,2)[]": _postgres("numeric[]", "N", _DIGITS_10_2),
    "text[]": _postgres("text[]", "S"),
}


def _mysql(ddl: str, scale: int = 0) -> mysql.Column:
    return mysql.Column(name="v", data_type=ddl.partition("(")[0].split()[0], ddl=ddl, scale=scale)


MYSQL: Mapping[str, mysql.Column] = {
    one.ddl: one
    for one in (
        *(_mysql("tinyint"), _mysql("smallint"), _mysql("int"), _mysql("bigint")),
        *(_mysql("float"), _mysql("double"), _mysql("decimal(10,2)", 2), _mysql("bit(8)")),
        *(_mysql("year"), _mysql("char(60)"), _mysql("varchar(60)"), _mysql("text")),
        *(_mysql("binary(4)"), _mysql("varbinary(60)"), _mysql("blob"), _mysql("date")),
        *(_mysql("time"), _mysql("time(6)", 6), _mysql("datetime"), _mysql("datetime(6)", 6)),
        *(_mysql("timestamp"), _mysql("timestamp(6)", 6), _mysql("enum('a','b')"), _mysql("json")),
    )
}


def _oracle(ddl: str, scale: int | None = None) -> oracle.Column:
    return oracle.Column(name="V", data_type=ddl.partition("(")[0], ddl=ddl, scale=scale)


ORACLE: Mapping[str, oracle.Column] = {
    one.ddl: one
    for one in (
        *(_oracle("NUMBER"), _oracle("NUMBER(10,2)", 2), _oracle("NUMBER(10,0)", 0)),
        *(_oracle("BINARY_FLOAT"), _oracle("BINARY_DOUBLE"), _oracle("VARCHAR2(60)")),
        *(_oracle("CLOB"), _oracle("RAW(60)"), _oracle("BLOB"), _oracle("DATE", 0)),
        *(_oracle("TIMESTAMP(6)", 6), _oracle("JSON")),
    )
}


def postgres_verdict(kind: pa.DataType, column: str) -> Verdict:
    sent = postgres.sent_as(kind)
    if isinstance(sent, str) or isinstance(
        postgres.cast_between(sent.type, POSTGRES[column]), postgres.Mismatch
    ):
        return "refused"
    return "rounded" if postgres.rounding(sent.type, POSTGRES[column]) else "kept"


def mysql_verdict(kind: pa.DataType, column: str) -> Verdict:
    sent, taking = mysql.sent_as(kind), MYSQL[column]
    if isinstance(sent, str) or isinstance(
        mysql.load_expression(sent, taking.data_type, taking.ddl, taking.scale), mysql.Mismatch
    ):
        return "refused"
    return "rounded" if mysql.rounding(sent, taking) else "kept"


def oracle_verdict(kind: pa.DataType, column: str) -> Verdict:
    sent, taking = oracle.sent_as(kind), ORACLE[column]
    if isinstance(sent, str) or oracle.mismatch(sent, taking.data_type, taking.scale):
        return "refused"
    return "rounded" if oracle.rounding(sent, taking) else "kept"


def parts() -> Iterator[str]:
    yield (
        "What a column of a database does with what arrives. **Keeps**: every value is stored as "
        "it is, or its row is refused: too long, out of range, text that can't be read as the "
        "column's type. **Rounds**: the column has fewer digits than may arrive; `check()` names "
        "the field and what the column keeps. Whatever is in neither list is refused at the start."
    )
    yield f"## PostgreSQL\n{_table(POSTGRES, postgres_verdict)}"
    yield (
        "Text is read as whatever its column is. What the column would drop refuses the row: a "
        "time of day for a `date`, a date for a `time`, a zone other than UTC for a `timestamp`. "
        "Domains are what they are made of; arrays are taken where their elements are. Blanks "
        "beyond the length of a `varchar(n)` are dropped, as in every INSERT."
    )
    yield f"## MySQL and MariaDB\n{_table(MYSQL, mysql_verdict)}"
    yield f"## Oracle\nBy its documentation, never run.\n\n{_table(ORACLE, oracle_verdict)}"


def _table(columns: Mapping[str, object], verdict: Callable[[pa.DataType, str], Verdict]) -> str:
    lines = ["| column | keeps | rounds |", "| --- | --- | --- |"]
    for column in columns:
        found = {name: verdict(kind, column) for name, kind in ARRIVING.items()}
        kept, rounded = (
            ", ".join(name for name, one in found.items() if one == wanted) or "–"
            for wanted in ("kept", "rounded")
        )
        lines.append(f"| `{column}` | {kept} | {rounded} |")
    return "\n".join(lines)
