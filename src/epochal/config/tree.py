"""
The YAML parser: text to nodes with positions.

It accepts the part of YAML that configuration needs: mappings with text as keys, lists, text,
numbers, `true` and `false`. `on`, `no` and dates are text. `${NAME}` and `${NAME:-default}` are
replaced from the environment, `$${` is a literal `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import yaml

Scalar: TypeAlias = "str | int | float | bool | None"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A position in a file. Line and column count from one."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar."""

    position: Position
    value: Scalar


@dataclass(frozen=True, slots=True)
class Items:
    position: Position
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping, with the position of each key."""

    position: Position
    entries: Mapping[str, Node]
    keys: Mapping[str, Position]


Node: TypeAlias = "Text | Items | Entries"


class Unreadable(Exception):
    """The text is not YAML, or not of the accepted part."""

    def __init__(self, position: Position, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.position = position
        self.message = message
        self.hint = hint


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of JSON."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own


for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|)$", [*"~n", ""]),
    ("bool", r"^(?:true|false)$", [*"tf"]),
    ("int", r"^-?(?:0|[1-9](?:_?[0-9])*)$", [*"-0123456789"]),
    ("float", r"^-?(?:0|[1-9](?:_?[0-9])*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$", [*"-0123456789"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)

_VARIABLE = re.compile(r"\$(\$)?\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def parse(text: str, file: str, environment: Mapping[str, str]) -> Node:
    """Parse a file. Raises `Unreadable` at the first error."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise Unreadable(
            _position_of(file, text, error.position), f"not YAML: {error.reason}"
        ) from None
    try:
        root = loader.get_single_node()
        if root is None:
            raise Unreadable(Position(file, 1, 1), "the file is empty", "`epochal init` writes one")
        return _Builder(file, environment, loader).build(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = Position(file, mark.line + 1, mark.column + 1) if mark else Position(file, 1, 1)
        raise Unreadable(position, f"not YAML: {error.problem or error.context}") from None
    finally:
        loader.dispose()


def _position_of(file: str, text: str, position: int) -> Position:
    before = text[:position]
    return Position(file, before.count("\n") + 1, position - before.rfind("\n"))


@dataclass(frozen=True, slots=True)
class _Builder:
    file: str
    environment: Mapping[str, str]
    loader: _Loader

    def build(self, node: yaml.Node) -> Node:
        position = self._position(node)
        if isinstance(node, yaml.MappingNode):
            return self._entries(position, node)
        if isinstance(node, yaml.SequenceNode):
            return Items(position, tuple(self.build(item) for item in node.value))
        return Text(position, self._scalar(position, cast("yaml.ScalarNode", node)))

    def _position(self, node: yaml.Node) -> Position:
        return Position(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def _entries(self, position: Position, node: yaml.MappingNode) -> Entries:
        entries: dict[str, Node] = {}
        keys: dict[str, Position] = {}
        for key, value in node.value:
            at = self._position(key)
            name = str(getattr(key, "value", ""))
            if not isinstance(key, yaml.ScalarNode):
                raise Unreadable(at, "a key must be text, not a list or a mapping")
            if name in entries:
                raise Unreadable(at, f"{name!r} occurs twice", f"the first is at {keys[name]}")
            entries[name], keys[name] = self.build(value), at
        return Entries(position, entries, keys)

    def _scalar(self, position: Position, node: yaml.ScalarNode) -> Scalar:
        text = _VARIABLE.sub(lambda found: self._substitute(position, found), node.value)
        is_plain = node.style is None
        tag = self.loader.resolve(yaml.ScalarNode, text, (is_plain, not is_plain))  # type: ignore[no-untyped-call]
        return _typed(str(tag).rpartition(":")[2], text)

    def _substitute(self, position: Position, found: re.Match[str]) -> str:
        if found.group(1):
            return found.group(0)[1:]
        name, default = found.group("name"), found.group("default")
        value = self.environment.get(name, default)
        if value is None:
            raise Unreadable(
                position,
                f"the environment variable {name} is not set",
                f"export {name}=…, or give a default: ${{{name}:-…}}",
            )
        return value


def _typed(tag: str, text: str) -> Scalar:
    if tag == "null":
        return None
    if tag == "bool":
        return text == "true"
    if tag == "int":
        return int(text)
    return float(text) if tag == "float" else text


def plain(node: Node) -> object:
    """Return the value without positions."""
    if isinstance(node, Text):
        return node.value
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.entries.items()}
