"""The declaration of a PostgreSQL sink."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from epochal.contract import Committer, Limits, Sink, Task
from epochal.errors import Misconfigured
from epochal.kit.sql.declaring import TableSink
from epochal.kit.sql.modes import require_reject
from epochal.kit.sql.names import NameRule
from epochal.packing import Packing
from epochal.terms import Identity, Json, SinkName

if TYPE_CHECKING:
    import pyarrow as pa

try:
    from psycopg.conninfo import make_conninfo

    from epochal.sinks.postgres.committer import StagedCommitter
    from epochal.sinks.postgres.connecting import Server, parse_url
    from epochal.sinks.postgres.grants import grants
    from epochal.sinks.postgres.names import NAMES
    from epochal.sinks.postgres.packing import laid_out
    from epochal.sinks.postgres.prepared import PreparedCommitter
    from epochal.sinks.postgres.writer import PostgresWriter, PreparedWriter, StagedWriter
except ImportError as error:
    raise Misconfigured(
        f"the PostgreSQL sink needs a package that is not installed: {error.name}",
        "pip install 'epochal[postgres]'",
    ) from error


@dataclass(frozen=True, kw_only=True)
class Postgres(TableSink):
    """
    A table of a PostgreSQL server, version 12 or newer.

    `strategy="staged"` (the default) shows an epoch whole, in one transaction, and needs no DBA.
    `strategy="prepared"` appends with two-phase commit, task by task: the fastest, where the server
    allows it. The url is `postgresql://user@host/database`, or `host=… dbname=…`, or `service=…`;
    without a password libpq looks for a pgpass or service file. The table is `orders`,
    `public.orders`, or with quotes around a part that holds a dot; case is kept. Staging tables and
    the ledger live in `meta_schema`.
    """

    kind: ClassVar[str] = "postgres"
    called: ClassVar[str] = "Postgres"
    names: ClassVar[NameRule] = NAMES
    folds_case: ClassVar[bool] = False
    sends_rejects: ClassVar[bool] = True

    on_reject: Literal["fail"] | Sink = "fail"
    """What becomes of rows that the table refuses: the epoch fails, or another sink gets them."""
    rejects_max: int = 1000
    """Rejected rows of one epoch beyond which it fails all the same."""
    meta_schema: str = "epochal"
    tasks_max: int = 8
    """How many tasks an epoch may have under `strategy="prepared"`: checked against the server."""
    server: Server = field(init=False, repr=False)

    def __post_init__(self) -> None:
        NAMES.require(self.meta_schema, "meta_schema")
        require_reject(self.called, self.on_reject, self.strategy)
        super().__post_init__()

    def _get_ready(self) -> None:
        parameters, password = parse_url(self.called, self.url, self.held_password)
        self._set("password", password)
        server = Server(parameters=tuple(sorted(parameters.items())), **self._server_options())
        self._set("server", server)
        self._set("url", make_conninfo(**parameters))
        if not self.name:
            database = server.parameter("dbname") or server.parameter("service")
            self._set("name", SinkName(f"{self.kind}:{database}.{self.table_name}"))

    @property
    def place(self) -> str:
        return self.server.place

    @property
    def meta(self) -> str:
        return self.meta_schema

    @property
    def rejects_to(self) -> Sink | None:
        return None if isinstance(self.on_reject, str) else self.on_reject

    @property
    def rejects_limit(self) -> int:
        return self.rejects_max

    @property
    def transaction_key(self) -> str | None:
        """One role on one database; prepared transactions are each task's own."""
        if self.strategy != "staged":
            return None
        return f"{self.kind} {make_conninfo(**dict(self.server.parameters))}"

    def grants(self, role: str = "") -> list[str]:
        """The statements that give a role the least this sink needs; the URL's role by default."""
        return grants(self, role or self.server.parameter("user") or "epochal")

    def packing(self, schema: pa.Schema, handout: Json) -> Packing | None:
        return laid_out(self, schema, handout)

    def writer(self, task: Task) -> PostgresWriter:
        kind = StagedWriter if self.strategy == "staged" else PreparedWriter
        return kind(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        kind = StagedCommitter if self.strategy == "staged" else PreparedCommitter
        return kind(self, identity, limits)
