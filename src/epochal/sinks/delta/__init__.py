"""Delta tables: tasks write files, the driver commits one version of the table per epoch."""

from epochal.sinks.delta.sink import Delta

__all__ = ["Delta"]
