"""The checks of a Delta sink: of the table before the first row, of the rows before a decision."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from deltalake import DeltaTable

from epochal.errors import Misconfigured, Problems, RowRejected
from epochal.kit.engine_files import refusing, sql_name
from epochal.kit.hive_partitions import check_columns, is_partition_type
from epochal.sinks.delta.merge import IS_DELETE, require_one_winner, winners
from epochal.sinks.delta.prepared_rows import (
    ROWS,
    PreparedRows,
    no_rows,
    portions,
    prepared_rows,
    quoted,
)
from epochal.sinks.delta.table_files import TableFiles, files_of
from epochal.sinks.delta.types import (
    MAPPING,
    Fit,
    Rule,
    columns_digest,
    columns_of,
    delta_schema,
    fit,
    generated_columns,
)
from epochal.terms import Ability, EpochNumber, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.delta.sink import Delta

_FEATURES = frozenset(
    {
        "allowColumnDefaults",
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "domainMetadata",
        "generatedColumns",
        "identityColumns",
        "invariants",
        "timestampNtz",
        "vacuumProtocolCheck",
    }
)
"""Writer features that this sink honours, or looks at more closely below."""
_UNIT_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_DURATION = re.compile(r"(?:interval\s+)?(\d+)\s+(second|minute|hour|day|week)s?", re.IGNORECASE)
_VACUUM_DEFAULT = "interval 1 week"
_SHOWN_CHARACTERS = 300
_SQL_TEXTS = re.compile(r"'[^']*'")
_OTHERWISE = re.compile(
    r"/|\b(concat|concat_ws|log|substr|substring|extract|date_part)\s*\(", re.IGNORECASE
)
"""
What Spark and DataFusion both have and compute differently: a quotient of whole numbers, nulls in
concat, the base of log, negative positions, the number of a day of the week.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """What the tasks and the rehearsal must know of a table."""

    partition_by: tuple[str, ...]
    stats_columns: int
    columns: str
    """The digest of the table's columns."""
    types: pa.Schema
    """The table's columns."""
    fit: Fit | None

    @property
    def generated(self) -> Mapping[str, str]:
        return {} if self.fit is None else self.fit.generated

    def select(self, schema: pa.Schema) -> Mapping[str, str]:
        """
        The columns that Spark's own writer is to write, as SQL over those that arrive; empty where
        they are the same.
        """
        if self.fit is None or not (self.fit.casts or self.fit.generated):
            return {}
        found = {name: self.fit.casts.get(name, sql_name(name)) for name in schema.names}
        found |= self.fit.generated
        for name in self.partition_by:
            kind = self.types.field(name).type
            if pa.types.is_string(kind):
                found[name] = refusing(name, found[name])
            elif pa.types.is_timestamp(kind) and kind.tz is not None:
                found[name] = _in_utc(found[name])
        return found

    def handout(self) -> Json:
        return {
            "partition_by": list(self.partition_by),
            "stats_columns": self.stats_columns,
            "columns": self.columns,
            "types": {} if self.fit is None else dict(self.fit.wider),
        }


def _in_utc(sql: str) -> str:
    """
    An instant as the text of a partition value: Spark's own has the zone of its session and does
    not name it. Added to 1970 without a zone, as each hour is there once.
    """
    seconds = f"CAST(unix_micros({sql}) / CAST(1000000 AS DECIMAL(7, 0)) AS DECIMAL(18, 6))"
    wall = f"TIMESTAMP_NTZ '1970-01-01 00:00:00' + make_dt_interval(0, 0, 0, {seconds})"
    return f"concat(replace(CAST({wall} AS STRING), ' ', 'T'), 'Z')"


