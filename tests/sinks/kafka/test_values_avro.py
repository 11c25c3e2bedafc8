"""Values in Avro: read back by the registry's own deserializer, refused early."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka_broker import Broker
from servers.ports import free_port
from servers.registry import Registry, running_registry

import epochal as ep
from epochal.errors import Misconfigured, RowRejected, TryAgain
from epochal.session import Session
from epochal.sinks.kafka.values.avro import derived
from epochal.sinks.kafka.values.avro_encoding import encoder
from epochal.spark.pipeline import Pipeline

UTC = dt.UTC
KINDS = {
    "b": pa.bool_(),
    "i": pa.int32(),
    "l": pa.int64(),
    "f": pa.float32(),
    "d": pa.float64(),
    "s": pa.string(),
    "x": pa.binary(),
    "m": pa.decimal128(38, 4),
    "day": pa.date32(),
    "at": pa.timestamp("us", tz="UTC"),
    "local": pa.timestamp("us"),
    "many": pa.list_(pa.int64()),
    "names": pa.map_(pa.string(), pa.string()),
    "home": pa.struct(
        [("street", pa.string()), ("rooms", pa.list_(pa.struct([("n", pa.int16())])))]
    ),
}
FULL: dict[str, Any] = {
    "b": True,
    "i": -(2**31),
    "l": 2**63 - 1,
    "f": 0.5,
    "d": -0.1,
    "s": "Żółć",
    "x": b"\x00\xff",
    "m": decimal.Decimal("-12345678901234567890123456789012.3456"),
    "day": dt.date(1969, 12, 31),
    "at": dt.datetime(2026, 1, 31, 9, 30, 0, 123456, tzinfo=UTC),
    "local": dt.datetime(1960, 1, 1, 0, 0, 0, 1, tzinfo=UTC).replace(tzinfo=None),
    "many": [1, None, -300],
    "names": {"a": "b", "c": None},
    "home": {"street": "Elm", "rooms": [{"n": 4}, None, {"n": None}]},
}
EMPTY = dict.fromkeys(FULL)
BARE = FULL | {"many": [], "names": {}, "home": {"street": None, "rooms": []}, "s": "", "x": b""}

both = pytest.mark.parametrize("registry", ["stand-in", "apicurio"], indirect=True)


def table(*rows: dict[str, Any]) -> pa.Table:
    listed = [
        {
            name: list(v.items()) if name == "names" and v is not None else v
            for name, v in row.items()
        }
        for row in rows
    ]
    return pa.Table.from_pylist(listed, schema=pa.schema(list(KINDS.items())))


def context(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def avro_rows(kafka: Broker, registry: Registry, topic: str) -> list[Any]:
    with SchemaRegistryClient({"url": registry.url}) as client:
        read = AvroDeserializer(client)
        return [read(message.value(), context(topic)) for message in kafka.messages(topic)]


# Avro


@both
def test_rows_of_every_type_are_read_back_by_the_registrys_avro_deserializer(
    kafka: Broker, registry: Registry
) -> None:
    topic = kafka.topic()
    rows = [FULL, EMPTY, BARE, FULL | {"m": decimal.Decimal("0.0128")}]
    kafka.life(topic, value=ep.avro("*", registry=registry.url)).write(0, table(*rows))
    found = avro_rows(kafka, registry, topic)
    assert [
        one | {"local": one["local"] and one["local"].replace(tzinfo=None)} for one in found
    ] == rows


@pytest.mark.parametrize("rows", [[FULL, EMPTY, BARE], [FULL], [EMPTY, EMPTY]])
def test_columns_give_the_bytes_that_the_registrys_avro_serializer_gives(
    registry: Registry, rows: list[dict[str, Any]]
) -> None:
    column = table(*rows).to_struct_array().combine_chunks()
    value = ep.avro("*", registry=registry.url, record="shop.Order")
    handed = value.ready("orders", column.type)
    schema = derived(column.type, "shop.Order")
    with SchemaRegistryClient({"url": registry.url}) as client:
        theirs = AvroSerializer(client, schema, conf={"auto.register.schemas": False})
        assert value.encode(column, handed).to_pylist() == [
            theirs(row, context("orders")) for row in rows
        ]


SCHEMA = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "before", "type": ["State", "null"]},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
        {
            "name": "price",
            "type": {
                "type": "fixed",
                "name": "Price",
                "size": 4,
                "logicalType": "decimal",
                "precision": 9,
                "scale": 2,
            },
        },
        {"name": "source", "type": "string", "default": "shop"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
ORDER = {
    "id": 7,
    "state": "PAID",
    "before": None,
    "hash": b"\x01\x02",
    "price": decimal.Decimal("-3.07"),
    "at": dt.datetime(2026, 1, 31, 9, 30, tzinfo=UTC),
}
ORDERS = pa.schema(
    {
        "id": pa.int32(),
        "state": pa.string(),
        "before": pa.string(),
        "hash": pa.binary(),
        "price": pa.decimal128(9, 2),
        "at": pa.timestamp("us", tz="UTC"),
    }.items()
)


@both
def test_a_given_schema_decides_and_its_defaults_fill_fields_without_a_column(
    kafka: Broker, registry: Registry
) -> None:
    topic = kafka.topic()
    rows = [ORDER, ORDER | {"before": "NEW", "price": decimal.Decimal("9.99")}]
    sink = kafka.life(topic, value=ep.avro("*", registry=registry.url, schema=SCHEMA))
    sink.write(0, pa.Table.from_pylist(rows, schema=ORDERS))
    assert avro_rows(kafka, registry, topic) == [row | {"source": "shop"} for row in rows]


def test_a_union_of_several_types_is_written_row_by_row(kafka: Broker, registry: Registry) -> None:
    topic = kafka.topic()
    fields = [{"name": "v", "type": ["null", "long", "string"]}]
    schema = {"type": "record", "name": "Any", "fields": fields}
    value = ep.avro("v", registry=registry.url, schema=schema)
    kafka.life(topic, value=value).write(0, pa.table({"v": ["one", None], "w": [1, 2]}))
    assert avro_rows(kafka, registry, topic) == [{"v": "one"}, {"v": None}]


@both
def test_the_latest_schema_of_a_subject_may_be_asked_for(kafka: Broker, registry: Registry) -> None:
    topic = kafka.topic()
    with SchemaRegistryClient({"url": registry.url}) as client:
        client.register_schema("shop.orders", Schema(json.dumps(SCHEMA), "AVRO"))
    value = ep.avro(registry=registry.url, schema="latest", subject="shop.orders")
    kafka.life(topic, value=value).write(0, pa.Table.from_pylist([ORDER], schema=ORDERS))
    assert avro_rows(kafka, registry, topic) == [ORDER | {"source": "shop"}]


ints = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "l": st.none() | ints,
                "x": st.none() | st.binary(max_size=200),
                "m": st.none() | st.decimals(-(10**33), 10**33, places=4),
                "many": st.none() | st.lists(st.none() | ints, max_size=70),
                "home": st.none()
                | st.fixed_dictionaries(
                    {"street": st.none() | st.text(max_size=5), "rooms": st.none()}
                ),
            }
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 3),
)
def test_any_rows_and_slices_of_them_are_read_back_by_fastavro(
    rows: list[dict[str, Any]], start: int
) -> None:
    kind = pa.struct([(name, KINDS[name]) for name in rows[0]])
    column = pa.array(rows, kind).slice(start)
    schema = derived(kind, "Value")
    parsed = fastavro.parse_schema(json.loads(schema))
    found = encoder(schema, kind)(column).to_pylist()
    assert [_read(parsed, one) for one in found] == rows[start:]


def _read(schema: Any, content: bytes) -> Any:
    import io

    source = io.BytesIO(content)
    found = fastavro.schemaless_reader(source, schema, None)
    assert not source.read(), "bytes are left over"
    return found


# What is refused, and when


def test_a_trial_registers_nothing_and_the_first_epoch_does(
    kafka: Broker, registry: Registry
) -> None:
    rows = table(FULL)
    life = kafka.life(kafka.topic(), value=ep.avro(registry=registry.url))
    life.committer.check(rows.schema)
    assert registry.subjects == {}
    life.begin(0)
    assert list(registry.subjects) == [f"{life.sink.topic}-value"]


def test_tasks_get_the_schema_and_never_ask_the_registry(kafka: Broker, registry: Registry) -> None:
    rows = table(FULL)
    life = kafka.life(kafka.topic(), value=ep.avro(registry=registry.url))
    life.committer.check(rows.schema)
    handout = life.begin(0)
    asked = len(registry.requests)
    there = life.fresh(sink=pickle.loads(pickle.dumps(life.sink)))
    receipts = [there.attempt(rows, 0, part, handout=handout) for part in range(3)]
    life.begin(1)
    assert len(registry.requests) == asked
    life.commit(0, receipts)
    assert len(avro_rows(kafka, registry, life.sink.topic)) == 3


def test_a_session_writes_avro(kafka: Broker, registry: Registry, tmp_path: Path) -> None:
    topic, rows = kafka.topic(), table(FULL, EMPTY)
    sink = kafka.sink(topic, value=ep.avro("l", "s", registry=registry.url))
    with Session("orders", sinks=[sink], schema=rows.schema, log=str(tmp_path / "log")) as session:
        session.begin(session.next_epoch)
        session.write(rows)
        session.commit()
    assert avro_rows(kafka, registry, topic) == [
        {"l": FULL["l"], "s": FULL["s"]},
        {"l": None, "s": None},
    ]


def test_spark_hands_columns_over_and_only_its_driver_asks_the_registry(
    kafka: Broker, registry: Registry, spark: Any, tmp_path: Path
) -> None:
    topic = kafka.topic(partitions=2)
    frame = (
        spark.range(4)
        .repartition(4)
        .selectExpr(
            "id",
            "IF(id = 0, NULL, named_struct('at', TIMESTAMP'2026-01-31 09:30:00Z', 'n', array(id)))"
            " AS home",
            "CAST(id AS DECIMAL(20, 2)) AS m",
        )
    )
    sink = kafka.sink(topic, value=ep.avro("*", registry=registry.url), name="avro")
    Pipeline("avro", [sink]).write(frame, run="once", checkpoint=str(tmp_path / "chk"))
    asked = list(registry.requests)
    assert sorted(avro_rows(kafka, registry, topic), key=lambda row: row["id"]) == [
        {
            "id": number,
            "home": {"at": dt.datetime(2026, 1, 31, 9, 30, tzinfo=UTC), "n": [number]}
            if number
            else None,
            "m": decimal.Decimal(number).quantize(decimal.Decimal("0.01")),
        }
        for number in range(4)
    ]
    assert asked == [
        f"POST /subjects/{topic}-value",
        f"POST /compatibility/subjects/{topic}-value/versions/latest",
        f"POST /subjects/{topic}-value/versions",
    ]


def test_rows_that_are_sent_again_keep_the_schema_they_were_first_sent_with(
    kafka: Broker, registry: Registry, tmp_path: Path
) -> None:
    """The broker aborted a decided transaction, and the next driver's query has new columns."""
    topic = kafka.topic()
    options = {"value": ep.avro(registry=registry.url), "spool": str(tmp_path)}
    life = kafka.life(topic, **options)
    receipts = life.prepare(0, pa.table({"v": [1, 2]}))
    life.rehearse(0, receipts)
    (name,) = kafka.open_transactions(life.identity.tag)
    kafka.abort_open(name)
    later = kafka.keep(life.fresh(generation=2))
    later.committer.check(pa.schema({"v": pa.int64(), "w": pa.string()}.items()))
    later.commit(0, receipts)
    assert avro_rows(kafka, registry, topic) == [{"v": 1}, {"v": 2}]


