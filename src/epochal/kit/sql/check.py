"""The checks before the first row, and what is created before the first epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.sql.apply import Mapped
from epochal.kit.sql.client import Session
from epochal.kit.sql.columns import Table, columns_of, steering_fields
from epochal.kit.sql.dialect import UNFIT, Dialect, order_copy
from epochal.kit.sql.names import TableName
from epochal.kit.sql.staging_tables import Missing
from epochal.kit.sql.table_sink import TableSink
from epochal.terms import Ability, Identity, Json

S = TypeVar("S")


def abilities(sink: TableSink) -> list[Ability]:
    """What follows from the strategy, on every database."""
    is_staged = sink.strategy == "staged"
    return [
        *_session_sql(sink),
        *_fixed_staging(sink),
        Ability(
            name="whole epochs",
            granted=is_staged,
            because="one transaction makes an epoch visible"
            if is_staged
            else "each task's rows become visible by themselves, within milliseconds",
        ),
        Ability(
            name="proof",
            granted=True,
            because=f"a ledger row in {sink.meta} is written with the rows",
        ),
    ]


def _fixed_staging(sink: TableSink) -> list[Ability]:
    """By now it was looked for."""
    if sink.writers_max is None:
        return []
    because = (
        f"{sink.slots} slots are there: at most {sink.writers_max} tasks write an epoch, whatever "
        "its partitions, and the other slots are for attempts that are tried again"
    )
    return [Ability(name="staging without DDL", granted=True, because=because)]


def _session_sql(sink: TableSink) -> list[Ability]:
    """By now it was run on a connection."""
    if not sink.session_sql:
        return []
    because = f"run on every new connection: {'; '.join(sink.session_sql)}"
    return [Ability(name="session_sql", granted=True, because=because)]


def written_once(
    sink: TableSink, *, may_collide: bool, obstacle: str = "", needed: str = ""
) -> Ability:
    """
    Which strategy fits. `obstacle`: why `prepared` does not, on this server; `needed`: a right that
    it needs beside those of `staged`.
    """
    name = "rows written once"
    if sink.strategy == "prepared":
        late = ", attempts that are tried again from staging, as keys may collide"
        because = "tasks write into the table itself" + (late if may_collide else "")
        return Ability(name=name, granted=True, because=because)
    if sink.mode != "append":
        obstacle = f"has no mode={sink.mode!r}"
    elif sink.rejects_to is not None:
        obstacle = "has no on_reject"
    if obstacle:
        because = f"strategy='staged' fits best: strategy='prepared' {obstacle}"
        return Ability(name=name, granted=False, because=because)
    because = (
        "staged rows are written twice; strategy='prepared' would fit this table and server, for "
        f"large epochs at about half the work{needed and f' ({needed})'}, and show an epoch task "
        "by task"
    )
    return Ability(name=name, granted=False, because=because)


class Rounded(Protocol):
    """One field that is written, and how its column may round it."""

    @property
    def field(self) -> str: ...

    @property
    def rounding(self) -> str:
        """Empty where every value is kept as it is."""


def exact_values(planned: Sequence[Rounded]) -> list[Ability]:
    """Whether all columns keep all digits of what arrives; nothing where that is not known."""
    if not planned:
        return []
    rounded = [f'"{one.field}": {one.rounding}' for one in planned if one.rounding]
    because = "; ".join(rounded) or "every value is kept as it arrives, or its row is refused"
    return [Ability(name="exact values", granted=not rounded, because=because)]


def must_not_collide(where: object, index: str) -> Misconfigured:
    """The error where `strategy="prepared"` meets a unique index."""
    return Misconfigured(
        f"strategy='prepared' on {where}, which has the {index}: a task that is tried again would "
        "wait for its own first attempt",
        "strategy='staged' (the default) needs none of this; or drop it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedColumns(Generic[S]):
    """The fields that will arrive, as known at the start, and the columns that take them."""

    sent: Mapping[str, S]
    """How each field travels."""
    sink: TableSink

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key."""
        columns = self._created()
        return tuple(columns.get(key, key) for key in self.sink.write_mode.keys)

    def created(self) -> dict[str, S]:
        """The columns of a table that we create, with the field of each."""
        return {column: self.sent[field] for field, column in self._created().items()}

    def missing(self, there: Collection[str]) -> dict[str, S]:
        """The columns that the table lacks, with the field of each."""
        wanted = columns_of(self.sent, there, self.sink.column_map, self.sink.write_mode)
        return {column: self.sent[field] for field, column in wanted.items() if column not in there}

    def written(self, there: Collection[str]) -> frozenset[str]:
        """The columns of the table that rows fill."""
        wanted = columns_of(self.sent, there, self.sink.column_map, self.sink.write_mode)
        return frozenset(wanted.values())

    def _created(self) -> dict[str, str]:
        names, columns, mode = list(self.sent), self.sink.column_map, self.sink.write_mode
        if columns is not None:
            return {name: column for name, column in columns.items() if name in names}
        only_steers = steering_fields(names, mode) if mode.delete_when else ()
        return {name: name for name in names if name not in only_steers or name in mode.order_by}


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLayout:
    """How the rows of a staging table are written."""

    mapped: Sequence[Mapped]
    keeps_unfit: bool
    """Whether it may hold rows as text (`UNFIT`)."""
    arrived: str
    """The expression for a row's place in the order of arrival."""


