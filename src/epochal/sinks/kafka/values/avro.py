"""`avro`: values in Avro, behind the id of their schema, as clients of a schema registry expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kafka.varints import constant, join
from epochal.sinks.kafka.values import ALL
from epochal.sinks.kafka.values.binary_columns import Encode, is_bytes, is_list, is_text, spread
from epochal.sinks.kafka.values.registry import MAGIC, RegistryValue, missing, registry_at
from epochal.terms import Json

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

    from epochal.kit.secrets import Secret

LATEST = "latest"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Avro(RegistryValue):
    """Columns as one Avro record."""

    schema: str | None
    record: str

    def ready(self, topic: str, kind: pa.DataType, *, is_trial: bool = False) -> Json:
        subject = self.subject_of(topic)
        text = self.schema or derived(kind, self.record)
        if text != LATEST:
            _encoder(text, kind)
        ask = partial(_asked, subject, text)
        if is_trial:
            found = self.tried(subject, ask, None if text == LATEST else partial(_schema, text))
            if found is not None:
                _encoder(found[1], kind)
            return None
        number, written = self.registered(subject, text, ask)
        _encoder(written, kind)
        return {"id": number, "schema": written}

    def encode(self, column: pa.Array, ready: Json) -> pa.Array:
        given = cast("Mapping[str, Any]", ready)
        front = MAGIC + int(given["id"]).to_bytes(_ID_BYTES, "big")
        encode = _encoder(given["schema"], column.type)
        return spread(column, lambda rows: join([constant(front), encode(rows)]))


def _asked(
    subject: str,
    text: str,
    client: SchemaRegistryClient,
    is_registering: bool,
) -> tuple[int, str]:
    """The id of a schema and its text, which only the registry knows where it is the latest."""
    if text == LATEST:
        found = client.get_latest_version(subject)
        kind = found.schema.schema_type or "AVRO"
        if kind != "AVRO":
            raise Misconfigured(
                f"the latest schema of {subject} is {kind}, not Avro", "name another subject="
            )
        return int(found.schema_id or 0), str(found.schema.schema_str)
    if is_registering:
        return client.register_schema(subject, _schema(text)), text
    return int(client.lookup_schema(subject, _schema(text)).schema_id or 0), text


def _schema(text: str) -> Any:
    from confluent_kafka.schema_registry import Schema  # noqa: PLC0415  on the driver only

    return Schema(text, schema_type="AVRO")


@lru_cache(maxsize=64)
def _encoder(text: str, kind: pa.DataType) -> Encode:
    from epochal.sinks.kafka.values.avro_encoding import encoder  # noqa: PLC0415  only with Avro

    return encoder(text, kind)


def avro(
    *columns: str,
    registry: str,
    subject: str | None = None,
    schema: str | Mapping[str, Any] | None = None,
    record: str = "Value",
    auto_register: bool = True,
    username: str | None = None,
    password: Secret | str | None = None,
    ca_file: str | None = None,
    certificate_file: str | None = None,
    key_file: str | None = None,
) -> Avro:
    """
    A record's value as an Avro record of these columns; of all, if none or `"*"` is named.

    `schema` is Avro's JSON, or `"latest"` for what the subject has; without it one is derived from
    the columns, with `record` for a name (dots make a namespace) and every field nullable. The
    subject is `<topic>-value` where none is named. Only the driver asks the registry.
    """
    if schema is not None and not isinstance(schema, str):
        schema = json.dumps(schema)
    if schema is not None and schema != LATEST:
        schema = _parsed(schema)
    files = {"ca_file": ca_file, "certificate_file": certificate_file, "key_file": key_file}
    return Avro(
        columns=columns or (ALL,),
        registry=registry_at(registry, username, password, **files),
        subject=subject,
        schema=schema,
        record=record,
        auto_register=auto_register,
    )


def _parsed(text: str) -> str:
    """The text of a schema, checked by fastavro."""
    try:
        import fastavro  # noqa: PLC0415  where a schema is given
    except ImportError as error:
        raise missing(error) from error
    try:
        schema = json.loads(text)
        fastavro.parse_schema(schema)
    except (ValueError, KeyError, TypeError, fastavro.schema.SchemaParseException) as error:
        raise Misconfigured(
            f"avro: schema= is not a schema of Avro: {error!r}", "a schema as JSON text"
        ) from None
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise Misconfigured(
            "avro: schema= must be a record: columns are its fields",
            '{"type": "record", "name": …, "fields": […]}',
        )
    return text


def derived(kind: pa.DataType, name: str) -> str:
    """
    A schema for these columns.

    Every field may be null and is null by default: readers stay compatible when a column is added
    or removed later.
    """
    return json.dumps(_record(kind, name))


def _record(kind: pa.DataType, name: str) -> Mapping[str, Any]:
    fields = [kind.field(index) for index in range(kind.num_fields)]
    return {
        "type": "record",
        "name": name,
        "fields": [
            {
                "name": _named(field.name),
                "type": ["null", _type(field.type, f"{name}_{field.name}")],
                "default": None,
            }
            for field in fields
        ],
    }


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Misconfigured(
            f"avro: a field can't have the name {name!r}",
            "letters, digits and underscores: select=[…] on the sink, or an alias in the query",
        )
    return name


def _type(kind: pa.DataType, name: str) -> Any:
    for accepts, name_of_type in _SIMPLE:
        if accepts(kind):
            return name_of_type
    if pa.types.is_timestamp(kind):
        unit = {"ms": "millis", "ns": "nanos"}.get(kind.unit, "micros")
        return {
            "type": "long",
            "logicalType": f"{'' if kind.tz else 'local-'}timestamp-{unit}",
        }
    if pa.types.is_decimal(kind):
        precision, scale = kind.precision, kind.scale
        return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
    if is_list(kind):
        return {"type": "array", "items": ["null", _type(kind.value_type, f"{name}_item")]}
    if pa.types.is_map(kind) and is_text(kind.key_type):
        return {"type": "map", "values": ["null", _type(kind.item_type, f"{name}_item")]}
    if pa.types.is_struct(kind):
        return _record(kind, name)
    raise Misconfigured(
        f"avro: {name} is {kind}, which has no type in Avro here",
        "cast it in the query, or leave it out",
    )


_SIMPLE = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: pa.types.is_integer(kind) and kind.bit_width < 32, "int"),
    (pa.types.is_int32, "int"),
    (pa.types.is_integer, "long"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (is_text, "string"),
    (is_bytes, "bytes"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
    (pa.types.is_time, {"type": "long", "logicalType": "time-micros"}),
)