@both
def test_an_incompatible_schema_is_refused_before_the_first_row(
    kafka: Broker, registry: Registry
) -> None:
    topic = kafka.topic()
    kafka.life(topic, value=ep.avro(registry=registry.url)).write(0, pa.table({"v": [1]}))
    changed = kafka.life(topic, value=ep.avro(registry=registry.url), generation=2)
    with pytest.raises(Misconfigured, match="incompatible"):
        changed.committer.check(pa.schema({"v": pa.string()}.items()))
    with pytest.raises(Misconfigured, match="incompatible"):
        changed.write(1, pa.table({"v": ["text"]}))
    kafka.keep(changed.fresh()).committer.check(
        pa.schema({"v": pa.int64(), "w": pa.string()}.items())
    )
    assert avro_rows(kafka, registry, topic) == [{"v": 1}]


def test_an_unknown_schema_is_refused_where_registering_is_off(
    kafka: Broker, registry: Registry
) -> None:
    life = kafka.life(kafka.topic(), value=ep.avro(registry=registry.url, auto_register=False))
    with pytest.raises(Misconfigured, match="does not know the schema") as caught:
        life.committer.check(table(FULL).schema)
    assert "auto_register=True" in caught.value.hint
    assert registry.subjects == {}


def test_an_unreachable_or_failing_registry_is_reported_before_the_first_row(
    kafka: Broker, registry: Registry
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    life = kafka.life(kafka.topic(), value=ep.avro(registry=nowhere))
    with pytest.raises(TryAgain, match="can't be reached"):
        life.committer.check(table(FULL).schema)
    registry.is_failing = True
    life = kafka.life(kafka.topic(), value=ep.avro(registry=registry.url))
    with pytest.raises(TryAgain, match="data store"):
        life.committer.check(table(FULL).schema)


def test_a_wrong_password_is_reported_and_none_is_shown(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter2")
    with running_registry(user="etl:hunter2") as registry:
        right = ep.avro(registry=registry.url, username="etl", password=ep.env("REGISTRY_PASSWORD"))
        wrong = ep.avro(registry=registry.url, username="etl", password="sesame")
        life = kafka.life(kafka.topic(), value=right)
        life.committer.check(table(FULL).schema)
        life = kafka.life(kafka.topic(), value=wrong)
        with pytest.raises(Misconfigured, match="denies access") as caught:
            life.committer.check(table(FULL).schema)
    shown = f"{right!r} {wrong!r} {life.sink!r} {life.sink.describe()} {caught.value}"
    assert "hunter2" not in shown
    assert "sesame" not in shown
    with pytest.raises(Misconfigured, match="holds a name or a password") as caught:
        ep.avro(registry="http://etl:hunter2@registry:8081")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("package", ["confluent_kafka.schema_registry", "fastavro"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Misconfigured) as caught:
        ep.avro(registry="http://127.0.0.1:1", schema=SCHEMA).ready(
            "orders", pa.struct(list(ORDERS))
        )
    assert 'pip install "epochal[registry]"' in caught.value.hint


REFUSED = {
    "no field for w": (pa.schema({"id": pa.int64(), "w": pa.int64()}.items()), SCHEMA),
    "there is no column for value.state": (pa.schema({"id": pa.int64()}.items()), SCHEMA),
    "can't be written as Avro's long": (ORDERS.set(0, pa.field("id", pa.float64())), SCHEMA),
    "can't have the name": (pa.schema({"a b": pa.int64()}.items()), None),
    "has no type in Avro": (pa.schema({"a": pa.duration("s")}.items()), None),
}


@pytest.mark.parametrize("why", REFUSED)
def test_columns_that_do_not_fit_are_refused_before_the_first_row(
    kafka: Broker, registry: Registry, why: str
) -> None:
    schema, avro_schema = REFUSED[why]
    life = kafka.life(kafka.topic(), value=ep.avro(registry=registry.url, schema=avro_schema))
    with pytest.raises(Misconfigured, match=why):
        life.committer.check(schema)
    assert registry.subjects == {}


@pytest.mark.parametrize(
    "change",
    [
        {"id": None},
        {"state": "LOST"},
        {"hash": b"123"},
        {"price": decimal.Decimal("9999999.99") * 10},
        {"at": dt.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)},
    ],
)
def test_a_row_that_does_not_fit_is_rejected_and_nothing_is_seen(
    kafka: Broker, registry: Registry, change: dict[str, Any]
) -> None:
    topic = kafka.topic()
    life = kafka.life(topic, value=ep.avro(registry=registry.url, schema=SCHEMA))
    schema = ORDERS.set(4, pa.field("price", pa.decimal128(12, 2)))
    rows = pa.Table.from_pylist([ORDER, ORDER | change], schema=schema)
    with pytest.raises(RowRejected, match=f"value.{next(iter(change))}"):
        life.write(0, rows)
    assert kafka.messages(topic) == []


def test_a_schema_that_is_none_is_refused_where_it_is_given() -> None:
    with pytest.raises(Misconfigured, match="not a schema of Avro"):
        ep.avro(registry="http://127.0.0.1:1", schema='{"type": "recrod"}')
    with pytest.raises(Misconfigured, match="must be a record"):
        ep.avro(registry="http://127.0.0.1:1", schema='{"type": "string"}')
