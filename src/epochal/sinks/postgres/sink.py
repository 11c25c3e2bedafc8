"""The declaration of a PostgreSQL sink."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from epochal.contract import Committer, Task, Writer
from epochal.errors import not_installed
from epochal.kit.row_layout import RowLayout
from epochal.kit.sql.modes import WriteMode, possible_mode
from epochal.kit.sql.names import NameRule
from epochal.kit.sql.table_sink import PREPARED, STAGED, TableSink
from epochal.terms import Identity, Json, Limits, SinkName

if TYPE_CHECKING:
    import pyarrow as pa

try:
    from psycopg.conninfo import make_conninfo

    from epochal.sinks.postgres.client import Server, parse_url
    from epochal.sinks.postgres.dialect import NAMES
except ImportError as error:
    raise not_installed("the PostgreSQL sink", error.name, "postgres") from error


PROMISES = (
    replace(STAGED, sink="`Postgres`, staged"),
    replace(PREPARED, sink="`Postgres`, prepared"),
)


_WHO_AND_WHERE = ("service", "host", "hostaddr", "user", "options")


@dataclass(frozen=True, kw_only=True)
class Postgres(TableSink):
    """
    A table of a PostgreSQL server, version 12 or newer.

    `strategy="staged"` (the default) shows an epoch whole, in one transaction, and needs no DBA.
    `strategy="prepared"` appends with two-phase commit, task by task: the fastest, where the server
    allows it. The url is `postgresql://user@host/database`, or `host=… dbname=…`, or `service=…`;
    without a password libpq looks for a pgpass or service file. The table is `orders`,
    `public.orders`, or with quotes around a part that holds a dot; case is kept. The ledger lives
    in `meta_schema`, staging tables in a schema of that name and `_staging`.
    """

    kind: ClassVar[str] = "postgres"
    writes_on_driver: ClassVar[bool] = True
    called: ClassVar[str] = "Postgres"
    names: ClassVar[NameRule] = NAMES
    stages_late: ClassVar[bool] = True
    folds_case: ClassVar[bool] = False

    meta_schema: str = "epochal"
    """The schema of the ledger; that of staging has this name and `_staging`."""
    tasks_max: int = 8
    """
    How many tasks of an epoch leave a prepared transaction under `strategy="prepared"`: checked
    against the server. Further ones stage their rows.
    """
    truncate: bool = False
    """Whether mode="complete" empties the table by TRUNCATE: readers wait until the COMMIT."""
    staging_bytes_max: int = 256 * 1024**3
    """How large the staging tables of this table may be before an attempt waits for room."""
    server: Server = field(init=False, repr=False)

    def __post_init__(self) -> None:
        NAMES.require(self.meta_schema, "meta_schema")
        NAMES.require(self.staging_schema, "meta_schema")
        super().__post_init__()

    def _write_mode(self) -> WriteMode:
        declared = replace(super()._write_mode(), is_truncating=self.truncate)
        return possible_mode(self.called, self.strategy, declared)

    def _read_url(self) -> None:
        parameters, password = parse_url(self.called, self.url, self.held_password)
        self._set("password", password)
        server = Server(parameters=tuple(sorted(parameters.items())), **self._server_options())
        self._set("server", server)
        self._set("url", make_conninfo(**parameters))
        if not self.name:
            database = server.parameter("dbname") or server.parameter("service")
            self._set("name", SinkName(f"{self.kind}:{database}.{self.table_name}"))

    @property
    def meta(self) -> str:
        return self.meta_schema

    @property
    def staging_schema(self) -> str:
        """A schema of its own, so that a dump can leave it out and keep the ledger."""
        return f"{self.meta_schema}_staging"

    @property
    def staging_limit_bytes(self) -> int | None:
        return self.staging_bytes_max

    @property
    def server_key(self) -> str:
        """Without the parameters that only say how to connect (timeouts, names, TLS)."""
        given = dict(self.server.parameters)
        user = given.get("user", "")
        return make_conninfo(
            **{name: given[name] for name in _WHO_AND_WHERE if name in given},
            port=given.get("port", "5432"),
            dbname=given.get("dbname", user),
        )

    def grants(self, role: str = "") -> list[str]:
        """The statements that give a role the least this sink needs; the URL's role by default."""
        from epochal.sinks.postgres.check import grants  # noqa: PLC0415  for people only

        return grants(self, role or self.server.parameter("user") or "epochal")

    # What only the driver or only a task needs is imported there.

    def row_layout(self, schema: pa.Schema, handout: Json) -> RowLayout | None:
        from epochal.sinks.postgres.copy_format import row_packing  # noqa: PLC0415

        return row_packing(self, schema, handout)

    def writer(self, task: Task) -> Writer:
        from epochal.sinks.postgres.writer import writer_of  # noqa: PLC0415

        return writer_of(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        from epochal.sinks.postgres.check import PostgresChecker  # noqa: PLC0415
        from epochal.sinks.postgres.client import PostgresPool  # noqa: PLC0415
        from epochal.sinks.postgres.slots import Slots  # noqa: PLC0415

        pool = PostgresPool(self.server, identity)
        return self._committer(limits, pool, PostgresChecker(self, identity), Slots(self))
