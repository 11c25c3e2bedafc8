"""A client of etcd's gRPC interface: the requests that a store, a lease and the doctor need.

Messages are encoded here, as bytes: etcd's generated modules would bring a version of protobuf with
them, and clash with that of a user's own packages. Field numbers are those of etcd's rpc.proto.

A request goes to one endpoint of the cluster and, where that does not answer, to the next, until an
answer comes or the time is over. An endpoint that can't be connected to, or that knows no leader,
has executed nothing. A reply that is lost after the request was sent leaves a write unknown:

    client             endpoint 1 (the leader)        endpoint 2
    Txn            ->  appended, sent to the others
                       killed                         elected; its log has the entry: executed
    no answer
    Txn            ->                                 executed a second time: its comparison fails

So every write here is a transaction that compares first, and may be sent twice.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from epochal.errors import (
    CorruptRecord,
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    TryAgain,
    not_installed,
)
from epochal.storage.urls import first_line

# Its handlers of fork() may abort a child before it runs another program, such as Spark's JVM.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
try:
    import grpc
except ImportError as error:
    raise not_installed("etcd", error.name, "etcd") from error

T = TypeVar("T")

_PORT = 2379
_TRY_S = 1.5
_TRY_S_PER_BYTE = 1e-6
_CALL_MAX_S = 10.0
_PAUSE_S = (0.02, 0.5)
_TOKENS_MAX = 3
"""Authentications for one request: a server that restarted forgets its tokens."""
_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # a repetition is decided here, where its outcome is known
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
)
_URL = re.compile(r"(?P<scheme>etcds?)://(?:(?P<login>[^/]*)@)?(?P<hosts>[^/@]+)/(?P<prefix>.+)")
_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>[0-9]+))?")

# What an error means for the caller.

_NOT_EXECUTED = (
    "no leader",
    "too many requests",
    "failed to connect to all addresses",
    "dns resolution failed",
    "not capable",
)
"""Parts of messages, in lower case, after which a write certainly did not happen."""
_NO_TOKEN = ("invalid auth token", "revision of auth store is old")
"""Not executed either: authenticate again."""
_LATER = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,  # the stream was removed
        grpc.StatusCode.UNKNOWN,
    }
)
"""Another endpoint may answer; a write is unknown unless its message is in `_NOT_EXECUTED`."""
_ERRORS: Mapping[grpc.StatusCode, tuple[type[EpochalError], str]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        TryAgain,
        "the space quota of etcd is used up and nothing was written: `etcdctl compact REVISION`, "
        "`etcdctl defrag`, `etcdctl alarm disarm`; then set --auto-compaction-retention and "
        "--quota-backend-bytes on the servers",
    ),
    grpc.StatusCode.PERMISSION_DENIED: (
        Misconfigured,
        "the role of this user needs readwrite on the prefix: `epochal grants` prints it",
    ),
    grpc.StatusCode.DATA_LOSS: (
        CorruptRecord,
        "members of the cluster disagree: `etcdctl endpoint hashkv --cluster` says which",
    ),
}
_FOR_A_PERSON = (
    "user and password: etcd://user@…, ETCDCTL_USER and ETCDCTL_PASSWORD; certificates: "
    "etcds://…, ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY"
)


# Messages


Field = tuple[int, "int | bytes | str"]


def message(*fields: Field) -> bytes:
    """A protobuf message. Numbers that are 0 and bytes that are empty are left out, as defaults."""
    return b"".join(_field(number, value) for number, value in fields if value)


def _field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


class Reply:
    """A decoded protobuf message: its fields by number, each as often as it came."""

    def __init__(self, content: bytes) -> None:
        self._fields: dict[int, list[Any]] = {}
        at = 0
        while at < len(content):
            key, at = _read_varint(content, at)
            kind = key & 7
            value: int | bytes
            if kind == 0:
                value, at = _read_varint(content, at)
            elif kind == 2:
                size, at = _read_varint(content, at)
                value, at = content[at : at + size], at + size
            else:
                width = {1: 8, 5: 4}[kind]
                value, at = int.from_bytes(content[at : at + width], "little"), at + width
            self._fields.setdefault(key >> 3, []).append(value)

    def number(self, at: int) -> int:
        return int(self._fields.get(at, [0])[-1])

    def content(self, at: int) -> bytes:
        return bytes(self._fields.get(at, [b""])[-1])

    def text(self, at: int) -> str:
        return self.content(at).decode(errors="replace")

    def part(self, at: int) -> Reply:
        return Reply(self.content(at))

    def contents(self, at: int) -> list[bytes]:
        return list(self._fields.get(at, []))

    def parts(self, at: int) -> list[Reply]:
        return [Reply(one) for one in self.contents(at)]


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        digit = content[at]
        value |= (digit & 0x7F) << shift
        at += 1
        if digit < 0x80:
            return value, at
        shift += 7


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """A key as etcd holds it."""

    key: bytes
    value: bytes
    created_at: int
    """The revision of the cluster that created it."""
    lease: int

    @classmethod
    def of(cls, reply: Reply) -> KeyValue:
        return cls(
            key=reply.content(1),
            value=reply.content(5),
            created_at=reply.number(2),
            lease=reply.number(6),
        )


def range_of(
    key: bytes, end: bytes = b"", *, limit: int = 0, keys_only: bool = False, revision: int = 0
) -> bytes:
    """A RangeRequest for a key, or from a key up to an end. It is linearizable."""
    return message((1, key), (2, end), (3, limit), (4, revision), (8, int(keys_only)))


def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    """A PutRequest; with a lease, the key vanishes with it."""
    return message((1, key), (2, value), (3, lease))


def keep(key: bytes) -> bytes:
    """A PutRequest that leaves a key's value as it is and takes it off its lease."""
    return message((1, key), (5, 1))


