"""Values in Protobuf, with the id of their schema and the place of the message in it before them.

Nothing is derived from columns here: a field's number is its name on the wire, and numbers drawn
from the order of columns would change their meaning when a column is added.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kafka.varints import constant, join
from epochal.sinks.kafka.values import ALL
from epochal.sinks.kafka.values.binary_columns import is_bytes, is_list, is_text, spread
from epochal.sinks.kafka.values.registry import RegistryValue, missing, registry_at
from epochal.terms import Json

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

    from epochal.kit.secrets import Secret

_TIMESTAMP = "google.protobuf.Timestamp"
_BUILT_IN = ("google/protobuf/", "google/type/", "confluent/")
"""Files that every registry has: they are not registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protobuf(RegistryValue):
    """Columns as one Protobuf message."""

    message: str
    files: bytes = field(repr=False)
    """A FileDescriptorSet: the message's file behind those that it imports."""

    def ready(self, topic: str, kind: pa.DataType, *, is_trial: bool = False) -> Json:
        subject = self.subject_of(topic)
        made = message_class(self.files, self.message)
        fields = plan(made.DESCRIPTOR, kind, "value")
        ask = partial(_front, subject, topic, made)
        if is_trial:
            self.tried(subject, ask, partial(_schema, made))
            return None
        front = self.registered(subject, (self.message, self.files), ask)
        return {"front": base64.b64encode(front).decode(), "fields": fields}

    def encode(self, column: pa.Array, ready: Json) -> pa.Array:
        from epochal.sinks.kafka.values.protobuf_encoding import message  # noqa: PLC0415  only here

        given = cast("Mapping[str, Any]", ready)
        front = constant(base64.b64decode(given["front"]))
        encode = partial(message, given["fields"])
        return spread(column, lambda rows: join([front, encode(rows)]))


def _front(
    subject: str,
    topic: str,
    made: Any,
    client: SchemaRegistryClient,
    is_registering: bool,
) -> bytes:
    """
    The bytes before every message: what the registry's own serializer writes for an empty one. It
    also registers the files that the message's file imports.
    """
    from confluent_kafka.schema_registry.protobuf import (  # noqa: PLC0415  on the driver only
        ProtobufSerializer,
    )
    from confluent_kafka.serialization import (  # noqa: PLC0415  the same
        MessageField,
        SerializationContext,
    )

    settings = {
        "auto.register.schemas": is_registering,
        "subject.name.strategy": lambda _context, _name: subject,
    }
    serializer = ProtobufSerializer(made, client, settings)
    front: bytes = serializer(made(), SerializationContext(topic, MessageField.VALUE))
    return front


def _schema(made: Any) -> Any:
    """None where it can't be judged yet: what it imports must be registered before."""
    if not all(one.name.startswith(_BUILT_IN) for one in made.DESCRIPTOR.file.dependencies):
        return None
    from confluent_kafka.schema_registry import Schema  # noqa: PLC0415  on the driver only

    text = base64.b64encode(made.DESCRIPTOR.file.serialized_pb).decode()
    return Schema(text, schema_type="PROTOBUF")


def protobuf(
    message: Any,
    *columns: str,
    registry: str,
    descriptors: str | os.PathLike[str] | None = None,
    subject: str | None = None,
    auto_register: bool = True,
    username: str | None = None,
    password: Secret | str | None = None,
    ca_file: str | None = None,
    certificate_file: str | None = None,
    key_file: str | None = None,
) -> Protobuf:
    """
    A record's value as a Protobuf message of these columns; of all, if none or `"*"` is named.

    `message` is a class that protoc generated, or the full name of a message in `descriptors`, a
    file of `protoc --include_imports --descriptor_set_out`. Columns go to fields of their names;
    fields without a column stay unset. Only the driver asks the registry.
    """
    files = {"ca_file": ca_file, "certificate_file": certificate_file, "key_file": key_file}
    name, described = _described(message, descriptors)
    return Protobuf(
        columns=columns or (ALL,),
        message=name,
        files=described,
        registry=registry_at(registry, username, password, **files),
        subject=subject,
        auto_register=auto_register,
    )


def _described(message: Any, descriptors: str | os.PathLike[str] | None) -> tuple[str, bytes]:
    if isinstance(message, str):
        if descriptors is None:
            raise Misconfigured(
                f"protobuf: the message {message!r} is named without its descriptors",
                "descriptors=<a file of protoc --include_imports --descriptor_set_out>",
            )
        found = message, Path(descriptors).read_bytes()
        message_class(found[1], found[0])
        return found
    described = getattr(message, "DESCRIPTOR", None)
    if described is None:
        raise Misconfigured(
            f"protobuf: {message!r} is no generated message class",
            "a class of a module that protoc has made; or a name, with descriptors=",
        )
    try:
        from google.protobuf.descriptor_pb2 import FileDescriptorSet  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise missing(error) from error
    taken = FileDescriptorSet()
    _gather_files(described.file, taken, set())
    return described.full_name, taken.SerializeToString()


