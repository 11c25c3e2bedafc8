"""The registry: the one module that knows the name of every adapter, our own and installed ones.

A sink is found by its kind, in this order:

    kind: postgres                 one of ours
    kind: sqlite                   an entry point of an installed distribution, group epochal.sinks
    kind: package.module:Class     any class that can be imported
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from epochal.errors import EpochalError, Misconfigured

GROUP = "epochal.sinks"
"""The group of entry points in which a distribution declares its sinks."""

SINKS = {
    "callback": "epochal.sinks.callback:Callback",
    "delta": "epochal.sinks.delta:Delta",
    "files": "epochal.sinks.files:Files",
    "http": "epochal.sinks.http:Http",
    "hudi": "epochal.sinks.hudi:Hudi",
    "iceberg": "epochal.sinks.iceberg:Iceberg",
    "kafka": "epochal.sinks.kafka:Kafka",
    "memory": "epochal.sinks.memory:Memory",
    "mysql": "epochal.sinks.mysql:MySQL",
    "oracle": "epochal.sinks.oracle:Oracle",
    "postgres": "epochal.sinks.postgres:Postgres",
}
FUNCTIONS = {
    "avro": "epochal.sinks.kafka.values.avro:avro",
    "env": "epochal.kit.secrets:env",
    "file": "epochal.kit.secrets:file",
    "json": "epochal.sinks.kafka:json",
    "protobuf": "epochal.sinks.kafka.values.protobuf:protobuf",
}
"""Functions that a pipeline's file may call: `password: {env: PGPASSWORD}`."""
SYNONYMS: Mapping[str, str] = {
    "connection_string": "url",
    "table_name": "table",
    "write_mode.type": "mode",
    "write_mode.key_columns": "keys",
    "key_columns": "keys",
    "pool.min_connections": "pool_min",
    "pool.max_connections": "pool_max",
    "pool.connect_timeout_secs": "connect_timeout_s",
    "pool.idle_timeout_secs": "idle_max_s",
    "pool.max_lifetime_secs": "lifetime_max_s",
    "flush_interval_secs": "flush_interval_s",
}
"""Names of our options in other database connectors; a dot is a nested mapping."""


def sink_kinds() -> list[str]:
    """The short names of all sinks, ours and installed ones."""
    return sorted({*SINKS, *(one.name for one in entry_points(group=GROUP))})


def sink_class(kind: str) -> type[Any]:
    """The class of a sink; its driver is imported with it. Raises `Misconfigured`."""
    target = kind if _IMPORT_PATH.fullmatch(kind) else SINKS.get(kind) or _installed(kind).value
    found = imported(target)
    is_sink = hasattr(found, "writer") and hasattr(found, "committer")
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or not is_sink:
        raise Misconfigured(
            f"{target} is no sink that a pipeline's file can declare",
            "a dataclass that derives from epochal.kit.SinkBase: its fields are the options",
        )
    return found


def _installed(kind: str) -> EntryPoint:
    found = list(entry_points(group=GROUP, name=kind))
    if not found:
        raise Misconfigured(f"unknown kind {kind!r}", f"there are {', '.join(sink_kinds())}")
    if len({one.value for one in found}) > 1:
        raise Misconfigured(
            f"{len(found)} installed packages have a sink of kind {kind!r}",
            f"name one by its class: kind: {' or '.join(one.value for one in found)}",
        )
    return found[0]


def function(name: str) -> Callable[..., Any]:
    """A function that a pipeline's file may call by its short name."""
    found: Callable[..., Any] = imported if name == "python" else imported(FUNCTIONS[name])
    return found


def function_names() -> list[str]:
    return sorted({*FUNCTIONS, "python"})


_IMPORT_PATH = re.compile(r"(?P<module>[A-Za-z_]\w*(\.\w+)*):(?P<name>[A-Za-z_]\w*(\.\w+)*)")


def is_import_path(text: str) -> bool:
    """Whether `text` is `module:name` and no file of that name is there."""
    return _IMPORT_PATH.fullmatch(text) is not None and not os.path.exists(text)  # noqa: PTH110  text, not a path yet


def imported(target: str) -> Any:
    """The object itself. Raises `Misconfigured` with the fact and the way out."""
    if not _IMPORT_PATH.fullmatch(target):
        raise Misconfigured(f"{target!r} names nothing", "module:name, as in jobs.orders:pipeline")
    module_name, _, name = target.partition(":")
    # As `python -m` does: jobs are below the working directory.
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109  sys.path holds text
        sys.path.insert(0, "")
    try:
        found: object = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise Misconfigured(
            f"{target}: there is no module {error.name!r}",
            "run from the folder that holds it, or put that folder on PYTHONPATH",
        ) from error
    except AttributeError as error:
        raise Misconfigured(
            f"{target}: {error}", "name something that the module defines"
        ) from error
    except EpochalError:
        raise
    except Exception as error:
        raise Misconfigured(
            f"{target}: the module could not be loaded: {type(error).__name__}: {error}",
            "what is imported should only declare; start the query under `if __name__ == …`",
        ) from error
    return found
