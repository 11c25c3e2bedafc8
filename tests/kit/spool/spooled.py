"""What may lie in a spool, and what delivery must not leave behind in it."""

from __future__ import annotations

from pathlib import Path


def left_in(spool: Path) -> list[str]:
    """Rows, half-written rows and acknowledgements: everything but proofs of whole epochs."""
    files = [path for path in spool.rglob("*") if path.is_file()]
    return [str(path) for path in files if path.suffix != ".json" or path.parent.suffix == ".acks"]
