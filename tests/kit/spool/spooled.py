"""What may lie in a spool, and what delivery must not leave behind in it."""

from __future__ import annotations

from pathlib import Path


def left_in(spool: Path) -> list[str]:
    """
    Rows and acknowledgements: everything but proofs of whole epochs. What a killed put leaves of
    its scratch file is in the spool itself, where a later process removes it.
    """
    files = [path for path in spool.rglob("*") if path.is_file() and not _is_scratch(path, spool)]
    return [str(path) for path in files if path.suffix != ".json" or path.parent.suffix == ".acks"]


def _is_scratch(path: Path, spool: Path) -> bool:
    return path.suffix == ".tmp" and path.parent == spool
