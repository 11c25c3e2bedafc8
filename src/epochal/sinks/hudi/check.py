"""What is asked of a Hudi table and its Spark before the first row: settings, columns, types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.errors import Problems
from epochal.kit.engine_files import sql_name
from epochal.sinks.hudi.client import FOR_PEOPLE, HudiClient, TableKeys
from epochal.terms import Ability

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_BY_ORDER = "EVENT_TIME_ORDERING"
_KEY_GENERATORS = (
    "SimpleKeyGenerator",
    "ComplexKeyGenerator",
    "NonpartitionedKeyGenerator",
)
ONLY_LISTS = Ability(
    name="commit",
    granted=False,
    because="this process has no Spark session in classic mode, and only Hudi's client in Spark's "
    f"JVM reads and commits: what is prepared is listed; {FOR_PEOPLE}",
)


def abilities(client: HudiClient, target: str) -> Sequence[Ability]:
    lock = client.options["hoodie.write.lock.provider"].rpartition(".")[2]
    return (
        Ability(
            name="whole epochs",
            granted=True,
            because=f"{target} is {client.table_type}: an epoch is one commit, under {lock}",
        ),
        Ability(
            name="other writers",
            granted=True,
            because="as long as they have hoodie.clean.failed.writes.policy=LAZY and the same "
            "lock: with Hudi's default, EAGER, the start of their commit rolls back what is "
            "prepared here, and the epoch is written again",
        ),
    )


def columns(schema: pa.Schema | None, table: StructType, target: str) -> Mapping[str, str]:
    """
    The table's columns, each as SQL over those of the rows. Raises where the rows have others than
    the table, or of other types.
    """
    if schema is None:
        return {}
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415  importable without it

    wanted = to_arrow_schema(table)
    problems = Problems()
    for name in schema.names:
        if name not in wanted.names:
            problems.add(f"it has no column {name}", f"ALTER TABLE … ADD COLUMN {name}, or select=")
    found: dict[str, str] = {}
    for column, field in zip(wanted, table.fields, strict=True):
        kind = field.dataType.simpleString()
        if column.name not in schema.names:
            if not field.nullable:
                problems.add(f"column {column.name} is required, and rows have none", "select=[…]")
            found[column.name] = f"CAST(NULL AS {kind})"
            continue
        arrives = schema.field(column.name).type
        if not _is_same(arrives, column.type):
            problems.add(
                f"column {column.name} is {kind}, and {arrives} arrives",
                f'select=["CAST({sql_name(column.name)} AS {kind}) AS {sql_name(column.name)}", …]',
            )
        found[column.name] = sql_name(column.name)
    problems.raise_if_any(f"the Hudi table at {target}")
    return found


def required(table: StructType) -> list[str]:
    return [field.name for field in table.fields if not field.nullable]


def require_keys(schema: pa.Schema | None, keys: TableKeys, target: str) -> None:
    """Raise where rows can't be replaced by their key in this table."""
    problems = Problems()
    if not keys.record:
        problems.add("it has no key", "primaryKey in TBLPROPERTIES, or mode='append'")
    if not keys.order or keys.merge_mode != _BY_ORDER:
        problems.add(
            f"it has no order of rows with one key (its merge mode is {keys.merge_mode})",
            "preCombineField in TBLPROPERTIES: the row with the higher value is kept",
        )
    if keys.generator not in _KEY_GENERATORS:
        problems.add(
            f"its key generator is {keys.generator}, which was never tried here",
            f"one of {', '.join(_KEY_GENERATORS)}",
        )
    if not keys.is_stored:
        problems.add(
            "its rows are stored without their keys (hoodie.populate.meta.fields=false)",
            "a table with them, or mode='append'",
        )
    if keys.has_change_log:
        problems.add(
            "it has a change log (hoodie.table.cdc.enabled), which was never tried here",
            "a table without it, or mode='append'",
        )
    for name in (*keys.record, *keys.order, *keys.partition):
        if schema is not None and name not in schema.names:
            problems.add(f"its key, order or partition is {name}, and rows have none", "select=[…]")
    problems.raise_if_any(f"mode='upsert' on the Hudi table at {target}")


def _is_same(one: pa.DataType, other: pa.DataType) -> bool:
    """But for time zones, which Spark has one of, and for what may be null within a value."""
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other):
        return (one.tz is None) == (other.tz is None)
    if not pa.types.is_nested(one) or not pa.types.is_nested(other):
        return bool(one == other)
    if one.id != other.id or one.num_fields != other.num_fields:
        return False
    pairs = [(one.field(place), other.field(place)) for place in range(one.num_fields)]
    is_struct = pa.types.is_struct(one)
    return all(
        (not is_struct or mine.name == theirs.name) and _is_same(mine.type, theirs.type)
        for mine, theirs in pairs
    )
