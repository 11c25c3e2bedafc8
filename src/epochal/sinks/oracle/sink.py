"""The declaration of an Oracle sink."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from epochal.contract import Committer, Limits, Task
from epochal.errors import Misconfigured
from epochal.kit.sql.declaring import TableSink
from epochal.kit.sql.modes import WriteMode
from epochal.kit.sql.names import NameRule
from epochal.terms import Identity, SinkName

try:
    from epochal.kit.sql.prepared import PreparedCommitter
    from epochal.kit.sql.staged import StagedCommitter
    from epochal.sinks.oracle.checking import OracleChecker
    from epochal.sinks.oracle.connecting import OraclePool, Server, parse_url
    from epochal.sinks.oracle.dialect import DIALECT, NAMES
    from epochal.sinks.oracle.grants import grants
    from epochal.sinks.oracle.writer import OracleWriter, PreparedWriter, StagedWriter
except ImportError as error:
    raise Misconfigured(
        f"the Oracle sink needs a package that is not installed: {error.name}",
        "pip install 'epochal[oracle]'",
    ) from error


@dataclass(frozen=True, kw_only=True)
class Oracle(TableSink):
    """
    A table of an Oracle database, version 12.2 or newer.

    `strategy="staged"` (the default) shows an epoch whole, in one transaction. With
    `strategy="prepared"` each task appends in a global transaction of its own, once the server has
    shown that this works. The url is `oracle://user@host:1521/service`. Names without quotes mean
    the same in capitals, and so do fields. Staging tables and the ledger live in the schema
    `meta_schema`, the user's own by default.
    """

    kind: ClassVar[str] = "oracle"
    called: ClassVar[str] = "Oracle"
    names: ClassVar[NameRule] = NAMES

    on_reject: Literal["fail"] = "fail"
    """What becomes of rows that the table refuses: the epoch fails, with the row named."""
    meta_schema: str | None = None
    server: Server = field(init=False, repr=False)

    def _get_ready(self) -> None:
        if self.on_reject != "fail":
            raise Misconfigured(
                f"Oracle: on_reject={self.on_reject!r}",
                'on_reject="fail": the epoch fails, and the row and the reason are named',
            )
        user, dsn, password = parse_url(self.url, self.held_password)
        self._set("password", password)
        self._set("server", Server(dsn=dsn, user=user, **self._server_options()))
        self._set("url", f"oracle://{user}@{dsn}")
        self._set("column_map", self._folded_columns())
        if not self.name:
            self._set("name", SinkName(f"{self.kind}:{dsn}.{self.table_name}"))

    def _write_mode(self) -> WriteMode:
        declared = super()._write_mode()
        return replace(
            declared,
            keys=tuple(name.upper() for name in declared.keys),
            order_by=tuple(name.upper() for name in declared.order_by),
        )

    def _folded_columns(self) -> dict[str, str] | None:
        """Fields in capitals, and so their columns, unless one stands in quotes."""
        if self.column_map is None:
            return None
        return {
            name.upper(): column[1:-1] if column.startswith('"') else column.upper()
            for name, column in self.column_map.items()
        }

    @property
    def place(self) -> str:
        return self.server.place

    @property
    def meta(self) -> str:
        return self.meta_schema or self.server.user.upper()

    @property
    def table_schema(self) -> str:
        return self.table_name.schema or self.server.user.upper()

    def grants(self, user: str = "") -> list[str]:
        """Statements that give a user the least this sink needs; the url's user by default."""
        return grants(self, user or self.server.user)

    def writer(self, task: Task) -> OracleWriter:
        return (StagedWriter if self.strategy == "staged" else PreparedWriter)(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        kind = StagedCommitter if self.strategy == "staged" else PreparedCommitter
        return kind(
            sink=self,
            identity=identity,
            limits=limits,
            dialect=DIALECT,
            pool=OraclePool(self.server),
            checker=OracleChecker(self, identity),
        )
