"""Kafka's message schemas, read. Used by kafka_schemas.py."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
WIDTH = {"?": 1, "b": 1, "h": 2, "H": 2, "i": 4, "q": 8, "d": 8, "16s": 16}
PYTHON = {
    "bool": "bool",
    "string": "str",
    "bytes": "bytes",
    "records": "Records",
    "uuid": "Uuid",
    "float64": "float",
}
FOREVER = 32767


@dataclass(frozen=True)
class Versions:
    """An inclusive range, as in "3-7", "3+", "3" or "none"."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Versions:
        if text == "none":
            return cls(1, 0)
        if text.endswith("+"):
            return cls(int(text[:-1]), FOREVER)
        low, _, high = text.partition("-")
        return cls(int(low), int(high or low))

    def __contains__(self, version: int) -> bool:
        return self.low <= version <= self.high


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    versions: Versions
    nullable: Versions
    tagged: Versions
    tag: int
    default: str | None
    ignorable: bool
    never_compact: bool

    @property
    def element(self) -> str:
        return self.type.removeprefix("[]")

    @property
    def is_array(self) -> bool:
        return self.type.startswith("[]")

    @property
    def is_struct(self) -> bool:
        return self.element[0].isupper()

    def python_type(self) -> str:
        name = self.element if self.is_struct else PYTHON.get(self.element, "int")
        name = f"list[{name}]" if self.is_array else name
        return f"{name} | None" if self.nullable.low <= self.nullable.high else name

    def default_value(self) -> str:  # noqa: PLR0911  a value a type
        """A Python expression for the value of this field where nothing says another."""
        if self.default == "null" or self.type == "records":
            return "None"
        if self.is_array or self.is_struct:
            return "[]" if self.is_array else f"{self.element}()"
        match self.type:
            case "bool":
                return str((self.default or "false").lower() == "true")
            case "string":
                return json.dumps(self.default or "")
            case "bytes":
                return 'b""'
            case "uuid":
                return "NO_UUID"
            case "float64":
                return str(float(self.default or "0"))
        return str(int(self.default or "0", 0))

    def declaration(self) -> str:
        value = self.default_value()
        if self.is_array and value == "[]":
            value = "field(default_factory=list)"
        elif self.is_struct and not self.is_array and value != "None":
            value = f"field(default_factory={self.element})"
        return f"    {self.name}: {self.python_type()} = {value}"


@dataclass(frozen=True)
class Struct:
    name: str
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Schema:
    """One message: its own struct and those it is made of, innermost first."""

    name: str
    api_key: int
    versions: Versions
    flexible: Versions
    structs: tuple[Struct, ...]

    def struct(self, name: str) -> Struct:
        return next(struct for struct in self.structs if struct.name == name)

    def reach(self, name: str) -> list[int]:
        """The versions of the message in which the struct occurs."""
        if name == self.name:
            return list(range(self.versions.low, self.versions.high + 1))
        return sorted(
            {
                version
                for struct in self.structs
                for field in struct.fields
                if field.is_struct and field.element == name
                for version in self.reach(struct.name)
                if version in field.versions
            }
        )

    def layout(self, name: str, version: int) -> str:
        """What decides the bytes of a struct: equal layouts share their functions."""
        parts = [str(version in self.flexible)]
        for field in self.struct(name).fields:
            if version not in field.versions:
                continue
            inner = self.layout(field.element, version) if field.is_struct else ""
            parts.append(
                f"{field.name} {version in field.nullable} {version in field.tagged} ({inner})"
            )
        return ";".join(parts)

    def first_alike(self, name: str, version: int) -> int:
        """The lowest version from which on the layout is that of `version`."""
        reach = self.reach(name)
        layout = self.layout(name, version)
        while version - 1 in reach and self.layout(name, version - 1) == layout:
            version -= 1
        return version

    def layouts(self, name: str) -> list[int]:
        return sorted({self.first_alike(name, version) for version in self.reach(name)})


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def parse_field(raw: dict[str, str], name: str) -> Field:
    return Field(
        name=name,
        type=raw["type"],
        versions=Versions.parse(raw["versions"]),
        nullable=Versions.parse(raw.get("nullableVersions", "none")),
        tagged=Versions.parse(raw.get("taggedVersions", "none")),
        tag=int(raw.get("tag", -1)),
        default=None if raw.get("default") is None else str(raw["default"]),
        ignorable=str(raw.get("ignorable", False)).lower() == "true",
        never_compact=raw.get("flexibleVersions") == "none",
    )


def _rename(raw: Any, taken: Collection[str]) -> None:
    for common in raw.get("commonStructs", []):
        if common["name"] in taken:
            common["name"] = f"Response{common['name']}"
        _rename(common, taken)
    for field in raw.get("fields", []):
        element = field["type"].removeprefix("[]")
        if element in taken:
            field["type"] = field["type"].replace(element, f"Response{element}")
        _rename(field, taken)


def parse_schema(text: str, taken: Collection[str] = ()) -> Schema:
    """`taken` are names of structs of the request: a response's own of these names gets another."""
    raw = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    _rename(raw, taken)
    versions = Versions.parse(raw["validVersions"])
    if raw.get("latestVersionUnstable"):
        # Brokers hide it unless told otherwise, and its layout may still change.
        versions = Versions(versions.low, versions.high - 1)
    structs: list[Struct] = []

    def walk(name: str, fields: list[dict[str, str]]) -> None:
        for field in fields:
            if "fields" in field:
                walk(field["type"].removeprefix("[]"), field["fields"])  # type: ignore[arg-type]
        known = [parse_field(field, snake(field["name"])) for field in fields]
        alive = tuple(f for f in known if f.versions.low <= versions.high)
        structs.append(Struct(name, alive))

    for common in reversed(raw.get("commonStructs", [])):
        walk(common["name"], common["fields"])
    walk(raw["name"], raw["fields"])
    return Schema(
        name=raw["name"],
        api_key=raw.get("apiKey", -1),
        versions=versions,
        flexible=Versions.parse(raw["flexibleVersions"]),
        structs=tuple(structs),
    )
