"""
The options of `Pipeline.start`: Spark's own of a streaming query (trigger, outputMode, queryName,
checkpointLocation), and those that only epochal has.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from epochal.contract import Sink
from epochal.errors import Misconfigured
from epochal.protocol.admission import Unfinished
from epochal.spark.error_text import spark_message
from epochal.terms import SinkName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_TRIGGERS = ("processingTime", "availableNow", "once")
_OTHERS = ("trigger", "outputMode", "queryName", "checkpointLocation")
_REFUSED = {
    "continuous": "a continuous query has no micro-batches, so nothing can be decided on as one",
    "realTime": "a real-time query hands rows to the sink before its batch is complete, so they "
    "could not stay invisible until it is decided",
}
_MODES = ("append", "update", "complete")

UnfinishedChoice = Literal["ask", "redo", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What only epochal asks about a start, checked."""

    run: str | None = None
    """The key of a deliberate fresh start."""
    unfinished: Unfinished = Unfinished.ASK
    """What to do with a batch that other code left unfinished."""
    retarget: tuple[SinkName, ...] = ()
    """Sinks that write to another target from now on."""

    @classmethod
    def read(cls, run: str | None, unfinished: str, retarget: Collection[str]) -> StartOptions:
        if isinstance(retarget, str):
            raise Misconfigured(
                f"retarget={retarget!r} is one string, not a list of sinks",
                f"retarget=[{retarget!r}]",
            )
        return cls(
            run=run,
            unfinished=unfinished_choice(unfinished),
            retarget=tuple(map(SinkName, retarget)),
        )


def unfinished_choice(choice: str) -> Unfinished:
    try:
        return Unfinished(choice)
    except ValueError:
        known = ", ".join(repr(one.value) for one in Unfinished)
        message = f"unfinished={choice!r} is none of {known}"
        raise Misconfigured(message, f"one of {known}") from None


class Trigger(TypedDict, total=False):
    """How often Spark makes a micro-batch: one of these."""

    processingTime: str
    availableNow: bool
    once: bool


class QueryOptions(TypedDict, total=False):
    """What Spark calls the options of a query, with its own names and values."""

    processingTime: str
    """The shortest time between two epochs: `"10 seconds"`."""
    availableNow: bool
    """Write what the sources have now, in as many epochs as they say, then stop."""
    once: bool
    """The same in one epoch."""
    trigger: Trigger
    """One of the three above, as `trigger={"availableNow": True}`."""
    outputMode: Literal["append", "update", "complete"]
    """`append` where none is given."""
    queryName: str
    """The pipeline's name where none is given."""
    checkpointLocation: str | os.PathLike[str]
    """The same as `checkpoint=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The options of one start, checked."""

    output_mode: str = "append"
    name: str | None = None
    checkpoint: str | os.PathLike[str] | None = None
    trigger: Mapping[str, Any] = field(default_factory=dict)
    """What to pass on to Spark's `trigger()`, which checks the values itself."""


def read_options(options: Mapping[str, Any], sinks: Sequence[Sink]) -> Query:
    """Check the options of a start; `Misconfigured` names the one that can't be used, and why."""
    named = {name: value for name, value in options.items() if name in _OTHERS}
    trigger = {name: value for name, value in options.items() if name not in _OTHERS}
    trigger |= _mapping(named.get("trigger") or {})
    for name, value in trigger.items():
        _require_trigger(name, value)
    mode = named.get("outputMode") or "append"
    _require_mode(mode, sinks)
    return Query(
        output_mode=mode,
        name=named.get("queryName"),
        checkpoint=named.get("checkpointLocation"),
        trigger={name: value for name, value in trigger.items() if value not in (None, False)},
    )


def configured(frame: DataFrame, query: Query) -> DataStreamWriter:
    """Spark's writer with these options. Starts nothing; raises where Spark can't use one."""
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

    try:
        writer = frame.writeStream.outputMode(query.output_mode)
        return writer.trigger(**query.trigger) if query.trigger else writer
    except (PySparkException, ValueError, TypeError) as error:
        trigger = ", ".join(f"{name}={value!r}" for name, value in query.trigger.items())
        raise Misconfigured(
            f"Spark can't use the trigger {trigger}: {spark_message(error)}",
            'processingTime="1 second" (0 seconds: as fast as possible), or availableNow=True',
        ) from None


def _mapping(trigger: object) -> Mapping[str, Any]:
    if not isinstance(trigger, Mapping):
        raise Misconfigured(f"trigger={trigger!r}", 'trigger={"processingTime": "1 second"}')
    return trigger


def _require_trigger(name: str, value: object) -> None:
    if name in _REFUSED:
        raise Misconfigured(
            f"the trigger {name}={value!r} is refused: {_REFUSED[name]}",
            'processingTime="1 second" (0 seconds: as fast as possible), or availableNow=True',
        )
    if name not in _TRIGGERS:
        raise Misconfigured(
            f"start() does not know {name}=",
            f"Spark's options that it takes are {', '.join((*_TRIGGERS, *_OTHERS))}",
        )


def _require_mode(mode: str, sinks: Sequence[Sink]) -> None:
    """Each sink declares which of Spark's output modes its own mode can honour."""
    if mode not in _MODES:
        raise Misconfigured(f"outputMode={mode!r}", f"one of {', '.join(_MODES)}")
    for sink in sinks:
        if mode not in sink.output_modes:
            sink_mode = sink.describe().get("mode")
            raise Misconfigured(
                f"sink {sink.name!r}{f' in mode {sink_mode!r}' if sink_mode else ''} can't honour "
                f"Spark's output mode {mode!r}: {_BECAUSE[mode]}",
                f"it takes {', '.join(sorted(sink.output_modes))}; or give the sink a mode that "
                f"{_NEEDS[mode]}",
            )


_BECAUSE = {
    "append": "it replaces what is there, and each epoch brings only new rows",
    "update": "each epoch brings new versions of rows that are there already",
    "complete": "each epoch brings the whole result again",
}
_NEEDS = {
    "append": "adds rows",
    "update": "replaces rows by key",
    "complete": "replaces everything",
}
