"""Hudi tables: Hudi's own writer prepares an instant, the driver completes it once per epoch."""

from epochal.sinks.hudi.sink import Hudi

__all__ = ["Hudi"]