def _gather_files(described: Any, taken: Any, seen: set[str]) -> None:
    if described.name in seen:
        return
    seen.add(described.name)
    for one in described.dependencies:
        _gather_files(one, taken, seen)
    described.CopyToProto(taken.file.add())


def message_class(files: bytes, name: str) -> Any:
    """The class of a message, made from its descriptors."""
    try:
        from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped]  # noqa: PLC0415
        from google.protobuf.descriptor_pb2 import FileDescriptorSet  # noqa: PLC0415  the same
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise missing(error) from error
    pool = descriptor_pool.DescriptorPool()
    try:
        for one in FileDescriptorSet.FromString(files).file:
            pool.Add(one)
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except (KeyError, TypeError, DecodeError) as error:
        raise Misconfigured(
            f"protobuf: the descriptors have no message {name!r}: {error}",
            "protoc --include_imports --descriptor_set_out=…, and the message's full name",
        ) from None


def plan(message: Any, kind: pa.DataType, path: str) -> list[Json]:
    """How columns are written as fields; raises `Misconfigured` where they don't fit."""
    if not pa.types.is_struct(kind):
        raise Misconfigured(
            f"{path} is {kind}, and {message.full_name} is a message",
            "make a struct of it in the query, or change the message",
        )
    given = {kind.field(index).name: kind.field(index).type for index in range(kind.num_fields)}
    unknown = sorted(given.keys() - message.fields_by_name.keys())
    if unknown:
        raise Misconfigured(
            f"{message.full_name} has no field for {', '.join(unknown)}",
            f"its fields are {', '.join(message.fields_by_name)}; name the columns to be written",
        )
    for one in message.fields:
        if one.is_required:
            raise Misconfigured(
                f"{message.full_name}.{one.name} is required (proto2), which is not written here",
                "optional fields, or proto3",
            )
    ordered = sorted(message.fields, key=lambda one: one.number)
    return [
        _planned(one, given[one.name], f"{path}.{one.name}") for one in ordered if one.name in given
    ]


def _planned(one: Any, kind: pa.DataType, path: str) -> Json:
    if one.is_repeated:
        if one.message_type is not None and one.message_type.GetOptions().map_entry:
            if not pa.types.is_map(kind):
                raise _unfit(one, kind, path)
            kind = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        elif is_list(kind):
            kind = kind.value_type
        else:
            raise _unfit(one, kind, path)
    name = _KINDS.get(one.type)
    found: dict[str, Json] = {"name": one.name, "number": one.number}
    if one.is_repeated:
        found |= {"is_many": True, "is_packed": bool(one.is_packed)}
    elif one.has_presence or one.containing_type.GetOptions().map_entry:
        found |= {"has_presence": True}
    if name == "message":
        if one.message_type.full_name == _TIMESTAMP and pa.types.is_timestamp(kind):
            return found | {"kind": "timestamp"}
        return found | {"kind": name, "fields": plan(one.message_type, kind, path)}
    if name is None or not _takes(name, kind):
        raise _unfit(one, kind, path)
    if name == "enum":
        symbols = {value.name: value.number for value in one.enum_type.values}
        return found | {"kind": name, "symbols": cast("Json", symbols)}
    return found | {"kind": name}


def _takes(name: str, kind: pa.DataType) -> bool:
    if name == "string":
        return bool(is_text(kind) or pa.types.is_decimal(kind) or pa.types.is_date32(kind))
    if name in ("float", "double"):
        return bool(pa.types.is_float32(kind) or (name == "double" and pa.types.is_float64(kind)))
    if name == "enum":
        return bool(is_text(kind) or pa.types.is_integer(kind))
    if name == "bytes":
        return is_bytes(kind)
    return bool(pa.types.is_boolean(kind) if name == "bool" else pa.types.is_integer(kind))


def _unfit(one: Any, kind: pa.DataType, path: str) -> Misconfigured:
    name = _KINDS.get(one.type, "group")
    if name == "message":
        name = one.message_type.full_name
    many = "repeated " if one.is_repeated else ""
    return Misconfigured(
        f"{path} is {kind}, which can't be written as Protobuf's {many}{name}",
        "cast it in the query, or change the message",
    )


_KINDS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    6: "fixed64",
    7: "fixed32",
    8: "bool",
    9: "string",
    11: "message",
    12: "bytes",
    13: "uint32",
    14: "enum",
    15: "sfixed32",
    16: "sfixed64",
    17: "sint32",
    18: "sint64",
}
"""The types of fields by their numbers in a descriptor; 10 is a group, which is not supported."""
