"""MySQL and MariaDB: every epoch in the server's own transactions, proven by a ledger."""

from epochal.sinks.mysql.sink import MySQL

__all__ = ["MySQL"]