def delete_range(key: bytes, end: bytes = b"") -> bytes:
    return message((1, key), (2, end))


def is_absent(key: bytes) -> bytes:
    """A Compare: the key does not exist."""
    return message((1, 0), (2, 1), (3, key)) + _field(5, 0)


def exists(key: bytes) -> bytes:
    """A Compare: the key exists."""
    return message((1, 1), (2, 1), (3, key)) + _field(5, 0)


def is_created_at(key: bytes, revision: int) -> bytes:
    """A Compare: the key is the one that this revision created."""
    return message((2, 1), (3, key), (5, revision))


# Where a cluster is, and who asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a URL and etcdctl's variables say of a cluster."""

    endpoints: tuple[str, ...]
    prefix: str
    """Begins with a slash, and ends without."""
    has_tls: bool
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def location(self) -> str:
        scheme = "etcds" if self.has_tls else "etcd"
        return f"{scheme}://{','.join(self.endpoints)}{self.prefix}"


def address_of(url: str, environment: Mapping[str, str] = os.environ) -> Address:
    """
    The address in `etcd://[user[:password]@]host:2379,host2:2379/prefix`, `etcds://` with TLS.

    User and password are taken from ETCDCTL_USER and ETCDCTL_PASSWORD where the URL has none.
    """
    found = _URL.fullmatch(url)
    hosts = [] if found is None else [_HOST.fullmatch(one) for one in found["hosts"].split(",")]
    prefix = "" if found is None else found["prefix"].strip("/")
    if found is None or not prefix or not all(hosts) or "//" in prefix:
        # The URL is not quoted: it may hold a password.
        raise Misconfigured(
            "the URL of a store in etcd can't be read, or names no prefix",
            "etcd://host:2379,host2:2379/prefix, etcds://… with TLS",
        )
    login = found["login"] or environment.get("ETCDCTL_USER", "")
    user, _, password = login.partition(":")
    decode = unquote if found["login"] else str
    return Address(
        endpoints=tuple(f"{one['host']}:{one['port'] or _PORT}" for one in hosts if one),
        prefix=f"/{prefix}",
        has_tls=found["scheme"] == "etcds",
        user=decode(user),
        password=decode(password) or environment.get("ETCDCTL_PASSWORD", ""),
    )


