"""The reference sink: the shortest one that keeps every promise, in the driver's memory."""

from epochal.sinks.memory.sink import Memory

__all__ = ["Memory"]
