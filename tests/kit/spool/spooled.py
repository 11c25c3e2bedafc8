"""What may lie in a spool, and what delivery must not leave behind in it."""

from __future__ import annotations

from pathlib import Path


def left_in(spool: Path) -> list[str]:
    """
    Rows and acknowledgements: everything but proofs of whole epochs, and what a killed put leaves
    of its scratch file, which nobody reads.
    """
    files = [path for path in spool.rglob("*") if path.is_file() and path.suffix != ".tmp"]
    return [str(path) for path in files if path.suffix != ".json" or path.parent.suffix == ".acks"]