def check_missing(sink: Delta, schema: pa.Schema | None) -> None:
    """Refuse columns that can't make a table where one is to be created."""
    if sink.create_table == "never":
        raise Misconfigured(
            f"there is no Delta table at {sink.target}", "create it, or create_table='if_missing'"
        )
    if sink.mode == "overwrite_partitions" and not sink.partition_by:
        raise Misconfigured(
            "Delta: a table that is made for mode='overwrite_partitions' needs partitions",
            'partition_by=["day"]',
        )
    if schema is not None:
        delta_schema(schema)
        check_columns(schema, sink.partition_by or ())


def plan_for(sink: Delta, table: DeltaTable, schema: pa.Schema | None) -> WritePlan:
    """Look at a table, or raise `Misconfigured` with everything against it."""
    problems = Problems()
    metadata = table.metadata()
    _require_features(sink, table, problems)
    _require_memory(sink, metadata.configuration, problems)
    columns = tuple(metadata.partition_columns)
    fitted = None
    if schema is not None:
        fitted = fit(schema, table, deciding=deciding_fields(sink, schema), problems=problems)
        _require_new(sink, fitted, problems)
        _require_keys(sink, fitted, schema, problems)
    _require_partitions(sink, columns, problems)
    types = pa.schema(table.schema())
    generated = generated_columns(table)
    # Spark writes the texts of generated ones; an overwrite compares them.
    by_spark = generated if sink.mode == "append" else {}
    _require_texts([types.field(name) for name in columns if name not in by_spark], problems)
    problems.raise_if_any(sink.target)
    if schema is not None and columns:
        check_columns(schema, [name for name in columns if name not in generated])
    if fitted is not None:
        _require_rules(sink, fitted, types)
    indexed = int(metadata.configuration.get("delta.dataSkippingNumIndexedCols", "32"))
    return WritePlan(
        partition_by=columns,
        stats_columns=indexed if indexed >= 0 else 10_000,
        columns=columns_digest(table),
        types=types,
        fit=fitted,
    )


def abilities(table: DeltaTable | None) -> Sequence[Ability]:
    retention = None if table is None else _memory(table.metadata().configuration)
    return [
        Ability(name="whole epochs", granted=True, because="an epoch is one version of the table"),
        Ability(
            name="reset is found",
            granted=True,
            because="the log keeps the newest epoch of every uid, "
            + (f"for {retention}" if retention else "for good"),
        ),
    ]


def deciding_fields(sink: Delta, schema: pa.Schema) -> frozenset[str]:
    """Fields that decide which row wins or deletes: written only where the table has the column."""
    condition = sink.delete_when or ""
    named = {
        name for name in schema.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", condition)
    }
    return frozenset((named | set(sink.order_by)) - set(sink.keys))


def _require_features(sink: Delta, table: DeltaTable, problems: Problems) -> None:
    configuration = table.metadata().configuration
    features = set(table.protocol().writer_features or ())
    unknown = sorted(features - _FEATURES)
    if unknown:
        problems.add(
            f"the table has the features {', '.join(unknown)}, which this sink does not write",
            "write to a table without them",
        )
    mapping = configuration.get(MAPPING, "none")
    if mapping != "none":
        problems.add(
            f"the table maps column names ({MAPPING}={mapping}), and files here have the names "
            "themselves",
            "ALTER TABLE … DROP FEATURE columnMapping, which writes its files anew; or write to "
            "another table, and copy or merge from it with Delta's own writer",
        )
    if sink.mode == "append":
        return
    if "deletionVectors" in features:
        # Switched off or not: files may still have some, and a removal here can't name them.
        problems.add(
            f"mode={sink.mode!r}, and the table has the feature deletionVectors",
            "mode='append', or drop the feature",
        )
    for setting, fact in (
        ("delta.appendOnly", "the table is append-only"),
        (
            "delta.enableChangeDataFeed",
            "the table keeps a change feed, which needs files of its own",
        ),
        ("delta.enableDeletionVectors", "the table has deletion vectors"),
    ):
        if configuration.get(setting, "false").lower() == "true":
            problems.add(
                f"mode={sink.mode!r}, and {fact} ({setting}=true)", "mode='append', or unset it"
            )


