"""What a pipeline's file may say. The fields are its keys, and their docstrings the help."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from epochal.config.coerce import Fitter, Mistake, Mistakes, Vocabulary
from epochal.config.tree import Entries, Items, Node, Unreadable, parse
from epochal.config.type_hints import PythonName
from epochal.contract import DEFAULT_LIMITS, Limits, Sink
from epochal.errors import Misconfigured

_PORT_MAX = 65535
LISTS_OF_ONE = ("steps", "sinks", "gates")
"""Keys whose list may be left out around a single item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """A stream that Spark reads."""

    format: str
    """Any of Spark's: kafka, rate, json, csv, parquet, delta, iceberg, …"""
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str | None = None
    """Columns in SQL's words, for formats that don't know their own: `id BIGINT, at TIMESTAMP`."""
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One step from a stream to the next; exactly one of `sql`, `select`, `where`, `watermark`."""

    sql: str | None = None
    """A query. It reads each source, and the step before it as `input`."""
    select: Sequence[str] | None = None
    where: str | None = None
    watermark: Mapping[str, str] | None = None
    """How late a row may be, by the column that says when it happened: `{at: 10 minutes}`."""
    name: str | None = None
    """Under which later queries may read this step too."""

    def __post_init__(self) -> None:
        said = [word for word in ("sql", "select", "where", "watermark") if getattr(self, word)]
        if len(said) != 1:
            raise Misconfigured(
                f"a step does one thing, and this one does {' and '.join(said) or 'nothing'}",
                "one of sql, select, where, watermark a step",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePart:
    """Something that may refuse a prepared epoch; exactly one of `sql` and `python`."""

    sql: str | None = None
    """A query over `batch`. The epoch passes if the first column of every row is true."""
    python: PythonName | None = None
    """`module:function` of a function of the prepared epoch."""

    def __post_init__(self) -> None:
        if (self.sql is None) == (self.python is None):
            raise Misconfigured("a gate is either a query or a function", "sql: … or python: …")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerPart:
    """When Spark begins an epoch; as soon as the last one is done, where nothing is said."""

    processing_time: str | None = None
    """`10 seconds`"""
    available_now: bool = False
    """All that is there, in several epochs, then stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkPart:
    """How Spark is started where no `spark-submit` has done it."""

    master: str | None = None
    """`local[2]` if neither this nor the environment says otherwise."""
    packages: Sequence[str] = ()
    """Maven coordinates that Spark's resolver brings."""
    jars: Sequence[str] = ()
    conf: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPart:
    """Where figures can be had."""

    port: int | None = None
    """Serve Prometheus on this port."""
    host: str = "127.0.0.1"
    otlp: bool = False
    """Push by OpenTelemetry; the endpoint is in OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= _PORT_MAX:
            raise Misconfigured(f"there is no port {self.port}", f"0 to {_PORT_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A pipeline without code."""

    pipeline: str
    """Its name."""
    checkpoint: str
    """Spark's checkpoint, and the epoch log in it."""
    source: SourcePart | None = None
    """The stream; queries read it as `source`."""
    sources: Mapping[str, SourcePart] = field(default_factory=dict)
    """Several streams, by the names under which queries read them."""
    steps: Sequence[StepPart] = ()
    sinks: Sequence[Sink]
    gates: Sequence[GatePart] = ()
    trigger: TriggerPart = TriggerPart()
    output_mode: Literal["append", "update", "complete"] = "append"
    run: str | None = None
    """The key of a deliberate fresh start."""
    log: str | None = None
    """Where decisions live, if not in the checkpoint."""
    fingerprint: bool = True
    limits: Limits = DEFAULT_LIMITS
    spark: SparkPart = SparkPart()
    metrics: MetricsPart = MetricsPart()

    def __post_init__(self) -> None:
        if (self.source is None) == (not self.sources):
            raise Misconfigured(
                "a pipeline reads one source, or several by name", "source: {…} or sources: {…}"
            )
        if len(self.sources) > 1 and not any(step.sql for step in self.steps):
            raise Misconfigured(
                f"{len(self.sources)} sources and no query that says what becomes of them",
                "steps: [{sql: SELECT … FROM a JOIN b …}]",
            )
        _require_names_apart(self.sinks)

    @property
    def streams(self) -> Mapping[str, SourcePart]:
        return {"source": self.source} if self.source is not None else self.sources


def _require_names_apart(sinks: Sequence[Sink]) -> None:
    if not sinks:
        raise Misconfigured("sinks: there is none", "- kind: files …")
    names = [sink.name for sink in sinks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Misconfigured(f"two sinks are named {twice[0]!r}", "name: … on one of them")


def read_file(path: Path, vocabulary: Vocabulary) -> PipelineFile:
    """A pipeline's file. Raises `Mistakes` with every one that was found, by line."""
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
        raise Mistakes.of([Mistake(error.place, error.message, error.hint)]) from None
    return Fitter(vocabulary).fit(PipelineFile, _with_lists(tree), "")


def _with_lists(tree: Node) -> Node:
    """A single step, sink or gate needs no list around it."""
    if not isinstance(tree, Entries):
        return tree
    entries = {
        key: Items(value.place, (value,))
        if key in LISTS_OF_ONE and isinstance(value, Entries)
        else value
        for key, value in tree.entries.items()
    }
    return Entries(tree.place, entries, tree.keys)
