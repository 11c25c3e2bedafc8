"""
The judges of a sink, shipped: other people's sinks meet the same ones as ours.

- `conformance`: a pytest suite for any sink; a few lines apply it.
- `crash`: crashes a pipeline at every call it makes, and again while it recovers.
- `driver`: the driver that these run, without Spark.

`broker` runs an embedded Kafka-protocol broker for a test: `with broker() as bootstrap:`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epochal.broker.embedded import broker

__all__ = ["broker"]


def __getattr__(name: str) -> Any:
    if name != "broker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from epochal.broker.embedded import broker  # noqa: PLC0415  needs epochal[kafka]

    return broker
