"""
YAML text to values that know their place.

Of YAML only what configuration needs: mappings with text as keys, lists, texts, numbers, `true` and
`false`. Words such as `on` and `no`, and dates, stay the text that they are. `${NAME}` and
`${NAME:-default}` are filled in from the environment, `$${` is a plain `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import yaml

Scalar: TypeAlias = "str | int | float | bool | None"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something stands in a file, both counted from one."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar."""

    place: Place
    value: Scalar


@dataclass(frozen=True, slots=True)
class Items:
    place: Place
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping; each key has a place of its own."""

    place: Place
    entries: Mapping[str, Node]
    keys: Mapping[str, Place]


Node: TypeAlias = "Text | Items | Entries"


class Unreadable(Exception):
    """The text is no YAML of ours."""

    def __init__(self, place: Place, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.place = place
        self.message = message
        self.hint = hint


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of JSON."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own


for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|)$", [*"~n", ""]),
    ("bool", r"^(?:true|false)$", [*"tf"]),
    ("int", r"^-?(?:0|[1-9][0-9_]*)$", [*"-0123456789"]),
    ("float", r"^-?(?:0|[1-9][0-9_]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$", [*"-0123456789"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)

_VARIABLE = re.compile(r"\$(\$)?\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def parse(text: str, file: str, environment: Mapping[str, str]) -> Node:
    """The tree of a file; raises `Unreadable` at the first thing that is no YAML of ours."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise Unreadable(
            _place_of(file, text, error.position), f"not YAML: {error.reason}"
        ) from None
    try:
        root = loader.get_single_node()
        if root is None:
            raise Unreadable(Place(file, 1, 1), "the file is empty", "`epochal init` writes one")
        return _Grower(file, environment, loader).grow(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)
        raise Unreadable(place, f"not YAML: {error.problem or error.context}") from None
    finally:
        loader.dispose()


def _place_of(file: str, text: str, position: int) -> Place:
    before = text[:position]
    return Place(file, before.count("\n") + 1, position - before.rfind("\n"))


@dataclass(frozen=True, slots=True)
class _Grower:
    file: str
    environment: Mapping[str, str]
    loader: _Loader

    def grow(self, node: yaml.Node) -> Node:
        place = self._place(node)
        if isinstance(node, yaml.MappingNode):
            return self._entries(place, node)
        if isinstance(node, yaml.SequenceNode):
            return Items(place, tuple(self.grow(item) for item in node.value))
        return Text(place, self._scalar(place, cast("yaml.ScalarNode", node)))

    def _place(self, node: yaml.Node) -> Place:
        return Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def _entries(self, place: Place, node: yaml.MappingNode) -> Entries:
        entries: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        for key, value in node.value:
            at = self._place(key)
            name = str(getattr(key, "value", ""))
            if not isinstance(key, yaml.ScalarNode):
                raise Unreadable(at, "a key is a word, not a list or a mapping")
            if name in entries:
                raise Unreadable(at, f"{name!r} is there twice", f"the first is at {keys[name]}")
            entries[name], keys[name] = self.grow(value), at
        return Entries(place, entries, keys)

    def _scalar(self, place: Place, node: yaml.ScalarNode) -> Scalar:
        text = _VARIABLE.sub(lambda found: self._filled(place, found), node.value)
        is_plain = node.style is None
        tag = self.loader.resolve(yaml.ScalarNode, text, (is_plain, not is_plain))  # type: ignore[no-untyped-call]
        return _valued(str(tag).rpartition(":")[2], text)

    def _filled(self, place: Place, found: re.Match[str]) -> str:
        if found.group(1):
            return found.group(0)[1:]
        name, default = found.group("name"), found.group("default")
        value = self.environment.get(name, default)
        if value is None:
            raise Unreadable(
                place,
                f"the environment variable {name} is not set",
                f"export {name}=…, or give a default: ${{{name}:-…}}",
            )
        return value


def _valued(tag: str, text: str) -> Scalar:
    if tag == "null":
        return None
    if tag == "bool":
        return text == "true"
    if tag == "int":
        return int(text)
    return float(text) if tag == "float" else text


def plain(node: Node) -> object:
    """The value without its places."""
    if isinstance(node, Text):
        return node.value
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.entries.items()}
