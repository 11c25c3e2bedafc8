"""
Values of a file to the types that dataclasses declare.

What a class takes is read off its fields, so a sink's options are named once, in its own folder.
Every mistake is collected with its line before any is told. A value that is no plain one is written
as a word with what it is told: `password: {env: PGPASSWORD}` is what `env("PGPASSWORD")` is in
Python; the vocabulary says which words there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from epochal.config.tree import Entries, Items, Node, Place, Text, plain
from epochal.config.type_hints import Shape, is_required, named, shape_of
from epochal.errors import EpochalError, Misconfigured

T = TypeVar("T")

_MISSING: Any = object()
_KIND = "kind"


@dataclass(frozen=True, slots=True)
class Mistake:
    place: Place
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}{f' ({self.hint})' if self.hint else ''}"


class Mistakes(Misconfigured):
    """All that is wrong with a file, by line."""

    def __init__(self, message: str, hint: str = "", found: Sequence[Mistake] = ()) -> None:
        super().__init__(message, hint)
        self.found = tuple(found)

    @classmethod
    def of(cls, found: Iterable[Mistake]) -> Mistakes:
        told = sorted(found, key=lambda mistake: mistake.place)
        return cls("\n".join(str(mistake) for mistake in told), found=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a file may name that is neither text nor number."""

    sinks: Mapping[str, Callable[[], type[Any]]] = field(default_factory=dict)
    """A sink's class by its kind, loaded when it is asked for: its driver may not be there."""
    words: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    """Words such as `env` and `json`, by what they call."""
    find: Callable[[str], object] | None = None
    """Looks up what `module:name` names; None where a file is read by who may not have it."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Other names of a sink's options; a dot is a mapping inside: `pool.max_connections`."""


