"""Rights that are missing, in the words by which an administrator grants them."""

from __future__ import annotations

from typing import TypeAlias

from epochal.errors import Misconfigured
from epochal.kafka.codes import Code

GRANTS = "Kafka(…).grants() gives the commands that grant what this sink needs"

Needed: TypeAlias = tuple[str, str]
"""An operation, by its name in ACLs, and the name of what it is done to."""


def require(
    code: int,
    *,
    topic: Needed | None = None,
    group: Needed | None = None,
    transactional_id: Needed | None = None,
) -> None:
    """Raise where a code says that a right is missing which the request needs."""
    denied: dict[int, tuple[str, Needed | None]] = {
        Code.TOPIC_AUTHORIZATION_FAILED: ("topic", topic),
        Code.GROUP_AUTHORIZATION_FAILED: ("group", group),
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: ("transactional id", transactional_id),
    }
    kind, needed = denied.get(code, ("", None))
    if needed is not None:
        operation, name = needed
        raise Misconfigured(f"the right {operation} on the {kind} {name} is missing", GRANTS)