@dataclass(slots=True)
class Token:
    """What the servers gave for user and password; shared by the clients of one store."""

    text: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class EtcdClient:
    """
    Requests to a cluster. Usable from any thread, and in a forked child, which opens its own
    channels. `keeps_channels=False` opens them for each call.
    """

    def __init__(
        self, address: Address, *, keeps_channels: bool = True, token: Token | None = None
    ) -> None:
        self.address = address
        self.token = token or Token()
        self.call_max_s = _CALL_MAX_S
        self._keeps_channels = keeps_channels
        self._lock = threading.Lock()
        self._channels: dict[str, Any] = {}
        self._process = os.getpid()
        self._at = 0
        """The endpoint that answered last."""

    # Requests

    def range(self, request: bytes) -> tuple[list[KeyValue], bool]:
        """Keys in rising order, and whether there are more."""
        reply = self.call("KV/Range", request, "read from")
        return [KeyValue.of(one) for one in reply.parts(2)], bool(reply.number(3))

    def transaction(
        self,
        *,
        compare: Sequence[bytes] = (),
        puts: Sequence[bytes] = (),
        deletes: Sequence[bytes] = (),
        otherwise: Sequence[bytes] = (),
        max_s: float | None = None,
    ) -> tuple[bool, list[list[KeyValue]]]:
        """
        Where every comparison holds: put and delete. Else: what `otherwise`, which are ranges,
        find. Raises `OutcomeUnknown` where an earlier try may yet be executed.
        """
        request = message(
            *((1, one) for one in compare),
            *((2, message((2, one))) for one in puts),
            *((2, message((3, one))) for one in deletes),
            *((3, message((1, one))) for one in otherwise),
        )
        reply = self.call("KV/Txn", request, "write to", is_write=True, max_s=max_s)
        if reply.number(2):
            return True, []
        found = [one.part(1).parts(2) for one in reply.parts(3)]
        return False, [[KeyValue.of(one) for one in each] for each in found]

    def grant_lease(self, ttl_s: int, *, max_s: float | None = None) -> int:
        """A new lease. One that is granted twice, as an answer was lost, expires by itself."""
        request = message((1, ttl_s))
        return self.call("Lease/LeaseGrant", request, "get a lease from", max_s=max_s).number(2)

    def keep_alive(self, lease: int, *, max_s: float) -> bool:
        """Prolong a lease. False: it is gone, and with it the keys that were put with it."""
        request = message((1, lease))
        name = "Lease/LeaseKeepAlive"
        return self.call(name, request, "keep a lease of", max_s=max_s).number(3) > 0

    def revoke_lease(self, lease: int, *, max_s: float) -> None:
        """End a lease now, and delete the keys that were put with it."""
        self.call("Lease/LeaseRevoke", message((1, lease)), "end a lease of", max_s=max_s)

    def ask_each(self, name: str, request: bytes = b"") -> Iterator[tuple[str, Reply | str]]:
        """What every endpoint answers by itself, or why it does not."""
        for endpoint in self.address.endpoints:
            try:
                with self._open() as channels:
                    yield endpoint, self._ask(channels, endpoint, name, request, _TRY_S)
            except (EpochalError, grpc.RpcError) as error:
                yield endpoint, _reason(error)

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
        _close(channels)

    # One request, by one endpoint after the other

    def call(
        self,
        name: str,
        request: bytes,
        verb: str,
        *,
        is_write: bool = False,
        max_s: float | None = None,
    ) -> Reply:
        """`verb` is for the message of an error: "read from"."""
        max_s = self.call_max_s if max_s is None else max_s
        deadline = time.monotonic() + max_s
        try_s = min(max_s, _TRY_S + len(request) * _TRY_S_PER_BYTE)
        unknown: grpc.RpcError | None = None
        tokens = 0
        with self._open() as channels:
            for pause_s in self._pauses():
                endpoint = self._endpoint()
                try:
                    return self._ask(channels, endpoint, name, request, try_s)
                except grpc.RpcError as error:
                    if _says(error, _NO_TOKEN) and tokens < _TOKENS_MAX:
                        tokens += 1
                        self.token.text = ""
                        continue
                    if is_write and not _is_unexecuted(error):
                        unknown = error
                    is_over = not _is_for_later(error) or time.monotonic() + pause_s > deadline
                    if is_over:
                        raise self._error(error, verb, unknown) from None
                self._at += 1
                time.sleep(pause_s)
        raise AssertionError("pauses do not end")

    def _pauses(self) -> Iterator[float]:
        """Every endpoint is tried at once; after each round the pause is longer."""
        pause_s, longest_s = _PAUSE_S
        while True:
            yield from [0.0] * (len(self.address.endpoints) - 1)
            yield pause_s
            pause_s = min(2 * pause_s, longest_s)

    def _endpoint(self) -> str:
        return self.address.endpoints[self._at % len(self.address.endpoints)]

    def _ask(
        self, channels: dict[str, Any], endpoint: str, name: str, request: bytes, timeout_s: float
    ) -> Reply:
        channel = self._channel(channels, endpoint)
        metadata = [("hasleader", "true")]
        if self.address.password:
            metadata.append(("token", self._authenticated(channel, timeout_s)))
        path = f"/etcdserverpb.{name}"
        if name.endswith("KeepAlive"):
            answers = channel.stream_stream(path)(
                iter([request]), timeout=timeout_s, metadata=metadata
            )
            answer = next(answers, None)
            if answer is None:
                raise TryAgain(f"{endpoint} ended a request without an answer")
            return Reply(answer)
        return Reply(channel.unary_unary(path)(request, timeout=timeout_s, metadata=metadata))

    def _authenticated(self, channel: Any, timeout_s: float) -> str:
        with self.token.lock:
            if not self.token.text:
                request = message((1, self.address.user), (2, self.address.password))
                ask = channel.unary_unary("/etcdserverpb.Auth/Authenticate")
                self.token.text = Reply(ask(request, timeout=timeout_s)).text(2)
            return self.token.text

    @contextmanager
    def _open(self) -> Iterator[dict[str, Any]]:
        """The channels of this process, or some for one call only."""
        if self._keeps_channels:
            with self._lock:
                if self._process != os.getpid():
                    self._channels, self._process = {}, os.getpid()
            yield self._channels
            return
        channels: dict[str, Any] = {}
        try:
            yield channels
        finally:
            _close(channels)

    def _channel(self, channels: dict[str, Any], endpoint: str) -> Any:
        with self._lock:
            if endpoint not in channels:
                channels[endpoint] = self._opened(endpoint)
            return channels[endpoint]

    def _opened(self, endpoint: str) -> Any:
        if not self.address.has_tls:
            return grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        ca, key, certificate = (
            _file(name) for name in ("ETCDCTL_CACERT", "ETCDCTL_KEY", "ETCDCTL_CERT")
        )
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return grpc.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS)

    def _error(
        self, error: grpc.RpcError, verb: str, unknown: grpc.RpcError | None
    ) -> EpochalError:
        fact = f"cannot {verb} {self.address.location}: {_reason(error)}"
        kind, hint = _ERRORS.get(error.code(), (Misconfigured, _FOR_A_PERSON))
        if _is_for_later(error):
            kind, hint = TryAgain, _FOR_A_PERSON if self.address.has_tls else ""
        if unknown is not None:
            # Whatever came afterwards: the first one may yet be executed.
            return OutcomeUnknown(f"{fact} (before: {_reason(unknown)})", hint)
        return kind(fact, hint)


def _says(error: grpc.RpcError, parts: Sequence[str]) -> bool:
    details = (error.details() or "").lower()
    return any(part in details for part in parts)


def _is_unexecuted(error: grpc.RpcError) -> bool:
    return not _is_for_later(error) or _says(error, _NOT_EXECUTED)


def _is_for_later(error: grpc.RpcError) -> bool:
    return error.code() in _LATER or _says(error, _NOT_EXECUTED)


def _reason(error: EpochalError | grpc.RpcError) -> str:
    if isinstance(error, EpochalError):
        return error.message
    return f"{first_line(error.details() or '')} [{error.code().name}]"


def _file(variable: str) -> bytes | None:
    """The content of the file that one of etcdctl's variables names."""
    named = os.environ.get(variable)
    if not named:
        return None
    try:
        return Path(named).read_bytes()
    except OSError as error:
        raise Misconfigured(
            f"{variable} names a file that can't be read: {error}", "a PEM file, as for etcdctl"
        ) from None


def _close(channels: Mapping[str, Any]) -> None:
    for channel in channels.values():
        channel.close()


def past(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with a prefix; its last byte is never 0xff."""
    return prefix[:-1] + struct.pack("B", prefix[-1] + 1)
