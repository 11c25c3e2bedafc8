"""Iceberg tables, through pyiceberg: files by tasks, one snapshot an epoch by the driver."""

from epochal.sinks.iceberg.sink import Iceberg

__all__ = ["Iceberg"]
