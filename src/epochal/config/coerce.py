"""
Conversion of a file's nodes to the types of dataclass fields.

The fields of a class define its keys, so a sink's options are declared once, in its own folder. All
mistakes are collected with their lines before any is raised. A value that is not a plain one is
written as a function and its arguments: `password: {env: PGPASSWORD}` is `env("PGPASSWORD")` in
Python. The registry lists these functions and the kinds of sinks.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from epochal import registry
from epochal.config.tree import Entries, Items, Node, Position, Text, plain
from epochal.config.type_hints import Shape, is_required, named, shape_of
from epochal.errors import EpochalError, Misconfigured
from epochal.registry import (
    SYNONYMS,
    function_names,
    imported,
    is_import_path,
    sink_class,
    sink_kinds,
)

T = TypeVar("T")

_MISSING: Any = object()
_KIND = "kind"


@dataclass(frozen=True, slots=True)
class Mistake:
    position: Position
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.position}: {self.message}{f' ({self.hint})' if self.hint else ''}"


class Mistakes(Misconfigured):
    """All mistakes of a file, by line."""

    def __init__(self, message: str, hint: str = "", found: Sequence[Mistake] = ()) -> None:
        super().__init__(message, hint)
        self.found = tuple(found)

    @classmethod
    def of(cls, found: Iterable[Mistake]) -> Mistakes:
        ordered = sorted(found, key=lambda mistake: mistake.position)
        return cls("\n".join(str(mistake) for mistake in ordered), found=ordered)


class Coercer:
    """One pass over a file. A value with a mistake becomes `_MISSING`."""

    def __init__(self, *, finds_names: bool = False) -> None:
        """`finds_names`: gates are imported too. Only a driver must have their modules."""
        self._finds_names = finds_names
        self.mistakes: list[Mistake] = []

    def note(self, position: Position, message: str, hint: str = "") -> Any:
        self.mistakes.append(Mistake(position, message, hint))
        return _MISSING

    def coerce(self, kind: type[T], node: Node, path: str) -> T:
        """Return an instance of a dataclass. Raises `Mistakes` with all mistakes."""
        value = self._dataclass(kind, node, path)
        if self.mistakes:
            raise Mistakes.of(self.mistakes)
        return typing.cast("T", value)

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
        function = self._function(node)
        if function is not None and not any(shape_of(hint) is Shape.MAPPING for hint in hints):
            return self._call(function, _entries(node), path)
        for hint in sorted(hints, key=_by_strictness):
            attempt = Coercer(finds_names=self._finds_names)
            value = attempt._value(hint, node, path)
            if not attempt.mistakes:
                return value
        likely = [hint for hint in hints if _suits(hint, node)]
        if len(likely) == 1:
            return self._value(likely[0], node, path)
        allowed = ", ".join(sorted({named(hint) for hint in hints}))
        return self.note(node.position, f"{path}: {_shown(node)} is none of: {allowed}")

    def _choice(self, hint: Any, node: Node, path: str) -> Any:
        choices = get_args(hint)
        if isinstance(node, Text) and node.value in choices:
            return node.value
        allowed = ", ".join(str(choice) for choice in choices)
        nearest = _nearest(str(plain(node)), [str(choice) for choice in choices])
        return self.note(node.position, f"{path}: {_shown(node)} is none of {allowed}", nearest)

    def _plain(self, hint: Any, node: Node, path: str) -> Any:
        value = node.value if isinstance(node, Text) else _MISSING
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is hint:
            return value
        is_scalar = hint is str and isinstance(value, (int, float))
        return self.note(
            node.position,
            f"{path}: {_shown(node)}, expected {named(hint)}",
            "put it in quotes" if is_scalar else "",
        )

    def _name(self, _hint: Any, node: Node, path: str) -> Any:
        name = self._plain(str, node, path)
        if name is not _MISSING and self._finds_names:
            self._called(lambda: imported(name), node.position, path)
        return name

    def _anything(self, _hint: Any, node: Node, path: str) -> Any:
        function = self._function(node)
        return plain(node) if function is None else self._call(function, _entries(node), path)

    def _several(self, hint: Any, node: Node, path: str) -> Any:
        if not isinstance(node, Items):
            return self.note(
                node.position,
                f"{path}: {_shown(node)}, expected a list",
                "one `- item` per line",
            )
        inner = next(iter(get_args(hint)), Any)
        return tuple(
            self._value(inner, item, f"{path}[{at}]") for at, item in enumerate(node.items)
        )

    def _mapping(self, hint: Any, node: Node, path: str) -> Any:
        if not isinstance(node, Entries):
            return self.note(node.position, f"{path}: {_shown(node)}, expected a mapping")
        inner = (*get_args(hint), Any, Any)[1]
        # All options of Spark are strings: a number or boolean is converted to one.
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
                node.position, f"{path or 'the file'}: {_shown(node)}, expected a mapping"
            )
        return self._made(kind, dict(node.entries), node, path)

    def _made(self, kind: type[Any], entries: dict[str, Node], node: Entries, path: str) -> Any:
        hints = typing.get_type_hints(kind)
        fields = {one.name: one for one in dataclasses.fields(kind) if one.init}
        before = len(self.mistakes)
        values = {}
        for key, value in entries.items():
            if key not in fields:
                position = node.keys.get(key, value.position)
                self.note(
                    position, f"{path or 'the file'}: unknown key {key!r}", _nearest(key, fields)
                )
                continue
            values[key] = self._value(hints[key], value, f"{path}.{key}".lstrip("."))
        for name, one in fields.items():
            if is_required(one) and name not in entries:
                self.note(node.position, f"{path or 'the file'}: {name!r} is missing")
        if len(self.mistakes) > before:
            return _MISSING
        return self._called(lambda: kind(**values), node.position, path)

    def _sink(self, _hint: Any, node: Node, path: str) -> Any:
        if not isinstance(node, Entries) or not isinstance(node.entries.get(_KIND), Text):
            known = ", ".join(sink_kinds())
            return self.note(node.position, f"{path}: a sink needs a kind", f"kind: one of {known}")
        entries = dict(node.entries)
        kind = str(plain(entries.pop(_KIND)))
        if kind not in sink_kinds() and not is_import_path(kind):
            return self.note(
                node.entries[_KIND].position,
                f"{path}: unknown kind {kind!r}",
                _nearest(kind, sink_kinds()),
            )
        sink = self._called(lambda: sink_class(kind), node.entries[_KIND].position, path)
        if sink is _MISSING:
            return _MISSING
        return self._made(sink, self._without_synonyms(entries, sink), node, path)

    def _without_synonyms(self, entries: Mapping[str, Node], kind: type[Any]) -> dict[str, Node]:
        """Return the entries with synonyms replaced by the options of this sink."""
        fields = {one.name for one in dataclasses.fields(kind) if one.init}
        ours: dict[str, Node] = {}
        for key, value in entries.items():
            inner = value.entries if isinstance(value, Entries) and key not in fields else {}
            meant = {name: SYNONYMS.get(f"{key}.{name}") for name in inner}
            if inner and all(name in fields for name in meant.values()):
                ours.update({str(meant[name]): child for name, child in inner.items()})
                continue
            other = SYNONYMS.get(key)
            ours[other if key not in fields and other in fields else key] = value
        return ours

    def _function(self, node: Node) -> str | None:
        """Return the function's name if a node is a call such as `{env: PGPASSWORD}`."""
        if isinstance(node, Entries) and len(node.entries) == 1:
            name = next(iter(node.entries))
            return name if name in function_names() else None
        return None

    def _call(self, name: str, node: Entries, path: str) -> Any:
        arguments = self._arguments(node.entries[name], f"{path}.{name}")

        def call() -> Any:
            function = registry.function(name)
            return function(**arguments) if isinstance(arguments, dict) else function(arguments)

        return self._called(call, node.position, f"{path}.{name}")

    def _arguments(self, node: Node, path: str) -> Any:
        """Return the arguments of a call; they may be calls too: the password of a registry."""
        if not isinstance(node, Entries):
            return plain(node)
        return {
            key: plain(value)
            if (name := self._function(value)) is None or not isinstance(value, Entries)
            else self._call(name, value, f"{path}.{key}")
            for key, value in node.entries.items()
        }

    def _called(self, make: Callable[[], Any], position: Position, path: str) -> Any:
        try:
            return make()
        except EpochalError as error:
            return self.note(position, f"{path or 'the file'}: {error.message}", error.hint)
        except TypeError as error:
            return self.note(position, f"{path}: {error}")


def _entries(node: Node) -> Entries:
    return typing.cast("Entries", node)


def _by_strictness(hint: Any) -> int:
    """Sort narrower types first: every text is a `str`, and few are one of a `Literal`."""
    shape = shape_of(hint)
    if shape in (Shape.PLAIN, Shape.OTHER):
        return 2 if hint is str or shape is Shape.OTHER else 1
    return 0


def _suits(hint: Any, node: Node) -> bool:
    """Return whether a mistake inside `node` is best described in terms of this type."""
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


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
