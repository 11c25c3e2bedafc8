"""What is asked of a Hudi table and its Spark before the first row: settings, columns, types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.errors import Problems
from epochal.kit.engine_files import sql_name
from epochal.sinks.hudi.client import FOR_PEOPLE, HudiClient
from epochal.terms import Ability

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
