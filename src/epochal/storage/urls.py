"""URLs of stores: their parts, and how they are shown without secrets."""

from __future__ import annotations

import os
import posixpath
import re

from epochal.errors import Misconfigured

OBJECT_SCHEMES = frozenset({"abfs", "abfss", "az", "gs", "s3", "s3a"})
THROUGH_HADOOP = "hadoop+"

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?://(?P<host>[^/]*))?(?P<path>.*)", re.DOTALL
)
_SECRET_PARTS = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@|\?[^\s\"')]+")
_LINE_CHARS_MAX = 300


def scheme_of(url: str) -> str | None:
    """In lower case; None for a plain path."""
    found = _URL.fullmatch(url)
    return None if found is None else found["scheme"].lower()


def host_of(url: str) -> str:
    """The host or bucket of a URL, empty where it names none."""
    found = _URL.fullmatch(url)
    return "" if found is None else found["host"] or ""


def login_of(url: str) -> str:
    """`user:password@` of a URL of etcd, as it is there. Other stores have none before a host."""
    found = _URL.fullmatch(url)
    if found is None or found["scheme"].lower() not in {"etcd", "etcds"}:
        return ""
    login, mark, _ = (found["host"] or "").rpartition("@")
    return login + mark


def local_path(url: str) -> str:
    """The path in a plain path, `file:` or `sqlite:` URL. Nothing in it is percent-decoded."""
    found = _URL.fullmatch(url)
    if found is None:
        return url
    if found["host"] not in {None, "", "localhost"}:
        raise Misconfigured(
            f"{without_secrets(url)} names a machine, and this kind of store is a local file",
            hint=f"{found['scheme']}:///path, with three slashes",
        )
    return found["path"]


def canonical(url: str) -> str:
    """
    The one spelling of a folder by which two names of it are the same: a local one is its absolute
    path without symbolic links, any other its URL without `..` and needless slashes.
    """
    found = _URL.fullmatch(url)
    if found is None or found["scheme"].lower() == "file":
        return os.path.realpath(local_path(url))
    path = posixpath.normpath(f"/{found['path'].lstrip('/')}")
    return f"{found['scheme'].lower()}://{found['host'] or ''}{path}".rstrip("/")


def without_secrets(text: str) -> str:
    """`text` without passwords and without queries, where signatures and tokens travel."""
    return _SECRET_PARTS.sub("", text)


def first_line(message: str) -> str:
    """The first line of a library's message, without secrets and of bounded length."""
    return without_secrets(message.strip().partition("\n")[0])[:_LINE_CHARS_MAX]
