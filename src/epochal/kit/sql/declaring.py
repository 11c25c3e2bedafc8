"""What the declarations of all tables have in common: the options, under the same names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sink_base import SinkBase
from epochal.kit.sql.columns import column_map, require_choice
from epochal.kit.sql.modes import Mode, Strategy, WriteMode, write_mode
from epochal.kit.sql.names import NameRule, TableName
from epochal.kit.sql.pressure import DEFAULT_PRESSURE, PressureLimits
from epochal.kit.sql.server import DatabaseServer
from epochal.terms import Json


@dataclass(frozen=True, kw_only=True)
class TableSink(SinkBase):
    """A table of a database."""

    called: ClassVar[str]
    """How messages name the sink."""
    names: ClassVar[NameRule]
    folds_case: ClassVar[bool] = True
    """Whether the database finds a column by its name in any case."""
    sends_rejects: ClassVar[bool] = False
    """Whether rows that the table refuses may go to another sink."""

    url: str = field(kw_only=False)
    table: str
    mode: Mode = "append"
    keys: Sequence[str] | str = ()
    """Fields that say which row is meant, for upsert and replace."""
    order_by: Sequence[str] | str = ()
    """Of several rows of one key in one epoch the highest by these fields wins."""
    delete_when: str | None = None
    """A condition in the database's own SQL over the fields: rows that delete their key."""
    columns: Mapping[str, str] | Sequence[str] | None = None
    """Which field goes into which column, and only these; if not given, each by its own name."""
    strategy: Strategy = "staged"
    create_table: Literal["never", "if_missing"] = "never"
    evolve: Literal["never", "add_columns"] = "never"
    password: Secret | str | None = None
    """`env("NAME")` or `file(path)`."""
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

    table_name: TableName = field(init=False, repr=False)
    write_mode: WriteMode = field(init=False, repr=False)
    column_map: Mapping[str, str] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("table_name", self.names.parse_table(self.table))
        self._set("write_mode", self._write_mode())
        self._set("column_map", column_map(self.called, self.columns, self.names.require))
        require_choice(self.called, "create_table", self.create_table, ("never", "if_missing"))
        require_choice(self.called, "evolve", self.evolve, ("never", "add_columns"))
        self._get_ready()
        super().__post_init__()

    @abstractmethod
    def _get_ready(self) -> None:
        """Read the url, and take its password out of sight."""

    @property
    def held_password(self) -> Secret | None:
        return HeldSecret(self.password) if isinstance(self.password, str) else self.password

    def _server_options(self) -> dict[str, Any]:
        """What is declared of how the server is spoken to, once `password` is out of the url."""
        return {option.name: getattr(self, option.name) for option in fields(DatabaseServer)}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _write_mode(self) -> WriteMode:
        return write_mode(
            self.called,
            mode=self.mode,
            strategy=self.strategy,
            keys=self.keys,
            order_by=self.order_by,
            delete_when=self.delete_when,
            folds_case=self.folds_case,
        )

    @property
    @abstractmethod
    def place(self) -> str:
        """The server and database, for people."""

    @property
    @abstractmethod
    def meta(self) -> str:
        """The schema that holds staging tables and the ledger."""

    @property
    def rejects_limit(self) -> int:
        """How many rows of an epoch may go to another sink."""
        return 0

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
