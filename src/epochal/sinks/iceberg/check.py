"""The checks of an Iceberg sink before the first row: of the table, and of the columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType

from epochal.errors import Misconfigured
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.types import has_structs_in_lists, mismatches, new_columns
from epochal.terms import Ability

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from epochal.sinks.iceberg.sink import Iceberg

_VERSION_MAX = 2
_CATALOGS = {
    "RestCatalog": "the REST server compares what a commit was made for with the table",
    "SqlCatalog": "the row of the table in the catalog's database is compared and replaced",
    "InMemoryCatalog": "the row of the table in the catalog's database is compared and replaced",
    "GlueCatalog": "Glue compares the version of the table's entry",
    "HiveCatalog": "pyiceberg holds the metastore's lock on the table meanwhile",
}


def check_table(sink: Iceberg, table: Table, schema: pa.Schema | None) -> list[Ability]:
    metadata = table.metadata
    if metadata.format_version > _VERSION_MAX:
        raise Misconfigured(
            f"{sink.address} has format version {metadata.format_version}, which pyiceberg reads "
            "and does not write",
            "a table of format version 2",
        )
    written = metadata.properties.get("write.format.default", "parquet").lower()
    if written != "parquet":
        raise Misconfigured(
            f"{sink.address} asks for {written} files (write.format.default)",
            "only parquet is written: set the property so, older files may stay as they are",
        )
    if sink.branch != "main" and sink.branch not in table.refs():
        raise Misconfigured(
            f"{sink.address} has no branch {sink.branch!r}",
            f"create it first: ALTER TABLE … CREATE BRANCH {sink.branch}",
        )
    for option in ("branch", "audit_branch"):
        _require_no_tag(sink, table, option)
    if sink.mode == "upsert":
        _require_rewritable(sink, table)
    if schema is not None:
        check_schema(sink, table, schema)
    return [_whole_epochs(), _flat_commits(sink)]


def check_schema(sink: Iceberg, table: Table, schema: pa.Schema) -> None:
    """Refuse rows that the table can't take, with the columns that it may be given."""
    new = new_columns(schema, table.schema())
    columns = table.schema()
    if new and sink.evolve == "add_columns":
        columns = _widened(sink, table, schema)
    refused = mismatches(schema, columns)
    if refused:
        only_new = sink.evolve == "never" and len(refused) == len(new)
        raise Misconfigured(
            f"{sink.address} does not take these rows: {'; '.join(refused)}",
            'evolve="add_columns" adds them, or select= leaves them out'
            if only_new
            else "cast or rename in select=, or change the table",
        )
    missing = [name for name in (*sink.keys, *sink.order_by) if name not in schema.names]
    if missing:
        raise Misconfigured(
            f"{sink.address}: keys and order_by name {', '.join(missing)}, which the rows don't "
            "have",
            f"the rows have {', '.join(schema.names)}",
        )


def add_columns(table: Table, schema: pa.Schema) -> None:
    """Add the columns that the table does not have, as optional ones."""
    with table.update_schema() as update:
        update.union_by_name(_added(table, schema))


def _added(table: Table, schema: pa.Schema) -> pa.Schema:
    new = new_columns(schema, table.schema())
    return pa.schema([schema.field(name).with_nullable(True) for name in new])


def _widened(sink: Iceberg, table: Table, schema: pa.Schema) -> Schema:
    """The columns that the table will have."""
    try:
        return private.with_columns(table, _added(table, schema))
    except (UnsupportedPyArrowTypeException, ValueError, TypeError) as error:
        raise Misconfigured(
            f"{sink.address} can't be given the columns that it lacks: {error}",
            "cast them in select=, or leave them out",
        ) from error


def _require_no_tag(sink: Iceberg, table: Table, option: str) -> None:
    found = table.refs().get(getattr(sink, option) or "")
    if found is not None and found.snapshot_ref_type != SnapshotRefType.BRANCH:
        raise Misconfigured(
            f"{sink.address}: {option}={getattr(sink, option)!r} is a tag, which stays where it is",
            "name a branch: ALTER TABLE … CREATE BRANCH",
        )


def _require_rewritable(sink: Iceberg, table: Table) -> None:
    """Refuse lists and maps of structs: pyiceberg reads a null one as an empty one."""
    bad = [field.name for field in table.schema().fields if has_structs_in_lists(field.field_type)]
    if bad:
        raise Misconfigured(
            f"{sink.address}: mode='upsert' rewrites rows of others, and {', '.join(bad)} has "
            "structs in a list or map, of which pyiceberg loses nulls when it reads",
            "mode='append', or another layout of that column",
        )


def catalog_ability(catalog: Catalog) -> Ability:
    """Why two commits at a time can't both hold, by the kind of catalog."""
    kind = type(catalog).__name__
    how = _CATALOGS.get(kind)
    return Ability(
        name="one commit at a time",
        granted=how is not None,
        because=how
        or f"{kind} is not one of the catalogs that this sink was written for: REST, SQL, Glue and "
        "Hive; two commits at once may both be taken, and one of them lost",
    )


def _whole_epochs() -> Ability:
    return Ability(name="whole epochs", granted=True, because="an epoch is one snapshot")


def _flat_commits(sink: Iceberg) -> Ability:
    if sink.snapshots_kept is not None:
        return Ability(
            name="commits stay cheap",
            granted=True,
            because=f"{sink.snapshots_kept} of this sink's own snapshots are kept",
        )
    return Ability(
        name="commits stay cheap",
        granted=False,
        because="a commit rewrites the table's list of snapshots, and nothing here shortens it; "
        "expire snapshots regularly, or let snapshots_kept= do it",
    )
