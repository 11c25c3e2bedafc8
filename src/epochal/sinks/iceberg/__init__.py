"""Iceberg tables, through pyiceberg: tasks write files, the driver commits a snapshot per epoch."""

from epochal.sinks.iceberg.sink import Iceberg

__all__ = ["Iceberg"]
