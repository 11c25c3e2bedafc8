"""Rows that wait, decided or not, for a target that can't hold them back itself.

A `RowSpool` keeps rows by handle at a URL; a `SpoolLedger` beside it remembers what was delivered.
On these two, `SpoolingWriter` and `SpoolCommitter` are a whole sink but for its `Delivery`. A sink
that only wants to be able to send again what it has sent uses the `RowSpool` alone: `writer` in the
task, `read` on the driver, `listed` and `remove` as prepared work is listed and aborted (I5).
"""

from epochal.kit.spool.committer import Delivery, SpoolCommitter, require_seen
from epochal.kit.spool.ledger import SpoolLedger
from epochal.kit.spool.places import open_place, spool_below, spool_url
from epochal.kit.spool.rows import RowSpool, Spooled, SpoolWriter
from epochal.kit.spool.writer import SpoolingWriter

__all__ = [
    "Delivery",
    "RowSpool",
    "SpoolCommitter",
    "SpoolLedger",
    "SpoolWriter",
    "Spooled",
    "SpoolingWriter",
    "open_place",
    "require_seen",
    "spool_below",
    "spool_url",
]
