"""The declaration of a MySQL or MariaDB sink."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from epochal.contract import Committer, Limits, Sink, Task
from epochal.errors import Misconfigured
from epochal.kit.sql.declaring import TableSink
from epochal.kit.sql.modes import require_reject
from epochal.kit.sql.names import NameRule
from epochal.terms import Identity, SinkName

try:
    from epochal.sinks.mysql.connecting import Server, parse_url
    from epochal.sinks.mysql.dialect import DIALECT, NAMES
    from epochal.sinks.mysql.grants import grants
    from epochal.sinks.mysql.unfit import KeepingWriter
    from epochal.sinks.mysql.writer import MySQLWriter, PreparedWriter, StagedWriter
except ImportError as error:
    raise Misconfigured(
        f"the MySQL sink needs a package that is not installed: {error.name}",
        "pip install 'epochal[mysql]'",
    ) from error


@dataclass(frozen=True, kw_only=True)
class MySQL(TableSink):
    """
    A table of a MySQL (8.0 or newer) or MariaDB (10.5 or newer) server.

    `strategy="staged"` (the default) shows an epoch whole, in one transaction. With
    `strategy="prepared"` each task appends in an XA transaction of its own. The url is
    `mysql://user@host:3306/database`; the table `orders` or `shop.orders`, case kept. Staging
    tables and the ledger live in the database `meta_schema`.
    """

    kind: ClassVar[str] = "mysql"
    called: ClassVar[str] = "MySQL"
    names: ClassVar[NameRule] = NAMES
    sends_rejects: ClassVar[bool] = True

    on_reject: Literal["fail"] | Sink = "fail"
    """What becomes of rows that the table refuses: the epoch fails, or another sink gets them."""
    rejects_max: int = 1000
    """Rejected rows of one epoch beyond which it fails all the same."""
    meta_schema: str = "epochal"
    server: Server = field(init=False, repr=False)

    def __post_init__(self) -> None:
        NAMES.require(self.meta_schema, "meta_schema")
        require_reject(self.called, self.on_reject, self.strategy)
        super().__post_init__()

    def _get_ready(self) -> None:
        told, password = parse_url(self.url, self.held_password)
        self._set("password", password)
        server = Server(**told, **self._server_options())
        self._set("server", server)
        user = f"{server.user}@" if server.user else ""
        self._set("url", f"mysql://{user}{server.place}")
        if not self.name:
            self._set("name", SinkName(f"{self.kind}:{server.database}.{self.table_name}"))

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

    def grants(self, account: str = "") -> list[str]:
        """Statements that give an account the least this sink needs; the url's user by default."""
        return grants(self, account or f"{DIALECT.literal(self.server.user)}@'%'")

    def writer(self, task: Task) -> MySQLWriter:
        if self.strategy == "prepared":
            return PreparedWriter(self, task)
        return (StagedWriter if self.rejects_to is None else KeepingWriter)(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        # Only on the driver: the pool's package is large, and a task needs none of it.
        from epochal.sinks.mysql.committing import committer  # noqa: PLC0415

        return committer(self, identity, limits)
