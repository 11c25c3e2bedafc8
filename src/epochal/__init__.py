"""
Exactly-once sinks for Spark Structured Streaming.

Each micro-batch appears in every one of its sinks once or not at all, whatever crashes. The public
names are here and load on first use, so that `import epochal` loads neither Spark nor a driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epochal.coordinator import PreparedEpoch
    from epochal.errors import (
        EpochalError,
        Fenced,
        GateRefused,
        InvariantBroken,
        Misconfigured,
        OutcomeUnknown,
        Refused,
        TryAgain,
        Unsettled,
    )
    from epochal.kit.secrets import env, file
    from epochal.kit.sql.backpressure import PressureLimits
    from epochal.reports.visible import visible
    from epochal.session import Session
    from epochal.sinks.callback import Callback
    from epochal.sinks.delta import Delta
    from epochal.sinks.files import Files, read_epochs
    from epochal.sinks.http import Http
    from epochal.sinks.hudi import Hudi
    from epochal.sinks.iceberg import Iceberg
    from epochal.sinks.kafka import Kafka, json
    from epochal.sinks.kafka.values.avro import avro
    from epochal.sinks.kafka.values.protobuf import protobuf
    from epochal.sinks.memory import Memory
    from epochal.sinks.mysql import MySQL
    from epochal.sinks.oracle import Oracle
    from epochal.sinks.postgres import Postgres
    from epochal.spark.pipeline import Pipeline
    from epochal.terms import Limits

__version__ = "0.2.0"

_HOMES = {
    "Callback": "epochal.sinks.callback",
    "Delta": "epochal.sinks.delta",
    "EpochalError": "epochal.errors",
    "Fenced": "epochal.errors",
    "Files": "epochal.sinks.files",
    "GateRefused": "epochal.errors",
    "Http": "epochal.sinks.http",
    "Hudi": "epochal.sinks.hudi",
    "Iceberg": "epochal.sinks.iceberg",
    "InvariantBroken": "epochal.errors",
    "Kafka": "epochal.sinks.kafka",
    "Limits": "epochal.terms",
    "Memory": "epochal.sinks.memory",
    "Misconfigured": "epochal.errors",
    "OutcomeUnknown": "epochal.errors",
    "MySQL": "epochal.sinks.mysql",
    "Oracle": "epochal.sinks.oracle",
    "Pipeline": "epochal.spark.pipeline",
    "Postgres": "epochal.sinks.postgres",
    "PreparedEpoch": "epochal.coordinator",
    "PressureLimits": "epochal.kit.sql.backpressure",
    "Refused": "epochal.errors",
    "Session": "epochal.session",
    "TryAgain": "epochal.errors",
    "Unsettled": "epochal.errors",
    "avro": "epochal.sinks.kafka.values.avro",
    "env": "epochal.kit.secrets",
    "json": "epochal.sinks.kafka",
    "file": "epochal.kit.secrets",
    "protobuf": "epochal.sinks.kafka.values.protobuf",
    "read_epochs": "epochal.sinks.files",
    "visible": "epochal.reports.visible",
}

__all__ = [
    "Callback",
    "Delta",
    "EpochalError",
    "Fenced",
    "Files",
    "GateRefused",
    "Http",
    "Hudi",
    "Iceberg",
    "InvariantBroken",
    "Kafka",
    "Limits",
    "Memory",
    "Misconfigured",
    "MySQL",
    "Oracle",
    "OutcomeUnknown",
    "Pipeline",
    "Postgres",
    "PreparedEpoch",
    "PressureLimits",
    "Refused",
    "Session",
    "TryAgain",
    "Unsettled",
    "avro",
    "env",
    "file",
    "json",
    "protobuf",
    "read_epochs",
    "visible",
]


if not TYPE_CHECKING:  # a type checker that sees it takes every name for a public one

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
