"""Oracle: every epoch in the server's own transactions, proven by a ledger."""

from epochal.sinks.oracle.sink import Oracle

__all__ = ["Oracle"]
