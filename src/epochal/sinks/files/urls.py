"""What a sink's path names: a folder, a bucket of S3, or another object store."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from os.path import normpath
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from epochal.errors import Misconfigured
from epochal.kit.secrets import Secret

Options: TypeAlias = "tuple[tuple[str, str | Secret], ...]"
"""How an object store is reached, secrets held as such."""

_S3 = ("s3", "s3a", "s3n")
_OTHERS = ("gs", "az", "abfs", "abfss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place to write to, by what is needed to open it."""

    scheme: str
    """"file", "s3", or the scheme of another object store."""
    text: str
    """As it is told: an absolute path, or a URL without a slash at its end."""

    @property
    def bucket(self) -> str:
        return urlsplit(self.text).netloc

    @property
    def prefix(self) -> str:
        return self.text.partition("://")[2].partition("/")[2]


def parse(place: str | PathLike[str]) -> Target:
    """Nothing in an object store's URL is percent-decoded: Spark does not either."""
    url = fspath(place)
    is_url = "://" in url or url.startswith("file:")
    if not is_url:
        if not url:
            raise Misconfigured("Files needs a folder, and the path is empty")
        return Target(scheme="file", text=normpath(Path(url).absolute()))
    scheme = urlsplit(url).scheme.lower()
    if scheme == "file":
        return Target(scheme="file", text=_local(url))
    if scheme not in (*_S3, *_OTHERS):
        raise Misconfigured(
            f"Files: {scheme}:// is not a scheme this release writes to",
            "a path, file:///path, s3://bucket/folder, gs://bucket/folder, az://container/folder "
            "or abfss://container@account.dfs.core.windows.net/folder",
        )
    return _object_store(url, "s3" if scheme in _S3 else scheme)


def _local(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise Misconfigured(
            f"Files({url!r}): a file URL with the host {parts.netloc!r}",
            f"file:///{parts.netloc}{parts.path}",
        )
    return normpath(unquote(parts.path))


def _object_store(url: str, scheme: str) -> Target:
    bucket, _, folder = url.partition("://")[2].partition("/")
    # Not shown: what stands there may be a key.
    if ":" in bucket or (scheme == "s3" and "@" in bucket):
        raise Misconfigured(
            f"Files: the {scheme} URL carries credentials or a port",
            'storage_options={"endpoint_url": …}; credentials come from the usual chain or from '
            "storage_options",
        )
    segments = folder.rstrip("/").split("/") if folder.rstrip("/") else []
    if not bucket or any(part in ("", ".", "..") for part in segments):
        raise Misconfigured(
            f"Files({url!r}) names no bucket, or a folder with an empty part",
            f"{scheme}://bucket/folder",
        )
    return Target(scheme=scheme, text="/".join([f"{scheme}://{bucket}", *segments]))