class Fitter:
    """One pass over a file. What can't be fitted is noted, and stands as a missing value."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.mistakes: list[Mistake] = []

    def note(self, place: Place, message: str, hint: str = "") -> Any:
        self.mistakes.append(Mistake(place, message, hint))
        return _MISSING

    def fit(self, kind: type[T], node: Node, path: str) -> T:
        """An instance of a dataclass. Raises `Mistakes` with all that was found."""
        fitted = self._dataclass(kind, node, path)
        if self.mistakes:
            raise Mistakes.of(self.mistakes)
        return typing.cast("T", fitted)

    # By type

    def _value(self, hint: Any, node: Node, path: str) -> Any:
        return self._by_shape[shape_of(hint)](hint, node, path)

    @property
    def _by_shape(self) -> Mapping[Shape, Callable[[Any, Node, str], Any]]:
        return {
            Shape.UNION: self._one_of,
            Shape.CHOICE: self._choice,
            Shape.SINK: self._sink,
            Shape.RECORD: self._dataclass,
            Shape.LIST: self._several,
            Shape.MAPPING: self._mapping,
            Shape.PLAIN: self._plain,
            Shape.NAMED: self._name,
            Shape.OTHER: self._anything,
        }

    def _one_of(self, union: Any, node: Node, path: str) -> Any:
        hints = get_args(union)
        word = self._word(node)
        if word is not None and not any(shape_of(hint) is Shape.MAPPING for hint in hints):
            return self._spoken(word, _entries(node), path)
        for hint in sorted(hints, key=_by_strictness):
            attempt = Fitter(self._vocabulary)
            value = attempt._value(hint, node, path)
            if not attempt.mistakes:
                return value
        likely = [hint for hint in hints if _suits(hint, node)]
        if len(likely) == 1:
            return self._value(likely[0], node, path)
        told = ", ".join(sorted({named(hint) for hint in hints}))
        return self.note(node.place, f"{path}: {_shown(node)} is none of: {told}")

    def _choice(self, hint: Any, node: Node, path: str) -> Any:
        choices = get_args(hint)
        if isinstance(node, Text) and node.value in choices:
            return node.value
        told = ", ".join(str(choice) for choice in choices)
        nearest = _nearest(str(plain(node)), [str(choice) for choice in choices])
        return self.note(node.place, f"{path}: {_shown(node)} is none of {told}", nearest)

    def _plain(self, hint: Any, node: Node, path: str) -> Any:
        value = node.value if isinstance(node, Text) else _MISSING
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is hint:
            return value
        is_scalar = hint is str and isinstance(value, (int, float))
        return self.note(
            node.place,
            f"{path}: {_shown(node)} where {named(hint)} belongs",
            "put it in quotes" if is_scalar else "",
        )

    def _name(self, _hint: Any, node: Node, path: str) -> Any:
        name = self._plain(str, node, path)
        find = self._vocabulary.find
        if name is not _MISSING and find is not None:
            self._called(lambda: find(name), node.place, path)
        return name

    def _anything(self, _hint: Any, node: Node, path: str) -> Any:
        word = self._word(node)
        return plain(node) if word is None else self._spoken(word, _entries(node), path)

    def _several(self, hint: Any, node: Node, path: str) -> Any:
        if not isinstance(node, Items):
            return self.note(
                node.place, f"{path}: {_shown(node)} where a list belongs", "- one line for each"
            )
        inner = next(iter(get_args(hint)), Any)
        return tuple(
            self._value(inner, item, f"{path}[{at}]") for at, item in enumerate(node.items)
        )

    def _mapping(self, hint: Any, node: Node, path: str) -> Any:
        if not isinstance(node, Entries):
            return self.note(node.place, f"{path}: {_shown(node)} where a mapping belongs")
        inner = (*get_args(hint), Any, Any)[1]
        # Spark's options are texts all: what looks like a number is meant as one of them.
        return {
            key: _spark_text(value)
            if inner is str and isinstance(value, Text) and value.value is not None
            else self._value(inner, value, f"{path}.{key}")
            for key, value in node.entries.items()
        }

    # By name

    def _dataclass(self, kind: type[Any], node: Node, path: str) -> Any:
        if not isinstance(node, Entries):
            return self.note(
                node.place, f"{path or 'the file'}: {_shown(node)} where a mapping belongs"
            )
        return self._made(kind, dict(node.entries), node, path)

    def _made(self, kind: type[Any], entries: dict[str, Node], node: Entries, path: str) -> Any:
        hints = typing.get_type_hints(kind)
        fields = {one.name: one for one in dataclasses.fields(kind) if one.init}
        before = len(self.mistakes)
        values = {}
        for key, value in entries.items():
            if key not in fields:
                place = node.keys.get(key, value.place)
                self.note(
                    place, f"{path or 'the file'}: unknown key {key!r}", _nearest(key, fields)
                )
                continue
            values[key] = self._value(hints[key], value, f"{path}.{key}".lstrip("."))
        for name, one in fields.items():
            if is_required(one) and name not in entries:
                self.note(node.place, f"{path or 'the file'}: {name!r} is missing")
        if len(self.mistakes) > before:
            return _MISSING
        return self._called(lambda: kind(**values), node.place, path)

    def _sink(self, _hint: Any, node: Node, path: str) -> Any:
        if not isinstance(node, Entries) or not isinstance(node.entries.get(_KIND), Text):
            known = ", ".join(self._vocabulary.sinks)
            return self.note(node.place, f"{path}: a sink says its kind", f"kind: one of {known}")
        entries = dict(node.entries)
        kind = plain(entries.pop(_KIND))
        make = self._vocabulary.sinks.get(str(kind))
        if make is None:
            return self.note(
                node.entries[_KIND].place,
                f"{path}: no sink is of kind {kind!r}",
                _nearest(str(kind), self._vocabulary.sinks),
            )
        sink_class = self._called(make, node.entries[_KIND].place, path)
        if sink_class is _MISSING:
            return _MISSING
        return self._made(sink_class, self._by_our_names(entries, sink_class), node, path)

    def _by_our_names(self, entries: Mapping[str, Node], kind: type[Any]) -> dict[str, Node]:
        """Options under their other names, where this sink has the option that is meant."""
        fields = {one.name for one in dataclasses.fields(kind) if one.init}
        ours: dict[str, Node] = {}
        for key, value in entries.items():
            inner = value.entries if isinstance(value, Entries) and key not in fields else {}
            meant = {name: self._vocabulary.synonyms.get(f"{key}.{name}") for name in inner}
            if inner and all(name in fields for name in meant.values()):
                ours.update({str(meant[name]): child for name, child in inner.items()})
                continue
            other = self._vocabulary.synonyms.get(key)
            ours[other if key not in fields and other in fields else key] = value
        return ours

    def _word(self, node: Node) -> str | None:
        if isinstance(node, Entries) and len(node.entries) == 1:
            word = next(iter(node.entries))
            return word if word in self._vocabulary.words else None
        return None

    def _spoken(self, word: str, node: Entries, path: str) -> Any:
        told = self._told(node.entries[word], f"{path}.{word}")

        def call() -> Any:
            say = self._vocabulary.words[word]()
            return say(**told) if isinstance(told, dict) else say(told)

        return self._called(call, node.place, f"{path}.{word}")

    def _told(self, node: Node, path: str) -> Any:
        """What a word is called with; there may be words among it: a registry's password."""
        if not isinstance(node, Entries):
            return plain(node)
        return {
            key: plain(value)
            if (word := self._word(value)) is None or not isinstance(value, Entries)
            else self._spoken(word, value, f"{path}.{key}")
            for key, value in node.entries.items()
        }

    def _called(self, make: Callable[[], Any], place: Place, path: str) -> Any:
        try:
            return make()
        except EpochalError as error:
            return self.note(place, f"{path or 'the file'}: {error.message}", error.hint)
        except TypeError as error:
            return self.note(place, f"{path}: {error}")


def _entries(node: Node) -> Entries:
    return typing.cast("Entries", node)


def _by_strictness(hint: Any) -> int:
    """The narrower type first: a text is any text, and only some are one of a few words."""
    shape = shape_of(hint)
    if shape in (Shape.PLAIN, Shape.OTHER):
        return 2 if hint is str or shape is Shape.OTHER else 1
    return 0


def _suits(hint: Any, node: Node) -> bool:
    """Whether a mistake inside `node` is best told in terms of this type."""
    shape = shape_of(hint)
    if isinstance(node, Items):
        return shape is Shape.LIST
    if isinstance(node, Entries):
        return shape in (Shape.MAPPING, Shape.RECORD, Shape.SINK)
    return shape in (Shape.CHOICE, Shape.PLAIN, Shape.NAMED) and hint is not type(None)


def _shown(node: Node) -> str:
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, Entries):
        return "a mapping"
    return "nothing" if node.value is None else repr(node.value)


def _spark_text(node: Text) -> str:
    return str(node.value).lower() if isinstance(node.value, bool) else str(node.value)


def _nearest(word: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
