"""Spark's trigger words and output modes: which are taken, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from epochal.contract import Sink
from epochal.errors import Misconfigured

_TAKEN = ("processingTime", "availableNow", "once")
_REFUSED = {
    "continuous": "a continuous query has no micro-batches, so nothing can be decided on as one",
    "realTime": "a real-time query hands rows to the sink before its batch is complete, so they "
    "could not stay invisible until it is decided",
}
_MODES = ("append", "update", "complete")


def trigger_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """The words to pass on to Spark; it checks their values itself."""
    for word in words:
        if word in _REFUSED:
            raise Misconfigured(
                f"the trigger {word}={words[word]!r} is refused: {_REFUSED[word]}",
                'processingTime="1 second" (0 seconds: as fast as possible), or availableNow=True',
            )
        if word not in _TAKEN:
            raise Misconfigured(
                f"start() does not know {word}=", f"Spark's trigger words are {', '.join(_TAKEN)}"
            )
    return {word: value for word, value in words.items() if value not in (None, False)}


def require_mode(mode: str, sinks: Sequence[Sink]) -> None:
    """Each sink says which of Spark's output modes its own mode can honour."""
    if mode not in _MODES:
        raise Misconfigured(f"output_mode={mode!r}", f"one of {', '.join(_MODES)}")
    for sink in sinks:
        if mode not in sink.output_modes:
            told = sink.describe().get("mode")
            raise Misconfigured(
                f"sink {sink.name!r}{f' in mode {told!r}' if told else ''} can't honour Spark's "
                f"output mode {mode!r}: {_BECAUSE[mode]}",
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
