"""The generated codec: against itself, against Kafka's own, and against garbage."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochal.kafka.messages import APIS as KEYS
from epochal.kafka.messages import request_type, response_type
from epochal.kafka.messages.end_txn import EndTxnRequest
from epochal.kafka.messages.fetch import FetchResponse
from epochal.kafka.messages.headers import RequestHeader, ResponseHeader
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.messages.metadata import MetadataRequest
from epochal.kafka.primitives import Malformed, Message, Unsupported
from kafka_model import Field, Schema, parse_schema
from kafka_schemas import APIS

JAR_SCHEMAS = "common/message/{}.json"
VALUES = {"uint16": (0, 1, 0xFFFF), "float64": (0.0, -1.5, 1e300), "bool": (False, True)}
LIMITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
FEW = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NAMES = [f"{api}{side}" for api in APIS for side in ("Request", "Response")]


@cache
def schema_of(jar: Path, name: str) -> Schema:
    api = name.removesuffix("Response")
    taken = () if name == api else [one.name for one in schema_of(jar, f"{api}Request").structs]
    with zipfile.ZipFile(jar) as archive:
        return parse_schema(archive.read(JAR_SCHEMAS.format(name)).decode(), taken)


def type_of(name: str) -> type[Message]:
    api = name.removesuffix("Request").removesuffix("Response")
    (key,) = [key for key, (_, request) in KEYS.items() if request == f"{api}Request"]
    found = request_type(key) if name.endswith("Request") else response_type(key)
    assert found is not None
    return found


def plain_value(rng: random.Random, kind: str) -> Any:
    match kind:
        case "string":
            size = rng.choice((0, 1, 5, 130))
            return "".join(rng.choice("aZ0.-_é漢") for _ in range(size))
        case "bytes" | "records":
            return rng.randbytes(rng.choice((0, 1, 20, 200)))
        case "uuid":
            return rng.choice((bytes(16), rng.randbytes(16)))
    if kind in VALUES:
        return rng.choice(VALUES[kind])
    bits = LIMITS[kind]
    return rng.choice((0, -1, 1, (1 << bits) - 1, -(1 << bits), rng.randrange(1 << bits)))


def random_value(rng: random.Random, schema: Schema, field: Field, version: int) -> Any:
    if version in field.nullable and rng.random() < 0.3:
        return None

    def element() -> Any:
        if field.is_struct:
            return random_struct(rng, schema, field.element, version)
        return plain_value(rng, field.element)

    if field.is_array:
        return [element() for _ in range(rng.choice((0, 1, 2, 3)))]
    return element()


def random_struct(rng: random.Random, schema: Schema, name: str, version: int) -> Any:
    """A value with every field of the version set at random, and no other."""
    fields = {
        field.name: random_value(rng, schema, field, version)
        for field in schema.struct(name).fields
        if version in field.versions
    }
    module = __import__(type_of(schema.name).__module__, fromlist=[name])
    return getattr(module, name)(**fields)


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(seed=st.integers(0, 2**32))
def test_every_message_comes_back_as_it_went(clients_jar: Path, name: str, seed: int) -> None:
    rng = random.Random(seed)
    schema = schema_of(clients_jar, name)
    for version in schema.reach(name):
        message = random_struct(rng, schema, name, version)
        data = b"".join(message.encode(version))
        assert type_of(name).decode(version, data) == message


def test_every_message_is_encoded_byte_for_byte_as_kafka_encodes_it(
    clients_jar: Path, java: Callable[[str, list[str]], list[str]]
) -> None:
    rng = random.Random(4)
    lines = []
    for name in NAMES:
        schema = schema_of(clients_jar, name)
        side = "request" if name.endswith("Request") else "response"
        for version in schema.reach(name):
            for _ in range(4):
                data = b"".join(random_struct(rng, schema, name, version).encode(version))
                lines.append(f"{schema.api_key} {side} {version} {data.hex()}")
    echoed = java("Codec.java", lines)
    assert len(echoed) == len(lines) > 1500
    for line, answer in zip(lines, echoed, strict=True):
        assert line.split(" ")[3] == answer, line[:60]


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(data=st.binary(max_size=200), cut=st.randoms(use_true_random=False))
def test_garbage_is_malformed_and_nothing_else(
    clients_jar: Path, name: str, data: bytes, cut: random.Random
) -> None:
    kind = type_of(name)
    schema = schema_of(clients_jar, name)
    version = cut.choice(schema.reach(name))
    genuine = bytearray(b"".join(random_struct(cut, schema, name, version).encode(version)))
    for _ in range(cut.randrange(1, 4)):
        if genuine:
            genuine[cut.randrange(len(genuine))] = cut.randrange(256)
    for bad in (data, bytes(genuine), bytes(genuine[: cut.randrange(len(genuine) + 1)])):
        try:
            kind.decode(version, bad)
        except Malformed:
            continue


def test_a_count_of_two_thousand_million_elements_allocates_nothing() -> None:
    claim = (2**31 - 1).to_bytes(4, "big")
    with pytest.raises(Malformed, match="claims 2147483647 elements"):
        FetchResponse.decode(4, bytes(4) + claim)


def test_bytes_behind_a_message_are_refused() -> None:
    data = b"".join(EndTxnRequest(transactional_id="t").encode(3))
    with pytest.raises(Malformed, match="ends at"):
        EndTxnRequest.decode(3, data + b"x")


def test_a_field_that_the_version_lacks_is_refused_rather_than_dropped() -> None:
    request = ListTransactionsRequest(transactional_id_pattern="epochal-.*")
    assert request.encode(2)
    with pytest.raises(Unsupported, match="transactional_id_pattern is set, and version 1"):
        request.encode(1)
    with pytest.raises(Unsupported, match=r"topics is null"):
        MetadataRequest(topics=None).encode(0)
    with pytest.raises(Unsupported, match="has versions 0 to 5, not 6"):
        EndTxnRequest().encode(6)
    with pytest.raises(Unsupported, match="can't carry"):
        EndTxnRequest(producer_epoch=1 << 20).encode(3)


def test_unknown_tagged_fields_are_skipped() -> None:
    plain = b"".join(EndTxnRequest(transactional_id="t", producer_id=7).encode(3))
    tagged = plain[:-1] + b"\x02\x05\x03abc\x90\x01\x00"
    assert EndTxnRequest.decode(3, tagged) == EndTxnRequest.decode(3, plain)


def test_headers_come_back_as_they_went() -> None:
    header = RequestHeader(
        request_api_key=26, request_api_version=5, correlation_id=9, client_id="é"
    )
    for version in (1, 2):
        assert RequestHeader.decode(version, b"".join(header.encode(version))) == header
    answer = ResponseHeader(correlation_id=9)
    for version in (0, 1):
        assert ResponseHeader.decode(version, b"".join(answer.encode(version))) == answer


def test_the_generated_code_is_what_the_generator_writes(clients_jar: Path) -> None:
    import kafka_schemas

    files = kafka_schemas.formatted(kafka_schemas.generate(clients_jar))
    stale = [p for p, text in files.items() if (kafka_schemas.PACKAGE / p).read_text() != text]
    assert not stale, "run tools/kafka_schemas.py"
    made = {kafka_schemas.PACKAGE / path for path in files}
    assert set((kafka_schemas.PACKAGE / "messages").glob("*.py")) <= made
