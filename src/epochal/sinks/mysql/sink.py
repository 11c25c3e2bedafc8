"""The declaration of a MySQL or MariaDB sink."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from epochal.contract import Committer, Task, Writer
from epochal.errors import not_installed
from epochal.kit.sql.names import NameRule
from epochal.kit.sql.table_sink import PREPARED, STAGED, TableSink
from epochal.terms import Identity, Limits, SinkName

try:
    from epochal.sinks.mysql.client import Server, parse_url
    from epochal.sinks.mysql.dialect import DIALECT, NAMES
except ImportError as error:
    raise not_installed("the MySQL sink", error.name, "mysql") from error


PROMISES = (
    replace(STAGED, sink="`MySQL`, staged"),
    replace(PREPARED, sink="`MySQL`, XA"),
)


@dataclass(frozen=True, kw_only=True)
class MySQL(TableSink):
    """
    A table of a MySQL (8.0 or newer) or MariaDB (10.5 or newer) server.

    `strategy="staged"` (the default) shows an epoch whole, in one transaction. With
    `strategy="prepared"` each task appends in an XA transaction of its own; where the table has
    keys, attempts that are tried again are applied from staging. The url is
    `mysql://user@host:3306/database`; the table `orders` or `shop.orders`, case kept. The ledger
    lives in the database `meta_schema`, staging tables in `<meta_schema>_staging`.
    """

    kind: ClassVar[str] = "mysql"
    writes_on_driver: ClassVar[bool] = True
    called: ClassVar[str] = "MySQL"
    names: ClassVar[NameRule] = NAMES
    stages_late: ClassVar[bool] = True

    meta_schema: str = "epochal"
    """The database of the ledger; that of staging has this name and `_staging`."""
    server: Server = field(init=False, repr=False)

    def __post_init__(self) -> None:
        NAMES.require(self.staging_schema, "meta_schema")
        super().__post_init__()

    def _read_url(self) -> None:
        parts, password = parse_url(self.url, self.held_password)
        self._set("password", password)
        server = Server(**parts, **self._server_options())
        self._set("server", server)
        user = f"{server.user}@" if server.user else ""
        self._set("url", f"mysql://{user}{server.place}")
        if not self.name:
            self._set("name", SinkName(f"{self.kind}:{server.database}.{self.table_name}"))

    @property
    def meta(self) -> str:
        return self.meta_schema

    @property
    def staging_schema(self) -> str:
        """A database of its own, so that a dump can leave it out and keep the ledger."""
        return f"{self.meta_schema}_staging"

    @property
    def server_key(self) -> str:
        """Without the parameters, which only say how to connect: `url` has the socket."""
        return self.url

    def grants(self, account: str = "") -> list[str]:
        """Statements that give an account the least this sink needs; the url's user by default."""
        from epochal.sinks.mysql.check import grants  # noqa: PLC0415  for people only

        return grants(self, account or self.account)

    @property
    def account(self) -> str:
        """The url's user, as statements name it."""
        return f"{DIALECT.literal(self.server.user)}@'%'"

    # What only the driver or only a task needs is imported there.

    def writer(self, task: Task) -> Writer:
        from epochal.sinks.mysql import writer  # noqa: PLC0415

        if self.strategy == "prepared":
            return writer.PreparedWriter(self, task)
        kind = writer.StagedWriter if self.rejects_to is None else writer.KeepingWriter
        return kind(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        from epochal.sinks.mysql.check import MySQLChecker  # noqa: PLC0415
        from epochal.sinks.mysql.slots import Slots  # noqa: PLC0415

        try:
            from epochal.sinks.mysql.pool import MySQLPool  # noqa: PLC0415
        except ImportError as error:
            raise not_installed("the MySQL sink", error.name, "mysql") from error
        checker = MySQLChecker(self, identity)
        return self._committer(limits, MySQLPool(self.server, identity), checker, Slots(self))