def _require_memory(sink: Delta, configuration: dict[str, str], problems: Problems) -> None:
    """A table that forgets transactions or files sooner than a pipeline may be down."""
    for setting, default, what in (
        ("delta.setTransactionRetentionDuration", None, "forgets which epochs it has"),
        ("delta.deletedFileRetentionDuration", _VACUUM_DEFAULT, "lets VACUUM take prepared files"),
    ):
        duration = configuration.get(setting, default)
        if duration is None:
            continue
        seconds = _seconds(duration)
        if seconds is None or seconds < sink.recovery_window_s:
            problems.add(
                f"the table {what} after {duration} ({setting}), and the pipeline may be down for "
                f"{sink.recovery_window_s / 3600:g} hours (recovery_window_s)",
                f"raise {setting}, or lower recovery_window_s",
            )


def _memory(configuration: dict[str, str]) -> str | None:
    return configuration.get("delta.setTransactionRetentionDuration")


def _seconds(duration: str) -> int | None:
    found = _DURATION.fullmatch(duration.strip())
    return None if found is None else int(found[1]) * _UNIT_S[found[2].lower()]


def _require_partitions(sink: Delta, columns: tuple[str, ...], problems: Problems) -> None:
    if sink.partition_by is not None and tuple(sink.partition_by) != columns:
        problems.add(
            f"the table is partitioned by {list(columns)}, not by {list(sink.partition_by)}",
            "leave partition_by out: an existing table has its own",
        )
    if sink.mode == "overwrite_partitions" and not columns:
        problems.add(
            "mode='overwrite_partitions', and the table has no partitions",
            "partition the table, or mode='append'",
        )


def _require_texts(columns: Sequence[pa.Field], problems: Problems) -> None:
    """Values of partition columns are taken from the names of folders."""
    for column in columns:
        if not is_partition_type(column.type):
            problems.add(
                f"the table is partitioned by {column.name!r}, which is {column.type}",
                "a table that is partitioned by strings, integers, booleans or dates; for append "
                "also by any column that it generates from others",
            )


def _require_new(sink: Delta, fitted: Fit, problems: Problems) -> None:
    if fitted.new and sink.evolve == "never":
        problems.add(
            f"the table has no column {', '.join(map(repr, fitted.new))}",
            "evolve='add_columns', or leave them out with select=",
        )


def _require_keys(sink: Delta, fitted: Fit, schema: pa.Schema, problems: Problems) -> None:
    for name in (*sink.keys, *sink.order_by):
        if name not in schema.names:
            problems.add(f"no field {name!r} arrives", f"the fields are {', '.join(schema.names)}")
    unwritten = [key for key in sink.keys if key in fitted.new]
    if unwritten:
        problems.add(f"the keys {unwritten} are no columns of the table", "name columns it has")
    if sink.mode == "merge" and fitted.rules and fitted.absent:
        problems.add(
            "the table has constraints, and a merge that leaves columns alone "
            f"({', '.join(fitted.absent)}) can't tell beforehand whether they will hold",
            "give every column, or drop the constraints",
        )


def _require_rules(sink: Delta, fitted: Fit, schema: pa.Schema) -> None:
    """Constraints are written in Spark's SQL: see that the engine here understands them as such."""
    if not fitted.rules:
        return
    with no_rows(schema) as rows:
        for rule in fitted.rules:
            what = f"{sink.target}: constraint {rule.name!r}"
            differs = _OTHERWISE.search(_SQL_TEXTS.sub("", rule.expression))
            if differs is not None:
                raise Misconfigured(
                    f"{what}, {rule.expression!r}, can't be judged here: DataFusion computes "
                    f"{differs[0].rstrip('( ')} otherwise than Spark",
                    "say it in another way: a division as a multiplication, concat as ||",
                )
            _require_evaluable(rows, rule.expression, what, schema.names)


