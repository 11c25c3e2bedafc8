"""The JSON schema of a pipeline's file, for completion and checks in editors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from epochal.config.file import LISTS_OF_ONE, PipelineFile
from epochal.config.type_hints import Shape, is_required, shape_of
from epochal.registry import SYNONYMS, function_names, sink_class, sink_kinds

IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""The kind of a sink that is named by its class: its options are not known to an editor."""
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a pipeline's file, with all sinks of the registry."""
    writer = _SchemaWriter()
    schema = writer.of_class(PipelineFile)
    for key in LISTS_OF_ONE:
        several = schema["properties"][key]
        schema["properties"][key] = {"anyOf": [several, several["items"]]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An epochal pipeline",
        **schema,
        "$defs": writer.definitions(),
    }


class _SchemaWriter:
    def definitions(self) -> dict[str, Any]:
        sinks = {kind: self._of_sink(kind, sink_class(kind)) for kind in sink_kinds()}
        return {
            "sink": {
                "type": "object",
                "required": ["kind"],
                "properties": {
                    "kind": {"anyOf": [{"enum": list(sinks)}, {"pattern": IMPORT_PATH}]}
                },
                "allOf": [
                    {
                        "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                        "then": schema,
                    }
                    for kind, schema in sinks.items()
                ],
            },
            "call": {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 1,
                "properties": dict.fromkeys(function_names(), True),
                "additionalProperties": False,
            },
        }

    def _of_sink(self, kind: str, sink_class: type[Any]) -> dict[str, Any]:
        schema = self.of_class(sink_class)
        schema["properties"] = {"kind": {"const": kind}, **schema["properties"]}
        schema["properties"].update(self._synonyms(schema["properties"]))
        # An option with a synonym may be given under that name instead.
        schema["required"] = [name for name in schema["required"] if name not in SYNONYMS.values()]
        return schema

    def _synonyms(self, known: Mapping[str, Any]) -> dict[str, Any]:
        added: dict[str, Any] = {}
        for other, ours in SYNONYMS.items():
            if ours not in known:
                continue
            outer, _, inner = other.partition(".")
            if inner:
                inside = added.setdefault(outer, {"type": "object", "properties": {}})
                inside["properties"][inner] = known[ours]
            elif outer not in known:
                added[outer] = known[ours]
        return added

    def of_class(self, kind: type[Any]) -> dict[str, Any]:
        hints, docstrings = typing.get_type_hints(kind), _docstrings(kind)
        properties, required = {}, []
        for one in dataclasses.fields(kind):
            if not one.init:
                continue
            about = {"description": docstrings[one.name]} if one.name in docstrings else {}
            properties[one.name] = {**self._of(hints[one.name]), **about}
            if is_required(one):
                required.append(one.name)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def _of(self, hint: Any) -> dict[str, Any]:
        return self._by_shape[shape_of(hint)](hint)

    @property
    def _by_shape(self) -> Mapping[Shape, Callable[[Any], dict[str, Any]]]:
        return {
            Shape.UNION: lambda hint: self._one_of(get_args(hint)),
            Shape.CHOICE: lambda hint: {"enum": list(get_args(hint))},
            Shape.SINK: lambda _: {"$ref": "#/$defs/sink"},
            Shape.RECORD: self.of_class,
            Shape.LIST: lambda hint: {"type": "array", "items": self._of(get_args(hint)[0])},
            Shape.MAPPING: self._mapping,
            Shape.PLAIN: lambda hint: {"type": _PLAIN[hint]},
            Shape.NAMED: lambda _: {"type": _PLAIN[str]},
            Shape.OTHER: lambda _: {},
        }

    def _mapping(self, hint: Any) -> dict[str, Any]:
        inner = get_args(hint)[1]
        # Options of Spark may also be written as numbers or booleans.
        values = {"type": ["string", "number", "boolean"]} if inner is str else self._of(inner)
        return {"type": "object", "additionalProperties": values}

    def _one_of(self, hints: Sequence[Any]) -> dict[str, Any]:
        several = [schema for schema in map(self._of, hints) if schema]
        if len(several) < len(hints) or any(_is_made_by_call(hint) for hint in hints):
            several.append({"$ref": "#/$defs/call"})
        return several[0] if len(several) == 1 else {"anyOf": several}


def _is_made_by_call(hint: Any) -> bool:
    """Return whether only a call makes such a value: a secret, an encoding."""
    return shape_of(hint) is Shape.RECORD


def _docstrings(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings below the fields of a class and its bases."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        statements = getattr(body, "body", [])
        for field, after in itertools.pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = _text_of(after)
                if text:
                    found[field.target.id] = text
    return found


def _text_of(statement: ast.stmt) -> str:
    is_text = (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
    return " ".join(statement.value.value.split()) if is_text else ""  # type: ignore[attr-defined]