T = TypeVar("T", bound=Table[Any])


class Checker(ABC, Generic[T, S]):
    """
    Asks a server what it can promise, and creates what is missing once the start is certain.

    `check` runs at every start and changes nothing; it remembers which fields will arrive.
    `make_ready` runs before the first epoch, and creates what they need.
    """

    is_ready: bool = False

    def __init__(self, sink: TableSink, identity: Identity, dialect: Dialect) -> None:
        self._declared = sink
        self.identity = identity
        self.dialect = dialect
        self._expected: ExpectedColumns[S] | None = None

    # Of each database

    @abstractmethod
    def check(self, session: Session, schema: pa.Schema | None) -> list[Ability]: ...

    @abstractmethod
    def sent_fields(self, schema: pa.Schema) -> dict[str, S]:
        """How each field travels; `Misconfigured` where one can't."""

    @abstractmethod
    def read_table(self, session: Session) -> T | None: ...

    def read_named(self, session: Session, name: TableName) -> T | None:
        """Another table than the sink's: of tombstones, which a sink of Oracle refuses."""
        raise NotImplementedError

    def kept_as(self, column: Any) -> str:
        """The whole type of a column, for the table of tombstones."""
        raise NotImplementedError

    @abstractmethod
    def no_table(self, session: Session) -> Misconfigured:
        """The error where the table does not exist."""

    @abstractmethod
    def new_table(self, expected: ExpectedColumns[S]) -> T:
        """The table that `make_ready` will create."""

    @abstractmethod
    def new_column(self, name: str, sent: S, *, is_key: bool) -> Any:
        """A column that `make_ready` will create."""

    @abstractmethod
    def new_ddl(self, sent: S, *, is_key: bool) -> str:
        """The type of such a column."""

    @abstractmethod
    def make_meta(self, session: Session) -> None:
        """Create our schema and ledger where they are missing."""

    def missing(self, session: Session) -> Sequence[Missing]:  # noqa: ARG002
        """
        What a DBA has yet to make beside the table, with staging="fixed". Nothing for Oracle, whose
        sink refuses that option.
        """
        return ()

    def new_name(self) -> str:
        """The quoted name of a table that is created."""
        return self.dialect.quote(*self._declared.table_name.parts)

    def require_may_create(self, session: Session) -> None:
        """Raise `Misconfigured` where the user may not create the table, as far as can be asked."""

    def require_may_add(self, session: Session, table: T, added: Collection[str]) -> None:
        """The same for columns of an existing table."""

    def no_row(self, fields: Mapping[str, S]) -> str:
        """A SELECT of one row of nulls, with columns of the types that staging has."""
        nulls = ", ".join(f"NULL AS {self.dialect.quote(name)}" for name in fields)
        return f"SELECT {nulls}{self.dialect.dual}"

    # Before the first row

    def require_delete_when(self, session: Session) -> None:
        """Have the database read `delete_when` over the fields that arrive."""
        condition, expected = self._declared.write_mode.delete_when, self._expected
        if condition is None or expected is None:
            return
        statement = f"SELECT 1 FROM ({self.no_row(expected.sent)}) s WHERE ({condition}) AND 1 = 0"
        try:
            session.query(statement)
        except self.dialect.errors as error:
            found = self.dialect.classify(error, f"delete_when={condition!r}")
            if not isinstance(found, Misconfigured):
                raise
            hint = f"SQL of the database; the fields are {', '.join(expected.sent)}"
            raise Misconfigured(found.message, hint) from None

    def expect(self, schema: pa.Schema | None) -> ExpectedColumns[S] | None:
        """Remember which fields will arrive; None where nobody knows yet."""
        self._expected = (
            None
            if schema is None
            else ExpectedColumns(sent=self.sent_fields(schema), sink=self._declared)
        )
        return self._expected

    def table_to_be(self, session: Session, there: T | None) -> T | None:
        """The table as it will be at the first epoch."""
        sink, expected = self._declared, self._expected
        if there is None:
            if sink.create_table == "never":
                raise self.no_table(session)
            self.require_may_create(session)
            return None if expected is None else self.new_table(expected)
        if expected is None or sink.evolve == "never":
            return there
        added = expected.missing(there.columns)
        if added:
            self.require_may_add(session, there, added)
        columns = {name: self.new_column(name, sent, is_key=False) for name, sent in added.items()}
        return replace(there, columns={**there.columns, **columns})

    def new_columns(self, expected: ExpectedColumns[S]) -> dict[str, Any]:
        return {
            name: self.new_column(name, sent, is_key=name in expected.keys)
            for name, sent in expected.created().items()
        }

    # Before the first epoch

    def make_ready(self, session: Session) -> None:
        """
        Create our schema and ledger, and the table or its columns where that was asked for.

        Runs in a transaction where DDL can be part of one; else each statement commits by itself.
        With staging="fixed" nothing is made: all of it must be there.
        """
        if self._declared.is_fixed:
            self.require_made(session)
            return
        self.make_meta(session)
        if self._expected is not None:
            self._make_table(session, self._expected)
        if self._declared.write_mode.tombstones is not None:
            self._make_tombstones(session, self._declared.write_mode.tombstones)

    def require_made(self, session: Session) -> None:
        """Refuse to start where a DBA has something to make, with the statements."""
        found = self.missing(session)
        if found:
            sink = self._declared
            raise Misconfigured(
                f"{sink.table} on {sink.place}: staging='fixed', and there is no "
                + ", no ".join(one.what for one in found),
                "a DBA runs this, as `epochal staging` prints it:\n"
                + ";\n".join(statement for one in found for statement in one.ddl),
            )

    def missing_tombstones(self, session: Session, grant: str) -> Sequence[Missing]:
        """The table of deleted keys; `grant`: a statement for `{rights}` on `{table}`."""
        name = self._declared.write_mode.tombstones
        if name is None or self.read_named(session, name) is not None:
            return []
        table, rights = self.dialect.quote(*name.parts), "SELECT, INSERT, UPDATE, DELETE"
        ddl = [self._tombstones_ddl(session, name), grant.format(rights=rights, table=table)]
        return [Missing(what=f"table {name} of tombstones", ddl=ddl)]

    def _make_tombstones(self, session: Session, name: TableName) -> None:
        """Where it is missing."""
        if self.read_named(session, name) is None:
            self._create(session, self._tombstones_ddl(session, name))

    def _tombstones_ddl(self, session: Session, name: TableName) -> str:
        """The table of deleted keys: its columns are those of the table."""
        mode, there, quote = self._declared.write_mode, self.must_read(session), self.dialect.quote
        columns = self._declared.column_map or {}
        keys = [columns.get(key, key) for key in mode.keys]
        kept = [*keys, *(columns.get(field, field) for field in (mode.newer,) if field)]
        definitions = [
            *(f"{quote(one)} {self.kept_as(there.columns[one])} NOT NULL" for one in kept),
            f"deleted_at {self.dialect.moment}",
            f"PRIMARY KEY ({', '.join(map(quote, keys))})",
        ]
        return self.dialect.create_table(quote(*name.parts), definitions)

    def _make_table(self, session: Session, expected: ExpectedColumns[S]) -> None:
        sink, dialect, table = self._declared, self.dialect, self.read_table(session)
        target = self.new_name()
        if table is None and sink.create_table == "if_missing":
            created = dialect.create_table(target, self._definitions(expected))
            self._create(session, f"{created} {sink.table_options}".rstrip())
        elif table is not None and sink.evolve == "add_columns":
            added = [
                f"{dialect.quote(name)} {self._type_of(name, sent, is_key=False)}"
                for name, sent in expected.missing(table.columns).items()
            ]
            if added:
                session.execute(dialect.add_columns(target, added))

    def _definitions(self, expected: ExpectedColumns[S]) -> list[str]:
        quote, keys = self.dialect.quote, expected.keys
        columns = [
            f"{quote(name)} {self._type_of(name, sent, is_key=name in keys)}"
            + (" NOT NULL" if name in keys else "")
            for name, sent in expected.created().items()
        ]
        return [*columns, f"PRIMARY KEY ({', '.join(map(quote, keys))})"] if keys else columns

    def _type_of(self, name: str, sent: S, *, is_key: bool) -> str:
        return (self._declared.types or {}).get(name) or self.new_ddl(sent, is_key=is_key)

    def _create(self, session: Session, statement: str) -> None:
        """Another driver may have created it meanwhile."""
        try:
            session.execute(statement)
        except self.dialect.errors as error:
            if not self.dialect.is_one_of(error, self.dialect.exists):
                raise

    # What the apply and the tasks need

    @property
    def hands_out(self) -> bool:
        """Whether tasks need to know the table."""
        return True

    def layout(self, session: Session) -> str:
        """The columns of the table now, as one text to compare."""
        name = self._declared.table_name
        return self.dialect.layout(session.query, name.schema, name.table)

    def basis(self, session: Session) -> str:
        """What `staged_layout` reads of the table, as one text: another once that has changed."""
        return self.layout(session)

    @property
    def basis_sql(self) -> str:
        """The query for it, where epochs are applied in one message (`Dialect.require_rows`)."""
        return ""

    def handout(self, session: Session, known: Mapping[str, Json] | None) -> Mapping[str, Json]:
        """
        What `Committer.begin` gives to the tasks: the table, and the names they write under.

        `known` is what was given before, and still is as long as nobody altered the table. Its
        layout is read first: what the tasks are given is never older than the layout that they
        compare with.
        """
        layout = self.layout(session)
        if known is not None and known["layout"] == layout:
            return known
        table, identity = asdict(self.must_read(session)), self.identity
        return {
            "table": table,
            "layout": layout,
            "pipeline": identity.pipeline,
            "run": identity.run,
        }

    def no_such_table(self, alike: Collection[Collection[str]]) -> Misconfigured:
        """The error where the table does not exist, and tables with names like it do."""
        sink = self._declared
        named = ", ".join(".".join(parts) for parts in alike)
        return Misconfigured(
            f"there is no table {sink.table} on {sink.place}",
            f"names are taken exactly as they are written; there is {named}"
            if named
            else "create it, or create_table='if_missing'",
        )

    def must_read(self, session: Session) -> T:
        table = self.read_table(session)
        if table is None:
            raise self.no_table(session)
        return table

    def staged_layout(self, session: Session, schema: str, staging: str) -> StagedLayout:
        """What the catalog contains now: the epoch may be older than this driver."""
        sink, dialect, table = self._declared, self.dialect, self.must_read(session)
        there = table.columns
        staged = self.read_staging(session, schema, staging)
        wanted = columns_of(dialect.fields_of(staged), there, sink.column_map, sink.write_mode)
        self._require_types(staged, {f: there[c] for f, c in wanted.items() if c in there})
        self.require_key(table, wanted)
        copies = {name: order_copy(number) for number, name in enumerate(sink.write_mode.order_by)}
        mapped = [
            Mapped(
                field=name,
                column=column,
                is_not_null=column in there and there[column].is_not_null,
                ordered_as=copies[name] if copies.get(name) in staged else "",
            )
            for name, column in wanted.items()
        ]
        return StagedLayout(mapped=mapped, keeps_unfit=UNFIT[0] in staged, arrived=dialect.place)

    def require_key(self, table: T, columns: Mapping[str, str]) -> None:
        """
        Refuse an upsert of fields to these columns where a unique index came or went since the
        start: it would change other rows, or insert a key twice. Nothing to do where the server
        refuses it itself, as it is given the columns of the key.
        """

    def read_staging(self, session: Session, schema: str, table: str) -> Mapping[str, Any]:
        """
        The columns of a staging table, which have the types of the table's own. PostgreSQL does not
        come here: it reads them together with the table's.
        """
        raise NotImplementedError

    def _require_types(self, staged: Mapping[str, Any], taking: Mapping[str, Any]) -> None:
        """
        Staged values are what the columns would keep: read as other types they might be rounded.
        """
        for field, column in taking.items():
            if staged[field].ddl != column.ddl:
                raise TryAgain(
                    f'{self._declared.table}: the column "{column.name}" was altered to '
                    f"{column.ddl}, and rows are staged as {staged[field].ddl}",
                    "the epoch is written again; if it is decided, alter the column back",
                )
