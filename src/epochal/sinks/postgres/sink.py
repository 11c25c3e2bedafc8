"""The declaration of a PostgreSQL sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from epochal.contract import Committer, Limits, Sink, Task
from epochal.errors import Misconfigured
from epochal.sinks.declaration import Declaration
from epochal.sinks.secrets import HeldSecret, Secret
from epochal.sinks.sql.columns import column_map, require_choice
from epochal.sinks.sql.modes import Mode, Strategy, WriteMode, require_reject, write_mode
from epochal.sinks.sql.names import TableName
from epochal.sinks.sql.pressure import DEFAULT_PRESSURE, PressureLimits
from epochal.terms import Identity, Json, SinkName

try:
    from psycopg.conninfo import make_conninfo

    from epochal.sinks.postgres.committer import StagedCommitter
    from epochal.sinks.postgres.connecting import Server, parse_url
    from epochal.sinks.postgres.grants import grants
    from epochal.sinks.postgres.names import parse_table, require_identifier
    from epochal.sinks.postgres.prepared import PreparedCommitter
    from epochal.sinks.postgres.writer import PostgresWriter, PreparedWriter, StagedWriter
except ImportError as error:
    raise Misconfigured(
        f"the PostgreSQL sink needs a package that is not installed: {error.name}",
        "pip install 'epochal[postgres]'",
    ) from error


@dataclass(frozen=True, kw_only=True)
class Postgres(Declaration):
    """
    A table of a PostgreSQL server, version 12 or newer.

    `strategy="staged"` (the default) shows an epoch whole, in one transaction, and needs no DBA.
    `strategy="prepared"` appends with two-phase commit, task by task: the fastest, where the server
    allows it. Staging tables and the ledger live in `meta_schema`.
    """

    kind: ClassVar[str] = "postgres"

    url: str = field(kw_only=False)
    """`postgresql://user@host/database`, or `host=… dbname=…`, or `service=…`."""
    table: str
    """`orders`, `public.orders`, or with quotes around a part that holds a dot. Case is kept."""
    mode: Mode = "append"
    keys: Sequence[str] | str = ()
    """Fields that say which row is meant, for upsert and replace."""
    order_by: Sequence[str] | str = ()
    """Of several rows of one key in one epoch the highest by these fields wins."""
    delete_when: str | None = None
    """A condition in PostgreSQL's SQL over the fields: rows that delete their key."""
    columns: Mapping[str, str] | Sequence[str] | None = None
    """Which field goes into which column, and only these; if not given, each by its own name."""
    strategy: Strategy = "staged"
    create_table: Literal["never", "if_missing"] = "never"
    evolve: Literal["never", "add_columns"] = "never"
    on_reject: Literal["fail"] | Sink = "fail"
    """What becomes of rows that the table refuses: the epoch fails, or another sink gets them."""
    rejects_max: int = 1000
    """Rejected rows of one epoch beyond which it fails all the same."""
    meta_schema: str = "epochal"
    password: Secret | str | None = None
    """`env("PGPASSWORD")` or `file(path)`; without it libpq looks for a pgpass or service file."""
    tasks_max: int = 8
    """How many tasks an epoch may have under `strategy="prepared"`: checked against the server."""
    pool_min: int = 2
    pool_max: int = 10
    connect_timeout_s: float = 30.0
    idle_max_s: float = 600.0
    lifetime_max_s: float = 1800.0
    statement_timeout_s: float = 600.0
    lock_timeout_s: float = 30.0
    buffer_bytes: int = 8 * 1024 * 1024
    flush_interval_s: float = 5.0
    pressure: PressureLimits = DEFAULT_PRESSURE

    server: Server = field(init=False, repr=False)
    table_name: TableName = field(init=False, repr=False)
    write_mode: WriteMode = field(init=False, repr=False)
    column_map: Mapping[str, str] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("table_name", parse_table(self.table))
        self._set("server", self._server())
        self._set("write_mode", self._write_mode())
        self._set("column_map", column_map("Postgres", self.columns, require_identifier))
        require_identifier(self.meta_schema, "meta_schema")
        require_choice("Postgres", "create_table", self.create_table, ("never", "if_missing"))
        require_choice("Postgres", "evolve", self.evolve, ("never", "add_columns"))
        require_reject("Postgres", self.on_reject, self.strategy)
        if not self.name:
            database = self.server.parameter("dbname") or self.server.parameter("service")
            self._set("name", SinkName(f"{self.kind}:{database}.{self.table_name}"))
        super().__post_init__()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _server(self) -> Server:
        given = HeldSecret(self.password) if isinstance(self.password, str) else self.password
        parameters, password = parse_url("Postgres", self.url, given)
        self._set("password", password)
        server = Server(
            parameters=tuple(sorted(parameters.items())),
            password=password,
            connect_timeout_s=self.connect_timeout_s,
            statement_timeout_s=self.statement_timeout_s,
            lock_timeout_s=self.lock_timeout_s,
            pool_min=self.pool_min,
            pool_max=self.pool_max,
            idle_max_s=self.idle_max_s,
            lifetime_max_s=self.lifetime_max_s,
        )
        self._set("url", make_conninfo(**parameters))
        return server

    def _write_mode(self) -> WriteMode:
        return write_mode(
            "Postgres",
            mode=self.mode,
            strategy=self.strategy,
            keys=self.keys,
            order_by=self.order_by,
            delete_when=self.delete_when,
        )

    @property
    def target(self) -> str:
        return f"{self.server.place} {self.table_name}"

    @property
    def output_modes(self) -> frozenset[str]:
        return self.write_mode.output_modes

    @property
    def rejects_to(self) -> Sink | None:
        return None if isinstance(self.on_reject, str) else self.on_reject

    @property
    def transaction_key(self) -> str | None:
        """One role on one database; prepared transactions are each task's own."""
        if self.strategy != "staged":
            return None
        return f"{self.kind} {make_conninfo(**dict(self.server.parameters))}"

    def describe(self) -> Mapping[str, Json]:
        return {
            "kind": self.kind,
            "target": self.target,
            "mode": self.mode,
            "strategy": self.strategy,
            "meta_schema": self.meta_schema,
            "rejects_to": None if self.rejects_to is None else self.rejects_to.name,
        }

    def grants(self, role: str = "") -> list[str]:
        """The statements that give a role the least this sink needs; the URL's role by default."""
        return grants(self, role or self.server.parameter("user") or "epochal")

    def writer(self, task: Task) -> PostgresWriter:
        kind = StagedWriter if self.strategy == "staged" else PreparedWriter
        return kind(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        kind = StagedCommitter if self.strategy == "staged" else PreparedCommitter
        return kind(self, identity, limits)
