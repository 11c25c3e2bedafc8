"""Every sink by its kind, and the words that stand for what plain YAML can't say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from epochal.assembly.names import imported
from epochal.config import Vocabulary

SINKS = {
    "callback": "epochal.sinks.callback:Callback",
    "delta": "epochal.sinks.delta:Delta",
    "files": "epochal.sinks.files:Files",
    "http": "epochal.sinks.http:Http",
    "iceberg": "epochal.sinks.iceberg:Iceberg",
    "kafka": "epochal.sinks.kafka:Kafka",
    "memory": "epochal.sinks.memory:Memory",
    "mysql": "epochal.sinks.mysql:MySQL",
    "oracle": "epochal.sinks.oracle:Oracle",
    "postgres": "epochal.sinks.postgres:Postgres",
}
WORDS = {
    "avro": "epochal.sinks.kafka.values.avro:avro",
    "env": "epochal.kit.secrets:env",
    "file": "epochal.kit.secrets:file",
    "json": "epochal.sinks.kafka:json",
    "protobuf": "epochal.sinks.kafka.values.protobuf:protobuf",
}
SYNONYMS = {
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
"""Names under which users of other database connectors know our options."""


def vocabulary(*, finds_names: bool = False) -> Vocabulary:
    """With `finds_names`, gates are looked for too: only a driver must have their modules."""
    return Vocabulary(
        sinks={kind: partial(imported, home) for kind, home in SINKS.items()},
        words={
            **{word: partial(imported, home) for word, home in WORDS.items()},
            "python": _the_name_itself,
        },
        find=imported if finds_names else None,
        synonyms=SYNONYMS,
    )


def _the_name_itself() -> Callable[[str], Any]:
    return imported
