"""Values in Protobuf: read back by the registry's own deserializer, refused early."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, json_format, timestamp_pb2
from kafka_broker import Broker
from servers.apicurio import Apicurio
from servers.registry import Registry

import epochal as ep
from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.kafka.values.protobuf import message_class

UTC = dt.UTC
SCALARS = {
    "double": (pa.float64(), -0.1),
    "float": (pa.float32(), 0.5),
    "int64": (pa.int64(), -(2**63)),
    "uint64": (pa.uint64(), 2**64 - 1),
    "int32": (pa.int32(), -1),
    "fixed64": (pa.uint64(), 2**64 - 2),
    "fixed32": (pa.uint32(), 2**32 - 1),
    "bool": (pa.bool_(), True),
    "string": (pa.string(), "Żółć"),
    "bytes": (pa.binary(), b"\x00\xff"),
    "uint32": (pa.uint32(), 2**32 - 1),
    "sfixed32": (pa.int32(), -5),
    "sfixed64": (pa.int64(), -6),
    "sint32": (pa.int32(), -(2**31)),
    "sint64": (pa.int64(), 2**63 - 1),
}


def _descriptors() -> bytes:

    files = descriptor_pb2.FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    shop = files.file.add(name="shop.proto", package="shop", syntax="proto3")
    shop.dependency.append("google/protobuf/timestamp.proto")
    shop.message_type.add(name="Other")
    state = shop.enum_type.add(name="State")
    state.value.add(name="NEW", number=0)
    state.value.add(name="PAID", number=5)
    order = shop.message_type.add(name="Order")
    field = descriptor_pb2.FieldDescriptorProto
    room = order.nested_type.add(name="Room")
    room.field.add(name="n", number=2, type=field.TYPE_SINT32, label=1)
    entry = order.nested_type.add(name="NamesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=field.TYPE_INT64, label=1)
    for number, kind in enumerate(SCALARS, 1):
        code = getattr(field, f"TYPE_{kind.upper()}")
        order.field.add(name=f"a_{kind}", number=number, type=code, label=1)
        order.field.add(name=f"many_{kind}", number=number + 100, type=code, label=3)
        order.oneof_decl.add(name=f"_o_{kind}")
        order.field.add(
            name=f"o_{kind}",
            number=number + 200,
            type=code,
            label=1,
            proto3_optional=True,
            oneof_index=number - 1,
        )
    for name, number, kind, label, type_name in (
        ("state", 50, field.TYPE_ENUM, 1, ".shop.State"),
        ("states", 51, field.TYPE_ENUM, 3, ".shop.State"),
        ("at", 52, field.TYPE_MESSAGE, 1, ".google.protobuf.Timestamp"),
        ("room", 53, field.TYPE_MESSAGE, 1, ".shop.Order.Room"),
        ("rooms", 54, field.TYPE_MESSAGE, 3, ".shop.Order.Room"),
        ("names", 55, field.TYPE_MESSAGE, 3, ".shop.Order.NamesEntry"),
        ("self", 56, field.TYPE_MESSAGE, 1, ".shop.Order"),
    ):
        order.field.add(name=name, number=number, type=kind, label=label, type_name=type_name)
    return files.SerializeToString()


ORDER_CLASS = message_class(_descriptors(), "shop.Order")
PROTO = {
    **{f"a_{kind}": arrow for kind, (arrow, _) in SCALARS.items()},
    **{f"o_{kind}": arrow for kind, (arrow, _) in SCALARS.items()},
    **{f"many_{kind}": pa.list_(arrow) for kind, (arrow, _) in SCALARS.items()},
    "state": pa.string(),
    "states": pa.list_(pa.string()),
    "room": pa.struct([("n", pa.int32())]),
    "rooms": pa.list_(pa.struct([("n", pa.int32())])),
    "names": pa.map_(pa.string(), pa.int64()),
}
PROTO_FULL: dict[str, Any] = {
    **{f"a_{kind}": value for kind, (_, value) in SCALARS.items()},
    **{f"o_{kind}": type(value)() for kind, (_, value) in SCALARS.items()},
    **{f"many_{kind}": [value, type(value)(), value] for kind, (_, value) in SCALARS.items()},
    "state": "PAID",
    "states": ["NEW", "PAID"],
    "room": {"n": -4},
    "rooms": [{"n": 1}, {"n": None}],
    "names": {"a": 1, "b": 0},
}
PROTO_NULL = dict.fromkeys(PROTO)
PROTO_BARE = {
    **{name: None for name in PROTO if name.startswith(("o_", "many_"))},
    **{f"a_{kind}": type(value)() for kind, (_, value) in SCALARS.items()},
    "state": "NEW",
    "states": [],
    "room": {"n": None},
    "rooms": [],
    "names": {},
}


def message_of(row: dict[str, Any]) -> Any:
    """The same message, made by protobuf."""
    made = ORDER_CLASS()
    for name, value in row.items():
        if value is None:
            continue
        if name == "room":
            made.room.SetInParent()
            made.room.n = value["n"] or 0
        elif name == "rooms":
            for one in value:
                made.rooms.add(n=one["n"] or 0)
        elif name in ("state", "states"):
            numbers = {"NEW": 0, "PAID": 5}
            if name == "state":
                made.state = numbers[value]
            else:
                made.states.extend(numbers[one] for one in value)
        elif name == "names":
            made.names.update(value)
        elif name.startswith("many_"):
            getattr(made, name).extend(value)
        else:
            setattr(made, name, value)
    return made


def proto_table(*rows: dict[str, Any]) -> pa.Table:
    listed = [row | {"names": row["names"] and list(row["names"].items())} for row in rows]
    return pa.Table.from_pylist(listed, schema=pa.schema(list(PROTO.items())))


def proto_rows(kafka: Broker, registry: Registry | Apicurio, topic: str) -> list[Any]:
    with SchemaRegistryClient({"url": registry.url}) as client:
        read = ProtobufDeserializer(ORDER_CLASS, {"use.deprecated.format": False}, client)
        return [
            read(message.value(), SerializationContext(topic, MessageField.VALUE))
            for message in kafka.messages(topic)
        ]


def test_rows_of_every_type_are_read_back_by_the_registrys_protobuf_deserializer(
    kafka: Broker, registry: Registry
) -> None:
    topic = kafka.topic()
    rows = [PROTO_FULL, PROTO_NULL, PROTO_BARE]
    life = kafka.life(topic, value=ep.protobuf(ORDER_CLASS, registry=registry.url))
    life.committer.check(proto_table(*rows).schema)
    assert registry.subjects == {}
    life.write(0, proto_table(*rows))
    found = proto_rows(kafka, registry, topic)
    assert found == [message_of(row) for row in rows]
    values = [message.value() for message in kafka.messages(topic)]
    assert [one[:7] for one in values] == [b"\x00\x00\x00\x00\x01\x02\x02"] * 3
    assert values[1][7:] == b""
    assert [one.HasField("o_int32") for one in found] == [True, False, False]


def test_rows_are_read_back_by_the_schema_that_a_real_registry_keeps(
    kafka: Broker, apicurio: Apicurio
) -> None:
    topic = kafka.topic()
    rows = [PROTO_FULL, PROTO_NULL, PROTO_BARE]
    life = kafka.life(topic, value=ep.protobuf(ORDER_CLASS, registry=apicurio.url))
    life.write(0, proto_table(*rows))
    assert proto_rows(kafka, apicurio, topic) == [message_of(row) for row in rows]


def test_a_message_may_be_named_in_a_file_of_descriptors_and_instants_are_timestamps(
    kafka: Broker, registry: Registry, tmp_path: Path
) -> None:
    topic, described = kafka.topic(), tmp_path / "shop.pb"
    described.write_bytes(_descriptors())
    value = ep.protobuf("shop.Order", "a_int64", "at", registry=registry.url, descriptors=described)
    kind = pa.timestamp("us", tz="UTC")
    instants = [
        dt.datetime(2026, 1, 31, 9, 30, 0, 123456, tzinfo=UTC),
        dt.datetime(1960, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
        None,
    ]
    kind = pa.timestamp("us", tz="UTC")
    rows = pa.table({"a_int64": [1, 2, 3], "at": pa.array(instants, kind), "other": [1, 2, 3]})
    kafka.life(topic, value=value).write(0, rows)
    found = proto_rows(kafka, registry, topic)
    assert [one.at.ToDatetime(UTC) for one in found[:2]] == instants[:2]
    assert json_format.MessageToDict(found[2]) == {"aInt64": "3"}


def test_what_a_message_imports_is_registered_and_referred_to(
    kafka: Broker, registry: Registry, tmp_path: Path
) -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(_descriptors())
    cart = files.file.add(name="cart.proto", package="shop", syntax="proto3")
    cart.dependency.append("shop.proto")
    first = cart.message_type.add(name="Cart").field.add(name="first", number=1, label=1)
    first.type, first.type_name = first.TYPE_MESSAGE, ".shop.Order"
    described, topic = tmp_path / "cart.pb", kafka.topic()
    described.write_bytes(files.SerializeToString())
    value = ep.protobuf("shop.Cart", registry=registry.url, descriptors=described)
    rows = pa.table({"first": [{"a_int64": 5}, None]})
    life = kafka.life(topic, value=value)
    life.committer.check(rows.schema)
    assert registry.subjects == {}
    life.write(0, rows)
    assert list(registry.subjects) == ["shop.proto", f"{topic}-value"]
    assert registry.schemas[1]["references"] == [
        {"name": "shop.proto", "subject": "shop.proto", "version": 1}
    ]
    cart_class = message_class(described.read_bytes(), "shop.Cart")
    with SchemaRegistryClient({"url": registry.url}) as client:
        read = ProtobufDeserializer(cart_class, {"use.deprecated.format": False}, client)
        context = SerializationContext(topic, MessageField.VALUE)
        found = [read(message.value(), context) for message in kafka.messages(topic)]
    assert [(one.HasField("first"), one.first.a_int64) for one in found] == [(True, 5), (False, 0)]


PROTO_REFUSED = {
    "has no field for strange": {"strange": pa.int64()},
    "can't be written as Protobuf's int64": {"a_int64": pa.string()},
    "can't be written as Protobuf's repeated int64": {"many_int64": pa.int64()},
    "is a message": {"room": pa.int64()},
}


@pytest.mark.parametrize("why", PROTO_REFUSED)
def test_columns_that_do_not_fit_a_message_are_refused_before_the_first_row(
    kafka: Broker, registry: Registry, why: str
) -> None:
    life = kafka.life(kafka.topic(), value=ep.protobuf(ORDER_CLASS, registry=registry.url))
    with pytest.raises(Misconfigured, match=why):
        life.committer.check(pa.schema(list(PROTO_REFUSED[why].items())))


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("state", "LOST", pa.string()),
        ("a_int32", 2**40, pa.int64()),
        ("a_uint32", -1, pa.int64()),
        ("many_int64", [1, None], pa.list_(pa.int64())),
    ],
)
def test_a_row_that_does_not_fit_a_message_is_rejected_and_nothing_is_seen(
    kafka: Broker, registry: Registry, column: str, value: Any, kind: pa.DataType
) -> None:
    topic = kafka.topic()
    life = kafka.life(topic, value=ep.protobuf(ORDER_CLASS, registry=registry.url))
    with pytest.raises(RowRejected, match=column):
        life.write(0, pa.table({column: pa.array([value], kind)}))
    assert kafka.messages(topic) == []


def test_a_message_without_descriptors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="without its descriptors"):
        ep.protobuf("shop.Order", registry="http://127.0.0.1:1")
    described = tmp_path / "shop.pb"
    described.write_bytes(_descriptors())
    with pytest.raises(Misconfigured, match="have no message"):
        ep.protobuf("shop.Nothing", registry="http://127.0.0.1:1", descriptors=described)
    with pytest.raises(Misconfigured, match="no generated message class"):
        ep.protobuf(dict, registry="http://127.0.0.1:1")
