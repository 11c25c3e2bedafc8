"""URLs of stores: their parts, and how they are shown without secrets."""

from __future__ import annotations

import os
import posixpath
import re
from urllib.parse import unquote, urlsplit

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


def require_path(text: str, what: str) -> None:
    """Refuse `dbfs:/orders` where a path is expected: it would be a folder named `dbfs:` here."""
    scheme, mark, _ = text.partition(":/")
    if mark and _URL.fullmatch(f"{scheme}:"):
        raise Misconfigured(
            f"{what}: {without_secrets(text)} has a scheme and names no host or bucket",
            f"{scheme}://bucket/folder; a folder of this machine is file:///folder, and what is "
            "mounted here has a path (/dbfs/…, /Volumes/…)",
        )


def require_expanded(path: str) -> None:
    """Refuse what only shells replace: a folder of that very name would be made."""
    if path.startswith(("~", "$")):
        meant = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111  shown, not opened
        variable = path.replace("~", "${HOME}", 1) if path[0] == "~" else "${NAME}/…"
        raise Misconfigured(
            f"{path} begins with {path[0]}, which only shells replace",
            f"write {meant}; in a pipeline's file {variable} is replaced",
        )


def absolute_path(path: str) -> str:
    """A plain path as it is sent to other machines: they have a working directory of their own."""
    require_expanded(path)
    return os.path.abspath(path)  # noqa: PTH100  a text, like all URLs here


def path_in_file_url(url: str) -> str:
    """The path in a URL of a file, percent-decoded."""
    parts = urlsplit(url)
    if parts.query or parts.fragment or not parts.path.startswith("/"):
        raise Misconfigured(
            f"{url} is no URL of a folder: its path must begin with / and have no ? and no #",
            "give the path itself, without file:; or file:///folder, with %23 for # and %3F for ?",
        )
    return unquote(parts.path)


def local_path(url: str) -> str:
    """The path in a plain path, `file:` or `sqlite:` URL. Nothing in it is percent-decoded."""
    found = _URL.fullmatch(url)
    if found is None:
        require_expanded(url)
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
