"""The base of sinks into a table of a database: the options that all of them have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from epochal.contract import Committer, Sink
from epochal.errors import Misconfigured
from epochal.kit.secrets import CalledSecret, HeldSecret, Secret
from epochal.kit.sink_base import Promises, SinkBase
from epochal.kit.sql.backpressure import DEFAULT_PRESSURE, PressureLimits
from epochal.kit.sql.client import DatabaseServer, Pool
from epochal.kit.sql.columns import column_map, require_choice
from epochal.kit.sql.modes import (
    Mode,
    OnMiss,
    Strategy,
    WriteMode,
    as_names,
    possible_mode,
    require_reject,
)
from epochal.kit.sql.names import NameRule, TableName
from epochal.terms import Json, Limits

if TYPE_CHECKING:
    from epochal.kit.sql.check import Checker
    from epochal.kit.sql.staging_tables import Staging


STAGED = Promises(
    sink="staged",
    at_one_instant="a whole epoch, in all tables of one url",
    proof="a row in the same transaction",
    by_key="upsert, replace, insert_new, update",
    deletes="`delete_when`",
    output_modes="append; with keys also update; or complete",
)
PREPARED = Promises(
    sink="prepared",
    at_one_instant="a task's rows",
    proof="a row in the same transaction",
    limits=[
        "a key in two tasks of one epoch fails it, after `lock_timeout_s`",
        "the server holds prepared transactions while the pipeline is down",
    ],
)
"""The promises of both strategies; a database replaces what differs."""


_SLOTS_MIN, _SLOTS_MAX = 2, 999
_TRANSACTION_WORDS = frozenset(
    {"ABORT", "BEGIN", "COMMIT", "END", "PREPARE", "ROLLBACK", "SAVEPOINT", "START", "XA"}
)


@dataclass(frozen=True, kw_only=True)
class TableSink(SinkBase):
    """A table of a database."""

    called: ClassVar[str]
    """How messages name the sink."""
    names: ClassVar[NameRule]
    stages_late: ClassVar[bool] = False
    """
    Whether under `strategy="prepared"` attempts that may meet others' keys stage their rows, for
    the rehearsal to apply: then tables may have unique indexes.
    """
    folds_case: ClassVar[bool] = True
    """Whether the database finds a column by its name in any case."""

    url: str = field(kw_only=False)
    """The server, the user and the database, in the form that the guide shows."""
    table: str
    """Its name, with the schema where that is not the default one."""
    mode: Mode = "append"
    """What becomes of rows whose key is there already: see change streams."""
    keys: Sequence[str] | str = ()
    """Fields that identify a row, for upsert and replace."""
    order_by: Sequence[str] | str = ()
    """Of several rows of one key in one epoch the highest by these fields wins."""
    newer: str | None = None
    """A row changes or deletes another only where it is higher by this field, in any epoch."""
    delete_when: str | None = None
    """A condition in the database's own SQL over the fields: rows that delete their key."""
    delete_as: Mapping[str, str] | None = None
    """What a delete writes, by column, in the database's SQL: then the row stays."""
    tombstones: str | None = None
    """A table that remembers deleted keys, with `newer`, so that no older row brings one back."""
    skip_unchanged: bool = False
    """Write no row of upsert or update that would change nothing."""
    on_miss: OnMiss = "ignore"
    """What becomes of rows of mode="update" whose key is not there: left out, or refused."""
    columns: Mapping[str, str] | Sequence[str] | None = None
    """Which field goes into which column, and only these; if not given, each by its own name."""
    strategy: Strategy = "staged"
    """
    Tasks write to staging tables, and the driver applies them in one transaction; or, append only,
    each task leaves a prepared transaction in the table itself.
    """
    staging: Literal["managed", "fixed"] = "managed"
    """
    Whether staging tables are made as tasks need them, or are there already: then no statement of
    DDL is run, and `epochal staging` prints those for a DBA.
    """
    slots: int = 8
    """
    With staging="fixed": how many staging tables there are. A quarter is kept for attempts that are
    tried again; as many tasks as the others write an epoch.
    """
    create_table: Literal["never", "if_missing"] = "never"
    """Whether a table that does not exist is created, for the columns that arrive."""
    types: Mapping[str, str] | None = None
    """The types of columns that we create, in the database's SQL; else they follow the fields."""
    table_options: str = ""
    """What follows the columns where we create the table: PARTITION BY, COMMENT …"""
    evolve: Literal["never", "add_columns"] = "never"
    """Whether columns that the table does not have are added, before the first row."""
    on_reject: Literal["fail"] | Sink = "fail"
    """What becomes of rows that the table refuses: the epoch fails, or another sink gets them."""
    rejects_max: int = 1000
    """Rejected rows of one epoch beyond which it fails all the same."""
    password: Secret | str | Callable[[], str] | None = None
    """
    `env("NAME")`, `file(path)`, or a function of a module that returns it, called again for each
    new connection: tokens expire.
    """
    session_sql: Sequence[str] = ()
    """
    Statements that are run first on every new connection, of the driver and of tasks. What epochal
    sets itself, it sets after them.
    """
    pool_min: int = 2
    """Connections that the driver keeps open."""
    pool_max: int = 10
    """The most that the driver opens at a time; each task has one of its own."""
    connect_timeout_s: float = 30.0
    idle_max_s: float = 600.0
    """A connection that was not used for so long is closed."""
    lifetime_max_s: float = 1800.0
    """A connection of this age is closed after its use."""
    statement_timeout_s: float = 600.0
    """How long one statement may take."""
    lock_timeout_s: float = 30.0
    """How long a statement may wait for a lock."""
    buffer_bytes: int = 8 * 1024 * 1024
    """How much a task buffers before it sends a block of rows."""
    flush_interval_s: float = 5.0
    """A block that is older is sent with the next batch, however small it is."""
    pressure: PressureLimits = DEFAULT_PRESSURE
    """When a task slows down, pauses or gives its epoch up because the server is slow."""

    table_name: TableName = field(init=False, repr=False)
    write_mode: WriteMode = field(init=False, repr=False)
    column_map: Mapping[str, str] | None = field(init=False, repr=False)
    server: DatabaseServer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("table_name", self.names.parse_table(self.table))
        self._set("write_mode", self._write_mode())
        self._set("column_map", column_map(self.called, self.columns, self.names.require))
        require_choice(self.called, "create_table", self.create_table, ("never", "if_missing"))
        require_choice(self.called, "evolve", self.evolve, ("never", "add_columns"))
        if not isinstance(self.pressure, PressureLimits):
            raise Misconfigured(
                f"{self.called}: pressure={self.pressure!r}",
                "pressure=ep.PressureLimits(drop_above_s=300)",
            )
        if self.pool_max < 1:
            raise Misconfigured(f"{self.called}: pool_max={self.pool_max}", "a number above 0")
        require_created(self)
        require_fixed(self)
        require_reject(self.called, self.on_reject, self.strategy)
        self._set("session_sql", session_statements(self.called, self.session_sql))
        self._read_url()
        super().__post_init__()

    @abstractmethod
    def _read_url(self) -> None:
        """Set `server`, and `url` without its password."""

    @property
    def held_password(self) -> Secret | None:
        if isinstance(self.password, str):
            return HeldSecret(self.password)
        return CalledSecret(self.password) if callable(self.password) else self.password

    def _server_options(self) -> dict[str, Any]:
        """The declared limits of connections, once `password` is out of the url."""
        return {option.name: getattr(self, option.name) for option in fields(DatabaseServer)}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _write_mode(self) -> WriteMode:
        declared = WriteMode(
            mode=self.mode,
            keys=as_names(self.keys),
            order_by=as_names(self.order_by),
            newer=self.newer,
            delete_when=self.delete_when,
            delete_as={
                self.names.require(column, "column"): made
                for column, made in (self.delete_as or {}).items()
            },
            tombstones=self.names.parse_table(self.tombstones) if self.tombstones else None,
            skip_unchanged=self.skip_unchanged,
            on_miss=self.on_miss,
            folds_case=self.folds_case,
            quotes=self.names.quotes,
        )
        return possible_mode(self.called, self.strategy, declared)

    @property
    def place(self) -> str:
        """The server and database, for people."""
        return self.server.place

    @property
    @abstractmethod
    def meta(self) -> str:
        """The schema that holds the ledger."""

    @property
    def staging_schema(self) -> str:
        """The schema that holds staging tables."""
        return self.meta

    @property
    def staging_limit_bytes(self) -> int | None:
        """How large the staging tables of the table may be, where that is limited."""
        return None

    @property
    def is_fixed(self) -> bool:
        return self.staging == "fixed"

    @property
    def uses_slots(self) -> bool:
        """Whether attempts stage their rows, all or some."""
        return self.strategy == "staged" or self.stages_late

    @property
    def writers_max(self) -> int | None:
        if not self.is_fixed or not self.uses_slots:
            return None
        return self.slots - max(1, self.slots // 4)

    @property
    def rejects_to(self) -> Sink | None:
        return None if isinstance(self.on_reject, str) else self.on_reject

    def named_columns(self) -> tuple[list[str], list[str]]:
        """The columns that `columns=` names, and those of the key; without it none is known yet."""
        names = self.column_map or {}
        return list(names.values()), [names.get(key, key) for key in self.write_mode.keys]

    @property
    @abstractmethod
    def server_key(self) -> str:
        """The server, database and user that this sink connects to; no secret."""

    @property
    def transaction_key(self) -> str | None:
        """
        One user on one database, in sessions that are set up alike: a search_path or a role decides
        which table is meant. Prepared transactions are each task's own.
        """
        if self.strategy != "staged":
            return None
        return "; ".join([f"{self.kind} {self.server_key}", *self.session_sql])

    def _committer(
        self, limits: Limits, pool: Pool, checker: Checker[Any, Any], staging: Staging
    ) -> Committer:
        """The strategy's committer; imported here, as tasks don't need it."""
        from epochal.kit.sql.prepared import PreparedSqlCommitter  # noqa: PLC0415
        from epochal.kit.sql.staged import StagedSqlCommitter  # noqa: PLC0415

        kind = StagedSqlCommitter if self.strategy == "staged" else PreparedSqlCommitter
        return kind(
            sink=self,
            identity=checker.identity,
            limits=limits,
            dialect=checker.dialect,
            pool=pool,
            checker=checker,
            staging=staging,
        )

    @property
    def target(self) -> str:
        return f"{self.place} {self.table_name}"

    @property
    def output_modes(self) -> frozenset[str]:
        return self.write_mode.output_modes

    def describe(self) -> Mapping[str, Json]:
        return {
            "kind": self.kind,
            "target": self.target,
            "mode": self.mode,
            "strategy": self.strategy,
            "meta_schema": self.meta,
            "rejects_to": None if self.rejects_to is None else self.rejects_to.name,
        }


def session_statements(called: str, given: Sequence[object]) -> tuple[str, ...]:
    """The statements of `session_sql`, none of which may begin or end a transaction."""
    if isinstance(given, str):
        raise Misconfigured(
            f"{called}: session_sql={given!r} is one string, not a list of statements",
            f"session_sql=[{given!r}]",
        )
    statements = []
    for statement in given:
        words = statement.split() if isinstance(statement, str) else []
        if not isinstance(statement, str) or not words or "\0" in statement:
            raise Misconfigured(
                f"{called}: session_sql has {statement!r}, which is no statement",
                "a list of SQL statements",
            )
        statements.append(statement)
        if words[0].strip(";").upper() in _TRANSACTION_WORDS:
            raise Misconfigured(
                f"{called}: session_sql has {statement!r}: transactions are begun and ended by the "
                "sink",
                "statements that set something up: SET ROLE …, SET …, CALL …",
            )
    return tuple(statements)


def require_created(sink: TableSink) -> None:
    """Options of a table that nobody creates would do nothing."""
    is_created = sink.create_table == "if_missing"
    if sink.table_options and not is_created:
        raise Misconfigured(
            f"{sink.called}: table_options with create_table='never'", "create_table='if_missing'"
        )
    if sink.types and not (is_created or sink.evolve == "add_columns"):
        raise Misconfigured(
            f"{sink.called}: types with create_table='never' and evolve='never': no column is made",
            "create_table='if_missing' or evolve='add_columns'",
        )


def require_fixed(sink: TableSink) -> None:
    """Where no DDL may be run, nothing can be made."""
    require_choice(sink.called, "staging", sink.staging, ("managed", "fixed"))
    if not _SLOTS_MIN <= sink.slots <= _SLOTS_MAX:
        raise Misconfigured(
            f"{sink.called}: slots={sink.slots}", f"a number from {_SLOTS_MIN} to {_SLOTS_MAX}"
        )
    if not sink.is_fixed:
        return
    made = {"create_table": sink.create_table, "evolve": sink.evolve}
    for option, value in made.items():
        if value != "never":
            raise Misconfigured(
                f"{sink.called}: {option}={value!r} with staging='fixed', which runs no DDL",
                f"{option}='never'",
            )
