"""How records are named wherever they are files or objects, and how a place is told to people."""

from __future__ import annotations

import re

_RECORD = re.compile(r"(?P<number>[0-9]{20})\.json")
_SECRET_PARTS = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@|\?[^\s\"')]+")
_TOLD_CHARS_MAX = 300

PROBE = ".put-if-absent"
"""A file beside the records by which a storage shows that it refuses to fill one name twice."""


def record_name(number: int) -> str:
    """Twenty digits, so that names sort as numbers do."""
    return f"{number:020d}.json"


def record_number(name: str) -> int | None:
    """The number written in a file's name, or None where the file is not a record."""
    found = _RECORD.fullmatch(name)
    return None if found is None else int(found["number"])


def without_secrets(text: str) -> str:
    """`text` without passwords and without queries, where signatures and tokens travel."""
    return _SECRET_PARTS.sub("", text)


def first_line(message: str) -> str:
    """What a library says, for people: the first line, the rest being its own inner life."""
    return without_secrets(message.strip().partition("\n")[0])[:_TOLD_CHARS_MAX]
