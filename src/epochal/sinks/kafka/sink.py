"""`Kafka`: the declaration of a Kafka sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from epochal.contract import Task
from epochal.errors import Misconfigured, not_installed
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sink_base import Promises, Shape, SinkBase
from epochal.terms import Identity, Json, Limits, SinkName

try:
    from epochal.kafka.compression import Compression
    from epochal.sinks.kafka.client import Server, Settings, read_settings, require_addresses
    from epochal.sinks.kafka.records import shape_of
    from epochal.sinks.kafka.values import Column, Value, json
except ImportError as error:
    raise not_installed("the Kafka sink", error.name, "kafka") from error

if TYPE_CHECKING:
    from epochal.kit.spool.rows import RowSpool
    from epochal.sinks.kafka.committer import KafkaCommitter
    from epochal.sinks.kafka.writer import KafkaWriter

_COMPRESSIONS = {kind.name.lower(): kind for kind in Compression}


PROMISES = (
    Promises(
        sink="`Kafka`",
        at_one_instant="a task's rows, complete within milliseconds",
        readers_must="use `isolation.level=read_committed`",
        proof="a consumer group's offset, committed in the transaction",
        deletes="tombstones",
        limits=[
            "open transactions block `read_committed` consumers of their partitions",
            "if the driver is down longer than the broker keeps a transaction, a replay or "
            "`spool=` is needed",
        ],
    ),
)


@dataclass(frozen=True, kw_only=True)
class Kafka(SinkBase):
    """
    A topic of a Kafka cluster, brokers 2.5 and newer.

    Each task writes in a transaction of its own, which the driver ends once the epoch is decided.
    Readers need `isolation.level=read_committed`. `key`, `headers`, `partition`, `timestamp` and
    `topic_from` are columns or SQL expressions; so is `value`, where it is not a `json(…)`.
    """

    kind: ClassVar[str] = "kafka"
    writes_on_driver: ClassVar[bool] = True

    bootstrap: str = field(kw_only=False)
    """`host:port` of one or more brokers, separated by commas."""
    topic: str
    """Where rows go; the ledger is kept under its name. It must exist."""
    value: Value | str = field(default_factory=json)
    """`json("*")`, or a column of text or bytes. A null is a tombstone."""
    key: str | None = None
    """Rows of one key go to one partition, by the Java client's hash; without, they are spread."""
    headers: str | None = None
    """array<struct<key: string, value: binary>>, or a map."""
    partition: str | None = None
    """The partition of a row; null leaves it to the key."""
    timestamp: str | None = None
    """The time of a row; the time of writing where it is null or not given."""
    topic_from: str | None = None
    """The topic of a row; null means `topic`."""
    order_by: Sequence[str] | str = ()
    """Rows of one key arrive in this order within an epoch. Costs a shuffle."""
    compression: str = "none"
    """none, gzip, snappy, lz4 or zstd."""
    transactional_id_prefix: str = ""
    """The first part of every transactional id and group of this sink; rights are granted on it."""
    transaction_timeout_s: float | None = None
    """After it a broker aborts an open transaction; by default what it allows, up to an hour."""
    spool: str | bool | None = None
    """
    Keeps the rows until the epoch is settled, so that a transaction which the broker aborted after
    the decision can be sent again. True keeps them inside the checkpoint, or beside a session's
    log; otherwise a folder that driver and executors share, or a URL.
    """
    commit_offsets: str | None = None
    """A consumer group that gets the epoch's Kafka source offsets, in one of its transactions."""
    batch_bytes: int = 1 << 20
    """Records buffered for a partition before they are sent; the topic's limit if that is less."""
    buffer_bytes: int = 32 << 20
    """Records that a task buffers in all before it sends them."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Client settings by the names of Spark's Kafka sink: {"kafka.security.protocol": "SSL"}."""
    username: str | None = None
    """For SASL; with it, or a token, connections log in."""
    password: Secret | str | None = None
    """`env("KAFKA_PASSWORD")` or `file(path)`."""
    sasl_mechanism: str | None = None
    """PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512."""
    token: Callable[[], str] | None = field(default=None, repr=False)
    """Returns a token for OAUTHBEARER; called at every connection, importable on executors."""
    tls: bool = False
    """Whether connections are encrypted."""
    ca_file: str | None = None
    """TLS: who signed the brokers' certificates, PEM; by default whom the machine trusts."""
    certificate_file: str | None = None
    """TLS: this client's certificate, PEM, on the driver and on executors."""
    key_file: str | None = None
    """TLS: its key, PEM."""
    key_password: Secret | str | None = None
    """TLS: the password of that key."""

    server: Server = field(init=False, repr=False)
    encoding: Value = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("bootstrap", require_addresses(self.bootstrap))
        for name in ("password", "key_password"):
            given = getattr(self, name)
            self._set(name, HeldSecret(given) if isinstance(given, str) else given)
        self._set("encoding", Column(self.value) if isinstance(self.value, str) else self.value)
        self._set("server", Server(bootstrap=self.bootstrap, settings=self._settings()))
        self._require_valid()
        if self.spool and self.spool is not True:
            from epochal.kit.spool.rows import spool_url  # noqa: PLC0415  most sinks have none

            self._set("spool", spool_url("Kafka", self.spool))
        if not self.name:
            self._set("name", SinkName(f"{self.kind}:{self.topic}"))
        super().__post_init__()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _settings(self) -> Settings:
        is_sasl = self.username is not None or self.token is not None
        protocol = ("SASL_" if is_sasl else "") + ("SSL" if self.tls else "PLAINTEXT")
        base = Settings(
            protocol=protocol,
            mechanism=self.sasl_mechanism,
            username=self.username,
            password=self.password,  # type: ignore[arg-type]  # a plain one was wrapped above
            token=self.token,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            key_password=self.key_password,  # type: ignore[arg-type]  # the same
        )
        found = read_settings(base, self.options)
        # They are in `server` now; the mapping itself may hold a secret.
        self._set("options", {})
        if found.compression is not None:
            self._set("compression", found.compression)
        if found.batch_bytes is not None:
            self._set("batch_bytes", found.batch_bytes)
        if found.transaction_timeout_s is not None:
            self._set("transaction_timeout_s", found.transaction_timeout_s)
        return found

    def _require_valid(self) -> None:
        if not self.topic:
            raise Misconfigured("Kafka: no topic is named", "topic=…")
        if self.compression not in _COMPRESSIONS:
            raise Misconfigured(
                f"Kafka: compression={self.compression!r}", f"one of {', '.join(_COMPRESSIONS)}"
            )
        if self.order_by and self.key is None:
            raise Misconfigured(
                "Kafka: order_by= without key=: only rows of one key have an order", "key=…"
            )

    @property
    def target(self) -> str:
        """The topic only: brokers change, and receipts name the cluster by its id."""
        return self.topic

    @property
    def prepares_last(self) -> bool:
        """An open transaction makes every reader of its partitions wait: open it late."""
        return True

    @property
    def shape(self) -> Shape:
        return shape_of(self)

    @property
    def codec(self) -> Compression:
        return _COMPRESSIONS[self.compression]

    def describe(self) -> Mapping[str, Json]:
        return {
            "kind": self.kind,
            "target": self.target,
            "bootstrap": self.bootstrap,
            "mode": "append",
            "security": self.server.settings.protocol,
            "spooled": bool(self.spool),
        }

    def grants(self, principal: str = "") -> list[str]:
        """The commands that grant a principal the least that this sink needs."""
        from epochal.sinks.kafka.operate import grants  # noqa: PLC0415  tasks don't need it

        return grants(self, principal or f"User:{self.username or 'epochal'}")

    def row_spool(self, location: str | None) -> RowSpool | None:
        """The spool of a pipeline with this folder; None where rows are not kept."""
        if not self.spool or (self.spool is True and location is None):
            return None
        from epochal.kit.spool.rows import RowSpool, spool_below  # noqa: PLC0415  most sinks have none

        if self.spool is True:
            return RowSpool.at(spool_below("Kafka(spool=True)", location or ""))
        return RowSpool.at(self.spool)

    def writer(self, task: Task) -> KafkaWriter:
        from epochal.sinks.kafka.writer import KafkaWriter  # noqa: PLC0415  on executors

        return KafkaWriter(self, task)

    def committer(self, identity: Identity, limits: Limits) -> KafkaCommitter:
        from epochal.sinks.kafka.committer import KafkaCommitter  # noqa: PLC0415  on the driver

        return KafkaCommitter(self, identity, limits)
