"""One file for each request of the protocol, named as the request is.

Each declares its messages, the versions that it supports, which of those belong to the
newer transaction protocol, and how a request is answered. `table` gathers that; the versions listed
to clients and the table in the docs come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from epochal.broker.broker import Call
from epochal.kafka.messages import APIS
from epochal.kafka.primitives import Message

Handle = Callable[[Call, Any], Message | None]


class Handler(NamedTuple):
    api_key: int
    name: str
    request: type[Message]
    versions: range
    newer_from: int | None
    """The first version that belongs to the newer transaction protocol."""
    handle: Handle

    def supported(self, *, is_newer_protocol: bool) -> tuple[int, int]:
        """The lowest and the highest version in ApiVersions."""
        last = self.versions[-1]
        if self.newer_from is not None and not is_newer_protocol:
            last = self.newer_from - 1
        return self.versions[0], last


@cache
def table() -> Mapping[int, Handler]:
    found: dict[int, Handler] = {}
    for api_key, (module_name, request_name) in APIS.items():
        module = import_module(f"{__name__}.{module_name}")
        messages = import_module(f"epochal.kafka.messages.{module_name}")
        found[api_key] = Handler(
            api_key,
            request_name.removesuffix("Request"),
            getattr(messages, request_name),
            module.VERSIONS,
            getattr(module, "NEWER_FROM", None),
            module.handle,
        )
    return found


def rows() -> list[tuple[int, str, str, str]]:
    """For the docs: API key, name, versions, and which of them need transaction.version 2."""
    result: list[tuple[int, str, str, str]] = []
    for handler in sorted(table().values()):
        first, last = handler.versions[0], handler.versions[-1]
        newer = "" if handler.newer_from is None else f"from {handler.newer_from}"
        result.append((handler.api_key, handler.name, f"{first} to {last}", newer))
    return result
