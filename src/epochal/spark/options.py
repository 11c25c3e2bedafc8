"""A sink from Spark's options, which are strings under names that lost their case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from epochal.contract import Sink
from epochal.errors import Misconfigured
from epochal.protocol.admission import Unfinished

SinkMaker: TypeAlias = Callable[[Mapping[str, str]], Sink]
"""Makes a sink of its options. Must be importable, as other processes call it too."""

_YES = {"true": True, "false": False}
_SEVERAL = ("Sequence[", "tuple[", "list[")
_IN_THE_QUERY = ("where", "select")


def default_sinks() -> dict[str, SinkMaker]:
    from epochal.sinks.files import Files  # noqa: PLC0415  only where a sink is made

    return {"files": partial(from_options, Files)}


def from_options(kind: type[Any], options: Mapping[str, str]) -> Any:
    """Make a declared sink from options named like its fields."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name in _IN_THE_QUERY:
            raise Misconfigured(
                f"option {name!r}: this door has one sink, which takes the rows as they come",
                f"say it in the query: df.{name}(…).writeStream",
            )
        if name not in fields:
            known = ", ".join(sorted(set(fields) - set(_IN_THE_QUERY)))
            raise Misconfigured(f"{kind.__name__} has no option {name!r}", f"it has {known}")
        values[name] = _valued(name, str(fields[name].type), text)
    try:
        return kind(**values)
    except TypeError as error:
        raise Misconfigured(f"{kind.__name__}: {error}", "give the missing .option(…)") from None


def _valued(name: str, told: str, text: str) -> Any:
    """By the type as it is written in the sink's source: only plain ones can come from a string."""
    kind = told.removesuffix(" | None")
    try:
        if kind == "bool":
            return _YES[text.lower()]
        if kind == "str | bool":
            return _YES.get(text.lower(), text)
        if kind in ("int", "float"):
            return (int if kind == "int" else float)(text)
    except (KeyError, ValueError):
        raise Misconfigured(
            f"option {name!r} is {text!r}", f"give a value of type {kind}"
        ) from None
    if kind.startswith(_SEVERAL):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def unfinished_from(word: str) -> Unfinished:
    """The user's word for what is to become of a batch that other code left unfinished."""
    try:
        return Unfinished(word)
    except ValueError:
        known = ", ".join(repr(one.value) for one in Unfinished)
        raise Misconfigured(f"unfinished={word!r} is none of {known}", f"one of {known}") from None
