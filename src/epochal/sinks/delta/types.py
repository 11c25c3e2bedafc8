"""Columns of a Delta table and fields of the rows: which column takes which field, if it can.

delta-rs does not compare the schema of files that it adds with the table's, nor does it check what
a table demands of its rows. So all of it is done here, before the first row, or refused with the
reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema

from epochal.errors import Misconfigured, Problems
from epochal.kit.engine_files import sql_name
from epochal.kit.sink_base import cast_hint
from epochal.storage.urls import first_line

Kind: TypeAlias = "str | Mapping[str, Any]"
"""A type as the log writes it: a name, or an object with its parts."""

_WIDER = {
    "byte": ("short", "integer", "long"),
    "short": ("integer", "long"),
    "integer": ("long",),
    "float": ("double",),
}
_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")
_GENERATED = "delta.generationExpression"
_NAME_IN_FILES = "delta.columnMapping.physicalName"
MAPPING = "delta.columnMapping.mode"
_VARCHAR = re.compile(r"varchar\((\d+)\)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    kind: Kind
    is_nullable: bool
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a table demands of each of its rows: an expression that must be true."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How the fields that arrive fit a table."""

    written: tuple[str, ...]
    """Fields that a column takes."""
    wider: Mapping[str, str]
    """Fields that are cast to the column's wider type, with its Arrow name."""
    absent: Mapping[str, str]
    """Columns that no field fills, with their types where these are simple."""
    generated: Mapping[str, str]
    """Columns that follow from others, as SQL of Spark."""
    casts: Mapping[str, str]
    """Fields that are cast to the column's wider type, as SQL of Spark."""
    new: tuple[str, ...]
    """Fields for which the table has no column yet."""
    not_null: tuple[str, ...]
    rules: tuple[Rule, ...]


def columns_of(schema: DeltaSchema) -> dict[str, Column]:
    return {
        one["name"]: Column(
            name=one["name"],
            kind=one["type"],
            is_nullable=one["nullable"],
            metadata=one.get("metadata", {}),
        )
        for one in json.loads(schema.to_json())["fields"]
    }


def generated_columns(table: DeltaTable) -> dict[str, str]:
    """Columns that follow from others, as SQL of Spark."""
    return {
        name: f"CAST(({column.metadata[_GENERATED]}) AS {column.kind})"
        for name, column in columns_of(table.schema()).items()
        if _GENERATED in column.metadata
    }


