"""PostgreSQL: every epoch in one transaction of the server's own, proven by a ledger."""

from epochal.sinks.postgres.sink import Postgres

__all__ = ["Postgres"]
