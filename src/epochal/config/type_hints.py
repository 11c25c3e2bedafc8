"""Classification of type hints by the YAML value that they accept."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NewType, Union, get_args, get_origin

from epochal.contract import Sink

PLAIN = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
"""The scalar types of a file, with their names in messages."""


PythonName = NewType("PythonName", str)
"""`module:name` of a Python object."""


class Shape(Enum):
    """The kinds of type hints; the value is the name in messages."""

    CHOICE = "one of a few choices"
    LIST = "a list"
    MAPPING = "a mapping"
    RECORD = "a mapping with fixed keys"
    SINK = "a sink"
    UNION = "one of several"
    PLAIN = "a value"
    NAMED = "module:name"
    OTHER = "anything"


def shape_of(hint: Any) -> Shape:
    origin = get_origin(hint)
    for shape, matches in (
        (Shape.UNION, origin in (Union, types.UnionType)),
        (Shape.CHOICE, origin is Literal),
        (Shape.SINK, hint is Sink),
        (Shape.RECORD, dataclasses.is_dataclass(hint)),
        (Shape.MAPPING, isinstance(origin, type) and issubclass(origin, Mapping)),
        (Shape.LIST, isinstance(origin, type) and issubclass(origin, Sequence)),
        (Shape.PLAIN, hint in PLAIN),
        (Shape.NAMED, hint is PythonName),
    ):
        if matches:
            return shape
    return Shape.OTHER


def named(hint: Any) -> str:
    shape = shape_of(hint)
    if shape is Shape.CHOICE:
        return " | ".join(str(choice) for choice in get_args(hint))
    return PLAIN[hint] if shape is Shape.PLAIN else shape.value


def is_required(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
