"""The judges, shipped: a sink or a log of your own meets the same ones as ours.

- `conformance`: a pytest suite for any sink; a few lines apply it.
- `crash`: crashes a pipeline at every call it makes outside, and again while it recovers.
- `sim`: a seeded simulation of drivers, zombies, slow and failing targets; one seed replays alone.
- `model`: walks every interleaving at small size and checks the invariants in each state.

`broker` runs an embedded Kafka-protocol broker for a test: `with broker() as bootstrap:`.

`world` is the outside that the last two share, `driver` is the program that runs in it, `judge` is
who looks on.
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
