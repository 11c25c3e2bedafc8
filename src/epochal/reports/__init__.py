"""
What an operator sees. `--json` of the command line and the console serve exactly these values.

`status` and `epochs` read the log and its history, and change nothing; `surveying` and `doctor` ask
the targets too; `recovering`, `resolving` and `dropping` do what a person wants, in the words in
which it was shown before; `auditing` counts what readers see. Every report says its version: keys
are added within one, never changed.
"""

from epochal.reports.model import VERSION, to_json

__all__ = ["VERSION", "to_json"]