def columns_digest(table: DeltaTable) -> str:
    """What changes when a table gets other columns, or columns of other types."""
    kinds = {
        name: [
            _plain(column.kind),
            column.is_nullable,
            column.metadata.get(_GENERATED),
            _names_in_files(column),
        ]
        for name, column in columns_of(table.schema()).items()
    }
    described = json.dumps([kinds, table.metadata().configuration.get(MAPPING)], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def misfit(
    written: pa.Schema,
    table: DeltaTable,
    *,
    partition: Mapping[str, str | None],
    nulls: Collection[str],
) -> str | None:
    """
    Why readers of a table, as it is now, can't read a file; None where they can. Columns that were
    added or taken away since are no reason: readers know columns by name. Where somebody has made
    the table map names meanwhile, that is the name in files; or they know them by number.
    """
    if table.metadata().configuration.get(MAPPING) == "id":
        return f"readers know columns by number now ({MAPPING}=id)"
    fields = columns_of(delta_schema(written))
    types = pa.schema(table.schema())
    for name, column in columns_of(table.schema()).items():
        if name in partition:
            if not _is_text_of(partition[name], types.field(name).type):
                return f"its partition column {name!r} is {_type_text(column.kind)} now"
        elif why := _field_misfit(fields.get(name), column):
            return why
        if (name in partition or name in fields) and _names_in_files(column):
            return f"its column {name!r} has another name in files now ({MAPPING}=name)"
        if not column.is_nullable and (name in nulls or partition.get(name, "") is None):
            return f"its column {name!r} takes no null any more"
    return None


def _field_misfit(field: Column | None, column: Column) -> str | None:
    if field is None:
        is_needed = not column.is_nullable
        return f"it lacks column {column.name!r}, which takes no null" if is_needed else None
    if _plain(field.kind) != _plain(column.kind):
        return f"its column {column.name!r} is {_type_text(column.kind)} now"
    return None


def _names_in_files(column: Column) -> list[str]:
    """Of a column and of the fields within it, as far as these are not their own."""
    itself = {"name": column.name, "metadata": column.metadata}
    found = [
        (one["name"], one.get("metadata", {}).get(_NAME_IN_FILES))
        for one in (itself, *_fields_in(column.kind))
    ]
    return [in_files for name, in_files in found if in_files not in (None, name)]


def _fields_in(kind: Kind) -> Iterator[Mapping[str, Any]]:
    if isinstance(kind, str):
        return
    for part in ("elementType", "keyType", "valueType"):
        yield from _fields_in(kind.get(part, ""))
    for field in kind.get("fields", ()):
        yield field
        yield from _fields_in(field["type"])


def _is_text_of(text: str | None, kind: pa.DataType) -> bool:
    try:
        pa.array([text], pa.string()).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def delta_schema(schema: pa.Schema) -> DeltaSchema:
    """The fields in Delta's types, or the reason why one has none."""
    seen: dict[str, pa.Field] = {}
    for column in schema:
        first = seen.setdefault(column.name.lower(), column)
        if first is not column:
            raise Misconfigured(
                f"columns {first.name!r} and {column.name!r} have one name: Delta does not go by "
                "upper and lower case",
                'rename one: select=["a", "b AS other"]',
            )
        if why := _type_refusal(column.type):
            fact = f"column {column.name!r} is {column.type}: {why}"
            raise Misconfigured(fact, "cast it in the query")
        try:
            DeltaSchema.from_arrow(pa.schema([column]))
        except Exception as error:
            raise Misconfigured(
                f"column {column.name!r} is {column.type}, which Delta does not have: "
                f"{first_line(str(error))}",
                'leave it out or cast it: select=["…"]',
            ) from error
    return DeltaSchema.from_arrow(schema)


def _type_refusal(kind: pa.DataType) -> str | None:
    """Why values of a type, or inside of one, would not come back; deltalake takes them all."""
    if pa.types.is_unsigned_integer(kind):
        # It takes them for signed ones: with one that is too large nobody can read the table.
        return "Delta has no unsigned numbers"
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return "nanoseconds need a feature of the table that this sink does not write"
    if pa.types.is_null(kind):
        return "a column of nothing but nulls has no type"
    if isinstance(kind, pa.BaseExtensionType):
        return "readers of Delta know no types of others"
    inside = (kind.field(place).type for place in range(kind.num_fields))
    return next((why for inner in inside if (why := _type_refusal(inner))), None)


def fit(
    schema: pa.Schema, table: DeltaTable, *, deciding: frozenset[str], problems: Problems
) -> Fit:
    """Match what arrives with a table. `deciding` fields need no column of their own."""
    fields = columns_of(delta_schema(schema))
    columns = columns_of(table.schema())
    types = pa.schema(table.schema())
    by_lower = {name.lower(): name for name in columns}
    wider, casts = {}, {}
    for name, one in fields.items():
        column = columns.get(name)
        if column is None:
            if name not in deciding and name.lower() in by_lower:
                problems.add(
                    f"field {name!r} arrives, and the table has {by_lower[name.lower()]!r}",
                    "rename it in the query: names must be equal, case included",
                )
            continue
        if why := _mismatch(one.kind, column.kind):
            problems.add(
                f"column {name!r} is {_type_text(column.kind)} and {_type_text(one.kind)} "
                f"arrives{why.rstrip()}",
                cast_hint(name, _spark_type(column.kind)),
            )
        elif _plain(one.kind) != _plain(column.kind):
            wider[name] = str(types.field(name).type)
            casts[name] = f"CAST({sql_name(name)} AS {column.kind})"
    generated = generated_columns(table)
    absent = [
        column for name, column in columns.items() if name not in fields and name not in generated
    ]
    for column in absent:
        _require_may_be_absent(column, problems)
    _require_computable(generated, fields, absent, casts, problems)
    _require_no_others_values(columns.values(), problems)
    return Fit(
        written=tuple(name for name in fields if name in columns),
        wider=wider,
        absent={column.name: column.kind for column in absent if isinstance(column.kind, str)},
        generated=generated,
        casts=casts,
        new=tuple(name for name in fields if name.lower() not in by_lower and name not in deciding),
        not_null=tuple(name for name, column in columns.items() if not column.is_nullable),
        rules=_rules(table.metadata().configuration, columns.values()),
    )


def _mismatch(arrives: Kind, column: Kind) -> str | None:
    """Why a field can't go into a column; an empty reason is the types themselves."""
    if isinstance(arrives, str) or isinstance(column, str):
        return None if arrives == column or _is_wider(arrives, column) else " "
    if _plain(arrives) != _plain(column):
        return " "
    if _may_be_null(arrives) - _may_be_null(column):
        return ", with nulls inside where the table allows none"
    return None


def _is_wider(arrives: Kind, column: Kind) -> bool:
    if not isinstance(arrives, str) or not isinstance(column, str):
        return False
    ours, theirs = _DECIMAL.fullmatch(arrives), _DECIMAL.fullmatch(column)
    if ours and theirs:
        digits = int(theirs[1]) - int(theirs[2]) - (int(ours[1]) - int(ours[2]))
        return digits >= 0 and int(theirs[2]) >= int(ours[2])
    return column in _WIDER.get(arrives, ())


def _plain(kind: Kind) -> Any:
    """A type without its nullability and metadata."""
    if isinstance(kind, str):
        return kind
    skipped = ("nullable", "containsNull", "valueContainsNull", "metadata")
    return {
        key: [_plain(one) for one in value] if isinstance(value, list) else _plain(value)
        for key, value in kind.items()
        if key not in skipped
    }


def _may_be_null(kind: Kind, at: str = "") -> set[str]:
    """The places inside a nested type where a null may be."""
    if isinstance(kind, str):
        return set()
    found: set[str] = set()
    for flag, inner in (("containsNull", "elementType"), ("valueContainsNull", "valueType")):
        if kind.get(flag):
            found.add(f"{at}.{flag}")
        if inner in kind:
            found |= _may_be_null(kind[inner], f"{at}.{inner}")
    for one in kind.get("fields", ()):
        where = f"{at}.{one['name']}"
        found |= {where} if one["nullable"] else set()
        found |= _may_be_null(one["type"], where)
    return found


def _require_may_be_absent(column: Column, problems: Problems) -> None:
    if not column.is_nullable:
        problems.add(
            f"column {column.name!r} is NOT NULL, and no field fills it", 'select=["*", "… AS …"]'
        )
    if "CURRENT_DEFAULT" in column.metadata:
        problems.add(
            f"column {column.name!r} has a default, which is not applied here, and no field fills "
            "it",
            'give the default yourself: select=["*", "… AS …"]',
        )


def _require_computable(
    generated: Mapping[str, str],
    fields: Collection[str],
    absent: Collection[Column],
    casts: Collection[str],
    problems: Problems,
) -> None:
    """Generated columns are computed by Spark, of fields as they arrive."""
    for name, sql in generated.items():
        if name in fields:
            problems.add(
                f"column {name!r} is generated by the table, and a field of this name arrives",
                "leave it out with select=",
            )
        for missing in (column.name for column in absent if _names(sql, column.name)):
            problems.add(
                f"column {name!r} is generated from {missing!r}, and no field fills it",
                f'select=["*", "… AS {missing}"]',
            )
        for narrow in (field for field in casts if _names(sql, field)):
            problems.add(
                f"column {name!r} is generated from {narrow!r}, which arrives in a narrower type",
                cast_hint(narrow, "…"),
            )


def _names(sql: str, column: str) -> bool:
    """Whether SQL has the name of a column in it."""
    return re.search(rf"(?<!\w){re.escape(column)}(?!\w)", sql, re.IGNORECASE) is not None


def _require_no_others_values(columns: Any, problems: Problems) -> None:
    for column in columns:
        if any(key.startswith("delta.identity.") for key in column.metadata):
            problems.add(
                f"column {column.name!r} is an identity column: delta-spark's own commits keep "
                "count of its values, and deltalake commits to no table that has one",
                "write through a table without identity columns",
            )
        written = str(column.metadata.get("__CHAR_VARCHAR_TYPE_STRING", ""))
        if written and not _VARCHAR.fullmatch(written):
            problems.add(
                f"column {column.name!r} is {written}, whose padding nothing here does",
                "use STRING or VARCHAR columns",
            )


def _rules(configuration: Mapping[str, str], columns: Any) -> tuple[Rule, ...]:
    prefix = "delta.constraints."
    found = [
        Rule(name=key.removeprefix(prefix), expression=value)
        for key, value in configuration.items()
        if key.startswith(prefix)
    ]
    for column in columns:
        invariant = column.metadata.get("delta.invariants")
        if invariant:
            expression = json.loads(invariant)["expression"]["expression"]
            found.append(Rule(name=f"invariant of {column.name}", expression=expression))
        varchar = _VARCHAR.fullmatch(str(column.metadata.get("__CHAR_VARCHAR_TYPE_STRING", "")))
        if varchar:
            name = column.name.replace('"', '""')
            limit = f'coalesce(char_length("{name}") <= {varchar[1]}, true)'
            found.append(Rule(name=f"length of {column.name}", expression=limit))
    return tuple(found)


def _spark_type(kind: Kind) -> str:
    """As Spark's cast names it; nested types have other names there."""
    return kind if isinstance(kind, str) else "…"


def _type_text(kind: Kind) -> str:
    return kind if isinstance(kind, str) else json.dumps(_plain(kind))
