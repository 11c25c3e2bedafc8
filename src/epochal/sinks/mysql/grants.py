"""The least that the account of a sink needs, as statements a DBA can read and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from epochal.kit.sql.modes import WriteMode
from epochal.sinks.mysql.dialect import DIALECT

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL

_META_RIGHTS = "CREATE, DROP, SELECT, INSERT, DELETE"


def grants(sink: MySQL, account: str) -> list[str]:
    """Statements for an account that may grant; `account` is `'user'@'host'`."""
    name = sink.table_name
    table = DIALECT.quote(name.schema or sink.server.database, name.table)
    meta = DIALECT.quote(sink.meta)
    statements = [
        f"CREATE DATABASE IF NOT EXISTS {meta}",
        f"GRANT {_META_RIGHTS} ON {meta}.* TO {account}",
        f"GRANT {rights_on_table(sink)} ON {table} TO {account}",
    ]
    if sink.strategy == "prepared":
        statements.append(f"GRANT XA_RECOVER_ADMIN ON *.* TO {account} /* MySQL, not MariaDB */")
    return statements


def rights_on_table(sink: MySQL) -> str:
    mode = sink.write_mode
    columns, keys = _columns(sink, mode)
    rights = [_right("SELECT", _read(mode, columns, keys)), _right("INSERT", columns)]
    if mode.mode == "upsert":
        # The server asks for it on the keys too, though none is changed.
        rights.append(_right("UPDATE", columns))
    if mode.mode == "replace" or mode.delete_when is not None:
        rights.append("DELETE")
    if sink.create_table == "if_missing":
        rights.append("CREATE")
    if sink.evolve == "add_columns":
        rights.append("ALTER")
    return ", ".join(rights)


def _read(mode: WriteMode, columns: Sequence[str], keys: Sequence[str]) -> Sequence[str]:
    """Without SELECT on a column the catalog does not show it."""
    return columns or (keys if not mode.is_keyed else ())


def _columns(sink: MySQL, mode: WriteMode) -> tuple[list[str], list[str]]:
    """Without columns= the columns are not known yet: then rights are on the whole table."""
    if sink.column_map is None:
        return [], list(mode.keys)
    return list(sink.column_map.values()), [sink.column_map.get(key, key) for key in mode.keys]


def _right(right: str, columns: Sequence[str]) -> str:
    return f"{right} ({', '.join(map(DIALECT.quote, columns))})" if columns else right
