"""Delta tables: files by tasks, one version of the table an epoch."""

from epochal.sinks.delta.sink import Delta

__all__ = ["Delta"]
