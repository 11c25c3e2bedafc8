"""Damaged messages: every decoder refuses or reads them, every handler answers, nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import random
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from conftest_tools import PROOF_KILLS
from servers.embedded import EmbeddedServer
from test_absurd_requests import Chance, fresh
from test_hostile_clients import connected, frame

from epochal.broker import handlers
from epochal.errors import EpochalError
from epochal.kafka import messages
from epochal.kafka.primitives import Malformed, Message, Unsupported

SHORT_S, LONG_S = 4.0, 2.0 * PROOF_KILLS


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Bits, bytes, lengths and ends of a message changed."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << chance.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                piece = bytes(changed[at : at + chance.randint(1, 20)])
                changed[at:at] = piece * chance.randint(1, 5)
    return bytes(changed)


def message_types() -> Iterator[type[Message]]:
    for found in pkgutil.iter_modules(messages.__path__):
        module = importlib.import_module(f"{messages.__name__}.{found.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Message) and "DECODERS" in vars(kind):
                yield kind


def fuzz_decoders(seed: int, seconds: float) -> int:
    chance, values = random.Random(seed), Chance(seed)
    kinds = sorted(message_types(), key=lambda kind: kind.__name__)
    until, tried = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for kind in kinds:
            version = chance.choice(kind.VERSIONS)
            try:
                data = b"".join(bytes(part) for part in values._message(kind).encode(version))
            except Unsupported:
                data = chance.randbytes(40)
            with suppress(Malformed):
                kind.decode_head(version, damaged(chance, data))
            tried += 1
    return tried


def fuzz_handlers(seed: int, seconds: float) -> int:
    """Whatever a handler raises comes out: it would stop a broker."""
    chance, values, table = random.Random(seed), Chance(seed), fresh(2)
    until, tried = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        handler, version, message = values.request()
        try:
            data = b"".join(bytes(part) for part in message.encode(version))
            request, _ = handler.request.decode_head(version, damaged(chance, data))
        except (Malformed, Unsupported):
            continue
        with suppress(EpochalError):
            values.learn(table.ask(request, version))
        tried += 1
    return tried


def fuzz_wire(server: EmbeddedServer, seed: int, seconds: float) -> None:
    chance, values = random.Random(seed), Chance(seed)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with connected(server.address()) as sock, suppress(OSError, Unsupported):
            sock.settimeout(0.02)
            for _ in range(chance.randint(1, 4)):
                handler = chance.choice(list(handlers.table().values()))
                version = chance.choice(handler.versions)
                parts = values._message(handler.request).encode(version)
                tags = b"\0" if version >= handler.request.FLEXIBLE_FROM else b""
                body = tags + b"".join(bytes(part) for part in parts)
                sock.sendall(damaged(chance, frame(handler.api_key, version, body)))
                sock.recv(1 << 16)


def test_damaged_messages_are_read_or_refused_by_every_decoder() -> None:
    assert fuzz_decoders(time.time_ns(), SHORT_S) >= len(list(message_types()))


def test_damaged_requests_are_answered_or_refused_by_every_handler() -> None:
    assert fuzz_handlers(time.time_ns(), SHORT_S) > 0


@pytest.fixture(scope="module", params=["before login", "after login"])
def reached(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    users = {"alice": "secret"} if request.param == "before login" else {}
    server = EmbeddedServer(tmp_path_factory.mktemp("fuzzed"), users=users)
    server.start()
    yield server
    server.stop()


def test_damaged_frames_leave_a_broker_that_answers(reached: EmbeddedServer) -> None:
    fuzz_wire(reached, time.time_ns(), SHORT_S)
    _still_answers(reached)


def _still_answers(server: EmbeddedServer) -> None:
    with connected(server.address()) as sock:
        sock.sendall(frame(18, 0, b""))
        assert len(sock.recv(4)) == 4


@pytest.mark.proof
def test_damaged_messages_for_minutes() -> None:
    fuzz_decoders(time.time_ns(), LONG_S)
    fuzz_handlers(time.time_ns(), LONG_S)


@pytest.mark.proof
def test_damaged_frames_for_minutes(reached: EmbeddedServer) -> None:
    fuzz_wire(reached, time.time_ns(), LONG_S)
    _still_answers(reached)