def check_delete_when(sink: Delta, schema: pa.Schema | None) -> None:
    if sink.delete_when is None or schema is None:
        return
    with no_rows(schema) as rows:
        _require_evaluable(rows, sink.delete_when, "Delta: delete_when", schema.names)


def _require_evaluable(
    rows: PreparedRows, expression: str, what: str, fields: Sequence[str]
) -> None:
    try:
        rows.rows(f"SELECT count(*) FROM {ROWS} WHERE ({expression}) IS NOT TRUE")  # noqa: S608  names are quoted
    except Exception as error:
        raise Misconfigured(
            f"{what}, {expression!r}, can't be evaluated here: {str(error).splitlines()[0]}",
            f"DataFusion's SQL over the fields {', '.join(fields)}",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """One epoch's prepared rows, judged by the table's rules before the decision (I3)."""

    sink: Delta
    files: TableFiles
    epoch: EpochNumber
    receipts: Sequence[Receipt]

    def judge(self, plan: WritePlan) -> None:
        """Raise `RowRejected` where the table would not take these rows. Reads them if it must."""
        files = [file for receipt in self.receipts for file in files_of(receipt)]
        if not files:
            return
        is_merge = self.sink.mode == "merge"
        fitted = plan.fit
        if not is_merge and fitted is not None:
            self._require_no_nulls(fitted)
        rules = () if fitted is None else fitted.rules
        if is_merge and fitted is not None:
            rules = (*rules, *_not_null(fitted))
        if not rules and not is_merge:
            return
        absent = {} if fitted is None else fitted.absent
        missing = {} if is_merge else {**absent, **_in_folders(plan)}
        # Rows of a merge are staged together, and so are one portion.
        for some in portions(files):
            with prepared_rows(self.files, some, missing) as rows:
                if is_merge:
                    require_one_winner(self.sink, rows, self.epoch)
                for rule in rules:
                    self._require(rows, rule)

    def _require_no_nulls(self, fitted: Fit) -> None:
        nulls = {
            name for receipt in self.receipts for name in cast("Any", receipt.token["nulls"])
        } | {
            name
            for receipt in self.receipts
            for file in files_of(receipt)
            for name, value in file["partition"].items()
            if value is None
        }
        refused = sorted(nulls & set(fitted.not_null))
        if refused:
            raise RowRejected(
                f"epoch {self.epoch}: {self.sink.target} takes no null in {', '.join(refused)}, "
                "and the rows have some",
                'where="… IS NOT NULL", or fill them in with select=',
            )

    def _require(self, rows: PreparedRows, rule: Rule) -> None:
        among = ROWS if self.sink.mode != "merge" else f"({winners(self.sink)})"
        kept = "" if self.sink.mode != "merge" else f" AND NOT {IS_DELETE}"
        found = rows.rows(
            f"SELECT * FROM {among} WHERE (({rule.expression}) IS NOT TRUE){kept} LIMIT 1"  # noqa: S608  names are quoted
        )
        if found:
            raise RowRejected(
                f"epoch {self.epoch}: a row breaks {rule.name!r} ({rule.expression}) of "
                f"{self.sink.target}: {str(found[0])[:_SHOWN_CHARACTERS]}",
                'leave such rows out with where="…", or change the table',
            )


def _in_folders(plan: WritePlan) -> Mapping[str, str]:
    """The columns that names of folders hold, with their types."""
    columns = delta_schema(pa.schema([plan.types.field(name) for name in plan.partition_by]))
    return {name: str(column.kind) for name, column in columns_of(columns).items()}


def _not_null(fitted: Fit) -> tuple[Rule, ...]:
    return tuple(
        Rule(name=f"NOT NULL of {name}", expression=f"{quoted(name)} IS NOT NULL")
        for name in fitted.not_null
        if name in fitted.written
    )
