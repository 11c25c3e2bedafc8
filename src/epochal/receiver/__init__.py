"""The receiving end of `Http`: two-phase commit over HTTP, durable in one SQLite file.

What it promises a sink is in `store`, the states and rows of a transaction in `transactions`, its
API in `openapi`.
"""

from epochal.receiver.handlers import ReceivedCommit

__all__ = ["ReceivedCommit"]
