"""The declaration of an Oracle sink."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from epochal.contract import Committer, Task, Writer
from epochal.errors import Misconfigured, not_installed
from epochal.kit.sql.modes import WriteMode
from epochal.kit.sql.names import NameRule
from epochal.kit.sql.table_sink import PREPARED, STAGED, TableSink
from epochal.terms import Identity, Limits, SinkName

try:
    from epochal.sinks.oracle.client import Server, parse_url
    from epochal.sinks.oracle.dialect import DIALECT, NAMES
except ImportError as error:
    raise not_installed("the Oracle sink", error.name, "oracle") from error


_UNTRIED = ["never run against an Oracle server"]
PROMISES = (
    replace(STAGED, sink="`Oracle`, staged", limits=_UNTRIED),
    replace(
        PREPARED,
        sink="`Oracle`, two-phase",
        limits=[*_UNTRIED, "refused on a table with a unique index", *PREPARED.limits[1:]],
    ),
)


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
    writes_on_driver: ClassVar[bool] = True
    called: ClassVar[str] = "Oracle"
    names: ClassVar[NameRule] = NAMES

    meta_schema: str | None = None
    """The schema of the ledger and of staging tables; the user's own where none is given."""
    server: Server = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_fixed:
            raise Misconfigured(
                "Oracle: staging='fixed' is not offered: tables that are used again rest on locks "
                "that are skipped, which was never run on an Oracle server",
                "leave it out: each attempt makes and drops a table of its own",
            )

    def _read_url(self) -> None:
        user, dsn, password = parse_url(self.url, self.held_password)
        self._set("password", password)
        self._set("server", Server(dsn=dsn, user=user, **self._server_options()))
        self._set("url", f"oracle://{user}@{dsn}")
        self._set("column_map", self._folded_columns())
        if not self.name:
            self._set("name", SinkName(f"{self.kind}:{dsn}.{self.table_name}"))

    def _write_mode(self) -> WriteMode:
        declared = super()._write_mode()
        if declared.skip_unchanged or declared.tombstones is not None:
            raise Misconfigured(
                "Oracle: skip_unchanged and tombstones are not offered: large objects can't be "
                "compared, and neither was tried on a server",
                "leave them out; newer= and delete_as= keep older rows out of a table",
            )
        return replace(
            declared,
            keys=tuple(name.upper() for name in declared.keys),
            order_by=tuple(name.upper() for name in declared.order_by),
            newer=declared.newer and declared.newer.upper(),
            delete_as={column.upper(): made for column, made in declared.delete_as.items()},
        )

    def _folded_columns(self) -> dict[str, str] | None:
        """Fields in capitals, and so their columns, unless one is in quotes."""
        if self.column_map is None:
            return None
        return {
            name.upper(): column[1:-1] if column.startswith('"') else column.upper()
            for name, column in self.column_map.items()
        }

    @property
    def meta(self) -> str:
        return self.meta_schema or self.server.user.upper()

    @property
    def server_key(self) -> str:
        return f"{self.server.user}@{self.server.dsn}"

    @property
    def table_schema(self) -> str:
        return self.table_name.schema or self.server.user.upper()

    def grants(self, user: str = "") -> list[str]:
        """Statements that give a user the least this sink needs; the url's user by default."""
        from epochal.sinks.oracle.check import grants  # noqa: PLC0415  for people only

        return grants(self, user or self.server.user)

    # What only the driver or only a task needs is imported there.

    def writer(self, task: Task) -> Writer:
        from epochal.sinks.oracle.writer import PreparedWriter, StagedWriter  # noqa: PLC0415

        return (StagedWriter if self.strategy == "staged" else PreparedWriter)(self, task)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        from epochal.kit.sql.staging_tables import OwnTables  # noqa: PLC0415
        from epochal.sinks.oracle.check import OracleChecker  # noqa: PLC0415
        from epochal.sinks.oracle.client import OraclePool  # noqa: PLC0415

        staging = OwnTables(schema=self.meta, dialect=DIALECT)
        checker = OracleChecker(self, identity)
        return self._committer(limits, OraclePool(self.server), checker, staging)
