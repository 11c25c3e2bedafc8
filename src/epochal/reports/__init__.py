"""Reports for operators: the values that `--json` prints and the console serves.

model       the report types, and their JSON form
status      all pipelines, from their logs and histories
epochs      a page of the history, and all records of the log
liveness    whether a driver is running
discover    the logs below a folder or URL
inspect     what the targets hold of a pipeline
doctor      abilities, clocks and leftovers of all targets, and the privileges that sinks need
verify      visible rows against decided totals; verify_source: the source against them
recover, resolve, drop, metrics_export    the verbs of the same names

Everything up to `verify` changes nothing. Within a version, keys of a report are added and never
changed.
"""

from epochal.reports.model import VERSION, to_json

__all__ = ["VERSION", "to_json"]
