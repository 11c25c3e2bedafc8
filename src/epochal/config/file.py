"""The keys of a pipeline's file: fields of dataclasses, documented by their docstrings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from epochal.config.coerce import Coercer, Mistake, Mistakes
from epochal.config.tree import Entries, Items, Node, Unreadable, parse
from epochal.config.type_hints import PythonName
from epochal.contract import Sink
from epochal.errors import Misconfigured
from epochal.storage.urls import require_expanded
from epochal.terms import DEFAULT_LIMITS, Limits

_PORT_MAX = 65535
LISTS_OF_ONE = ("steps", "sinks", "gates")
"""Keys that accept a single item instead of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """A streaming source of Spark."""

    format: str
    """Any format of Spark: kafka, rate, json, csv, parquet, delta, iceberg, …"""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of that source, as Spark names them."""
    schema: str | None = None
    """Columns as SQL types, for formats without a schema: `id BIGINT, at TIMESTAMP`."""
    path: str | None = None
    """For sources of files and tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A transformation of the stream; exactly one of `sql`, `select`, `where`, `watermark`."""

    sql: str | None = None
    """A query. It can read every source by its name, and the previous step as `input`."""
    select: Sequence[str] | None = None
    """SQL expressions: the columns that the next step gets."""
    where: str | None = None
    """A SQL condition: the rows that the next step gets."""
    watermark: Mapping[str, str] | None = None
    """The event-time column and how late a row may be: `{at: 10 minutes}`."""
    name: str | None = None
    """A name by which later queries can read this step."""

    def __post_init__(self) -> None:
        keys = [key for key in ("sql", "select", "where", "watermark") if getattr(self, key)]
        if len(keys) != 1:
            raise Misconfigured(
                f"a step has exactly one key, and this one has {' and '.join(keys) or 'none'}",
                "one of sql, select, where, watermark",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePart:
    """A check that can refuse a prepared epoch; exactly one of `sql` and `python`."""

    sql: str | None = None
    """A query over `batch`. The epoch passes if the first column of every row is true."""
    python: PythonName | None = None
    """`module:function`, called with the prepared epoch."""

    def __post_init__(self) -> None:
        if (self.sql is None) == (self.python is None):
            raise Misconfigured("a gate is either a query or a function", "sql: … or python: …")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerPart:
    """When Spark begins an epoch; by default as soon as the previous one has ended."""

    processing_time: str | None = None
    """`10 seconds`"""
    available_now: bool = False
    """Process all available rows, in several epochs, then stop."""

    def __post_init__(self) -> None:
        if self.processing_time is not None and self.available_now:
            raise Misconfigured(
                "a run that ends has no interval", "processing_time: … or available_now: true"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkPart:
    """Configuration of Spark, if it is not started by `spark-submit`."""

    master: str | None = None
    """Where none is given, `local[2]`."""
    packages: Sequence[str] = ()
    """Maven coordinates that Spark downloads."""
    jars: Sequence[str] = ()
    """Jars that are there already: paths or URLs."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Any other setting: `spark.driver.memory: 4g`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPart:
    """Export of metrics."""

    port: int | None = None
    """Serve Prometheus on this port."""
    host: str = "127.0.0.1"
    """The address that it listens on; `0.0.0.0` for a scraper on another machine."""
    otlp: bool = False
    """Push by OpenTelemetry; the endpoint is in OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= _PORT_MAX:
            raise Misconfigured(f"port {self.port} is out of range", f"0 to {_PORT_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A pipeline that is declared in a file."""

    pipeline: str
    """Its name."""
    checkpoint: str
    """Spark's checkpoint, and the epoch log in it."""
    source: SourcePart | None = None
    """The source; queries read it as `source`."""
    sources: Mapping[str, SourcePart] = field(default_factory=dict)
    """Several sources, by the names that queries use."""
    steps: Sequence[StepPart] = ()
    """What is done with the rows, one step after the other."""
    sinks: Sequence[Sink]
    """Where the rows go: every epoch appears in all of them, or in none."""
    gates: Sequence[GatePart] = ()
    """What may refuse an epoch before it is decided."""
    trigger: TriggerPart = TriggerPart()
    """How often an epoch begins."""
    output_mode: Literal["append", "update", "complete"] = "append"
    """Spark's output mode, for queries that aggregate."""
    run: str | None = None
    """The key of a run: a deliberate fresh start."""
    log: str | None = None
    """The URL of the epoch log, if it is not in the checkpoint."""
    fingerprint: bool = True
    """Whether rows are hashed, so that lost ones can be proven equal and written again."""
    limits: Limits = DEFAULT_LIMITS
    """Timeouts, retries and sizes."""
    spark: SparkPart = SparkPart()
    """How Spark is started, if not by `spark-submit`."""
    metrics: MetricsPart = MetricsPart()
    """Where metrics are served or pushed."""

    def __post_init__(self) -> None:
        if (self.source is None) == (not self.sources):
            raise Misconfigured(
                "a pipeline has one source, or several by name",
                "source: {…} or sources: {…}",
            )
        if len(self.sources) > 1 and not any(step.sql for step in self.steps):
            raise Misconfigured(
                f"{len(self.sources)} sources and no query that combines them",
                "steps: [{sql: SELECT … FROM a JOIN b …}]",
            )
        _require_names_apart(self.sinks)
        require_expanded(self.checkpoint)

    @property
    def streams(self) -> Mapping[str, SourcePart]:
        return {"source": self.source} if self.source is not None else self.sources


def _require_names_apart(sinks: Sequence[Sink]) -> None:
    if not sinks:
        raise Misconfigured("sinks: there are none", "- kind: files …")
    names = [sink.name for sink in sinks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Misconfigured(f"two sinks are named {twice[0]!r}", "name: … on one of them")


def read_file(path: Path, *, finds_names: bool = False) -> PipelineFile:
    """Read a pipeline's file. Raises `Mistakes` with all mistakes, by line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(
            f"{path} can't be read: {getattr(error, 'strerror', None) or error}",
            "`epochal init` writes an example",
        ) from None
    try:
        tree = parse(text, str(path), os.environ)
    except Unreadable as error:
        raise Mistakes.of([Mistake(error.position, error.message, error.hint)]) from None
    return Coercer(finds_names=finds_names).coerce(PipelineFile, _with_lists(tree), "")


def _with_lists(tree: Node) -> Node:
    """Wrap a single step, sink or gate in a list."""
    if not isinstance(tree, Entries):
        return tree
    entries = {
        key: Items(value.position, (value,))
        if key in LISTS_OF_ONE and isinstance(value, Entries)
        else value
        for key, value in tree.entries.items()
    }
    return Entries(tree.position, entries, tree.keys)
