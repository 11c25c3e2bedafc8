"""The least that the user of a sink needs, as statements a DBA can read and run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochal.sinks.oracle.dialect import DIALECT

if TYPE_CHECKING:
    from epochal.sinks.oracle.sink import Oracle

_ELSEWHERE = (
    *("CREATE ANY TABLE", "CREATE ANY INDEX", "CREATE ANY SEQUENCE", "DROP ANY TABLE"),
    *("SELECT ANY TABLE", "INSERT ANY TABLE", "DELETE ANY TABLE", "SELECT ANY SEQUENCE"),
)
"""What staging tables and the ledger need in a schema that is not the user's own."""


def grants(sink: Oracle, user: str) -> list[str]:
    """Statements for a DBA; in a schema of its own the user needs no rights on its tables."""
    name, mode = user.upper(), sink.write_mode
    to = DIALECT.quote(name)
    # Rows of a staging table are numbered by an identity column, which is a sequence.
    statements = [
        f"GRANT CREATE SESSION, CREATE TABLE, CREATE SEQUENCE TO {to}",
        f"ALTER USER {to} QUOTA UNLIMITED ON users",
    ]
    if sink.meta != name:
        statements.append(f"GRANT {', '.join(_ELSEWHERE)} TO {to}")
    if sink.table_schema != name:
        rights = ["SELECT", "INSERT"]
        rights += ["UPDATE"] if mode.mode == "upsert" else []
        rights += ["DELETE"] if mode.mode == "replace" or mode.delete_when is not None else []
        rights += ["ALTER"] if sink.evolve == "add_columns" else []
        target = DIALECT.quote(sink.table_schema, sink.table_name.table)
        statements.append(f"GRANT {', '.join(rights)} ON {target} TO {to}")
    if sink.strategy == "prepared":
        statements += [
            f"GRANT SELECT ON sys.dba_pending_transactions TO {to}",
            f"GRANT FORCE ANY TRANSACTION TO {to}",
        ]
    return statements
