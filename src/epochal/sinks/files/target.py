"""The target of a Files sink: a folder, a bucket of S3 or another object store, and its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from os.path import normpath
from typing import TypeAlias
from urllib.parse import urlsplit

from epochal.errors import Misconfigured
from epochal.kit.secrets import HeldSecret, Secret
from epochal.sinks.files.layout import BESIDE
from epochal.storage.urls import absolute_path, path_in_file_url, require_path

Options: TypeAlias = "tuple[tuple[str, str | Secret], ...]"
"""How an object store is reached, secrets held as such."""

_S3 = ("s3", "s3a", "s3n")
_OTHERS = ("gs", "az", "abfs", "abfss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A folder or a bucket with a prefix."""

    scheme: str
    """"file", "s3", or the scheme of another object store."""
    text: str
    """An absolute path, or a URL without a slash at its end."""

    @property
    def bucket(self) -> str:
        return self.text.partition("://")[2].partition("/")[0]

    @property
    def prefix(self) -> str:
        return self.text.partition("://")[2].partition("/")[2]


def parse(path: str | PathLike[str]) -> Target:
    """Nothing in an object store's URL is percent-decoded: Spark does not either."""
    target = _parsed_path(path)
    if target.text == "/" or (target.scheme != "file" and not target.prefix):
        raise Misconfigured(
            f"Files({target.text!r}): prepared files are kept beside the folder, and there is "
            "nothing beside this one",
            f"name a folder below it: {target.text.rstrip('/')}/folder",
        )
    if target.text.endswith(BESIDE):
        raise Misconfigured(
            f"Files({target.text!r}): folders whose name ends in {BESIDE} hold what is prepared "
            "for the folder beside them",
            "choose another name",
        )
    return target


def _parsed_path(path: str | PathLike[str]) -> Target:
    url = fspath(path)
    is_url = "://" in url or url.startswith("file:")
    if not is_url:
        if not url:
            raise Misconfigured(
                "Files needs a folder, and the path is empty", "Files('/data/orders')"
            )
        require_path(url, "Files")
        return Target(scheme="file", text=absolute_path(url))
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
    return normpath(path_in_file_url(url))


def _object_store(url: str, scheme: str) -> Target:
    bucket, _, folder = url.partition("://")[2].partition("/")
    # Not shown: it may be a key.
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


S3_OPTIONS = (
    "access_key_id",
    "addressing_style",
    "encryption",
    "endpoint_url",
    "kms_key_id",
    "profile",
    "region",
    "secret_access_key",
    "session_token",
)
_PLAIN = frozenset({"kms_key_id"})
_SECRET_NAMES = ("key", "token", "secret", "password", "credential", "sas", "account")


def storage_options(scheme: str, given: Mapping[str, str | Secret] | str) -> Options:
    """Checked and sorted; a value with the name of a secret is held as one."""
    options = _parsed(given)
    if options and scheme == "file":
        raise Misconfigured(
            "storage_options are for object stores, and the path is a folder",
            "leave them out, or give a URL: s3://bucket/folder",
        )
    unknown = sorted(set(options) - set(S3_OPTIONS)) if scheme == "s3" else []
    if unknown:
        raise Misconfigured(
            f"storage_options {unknown} are not known for S3", f"it has {', '.join(S3_OPTIONS)}"
        )
    if "kms_key_id" in options and options.get("encryption") != "aws:kms":
        raise Misconfigured(
            "storage_options: kms_key_id without encryption='aws:kms'",
            'storage_options={"encryption": "aws:kms", "kms_key_id": …}',
        )
    return tuple(sorted((name, _held(name, value)) for name, value in options.items()))


def _parsed(given: Mapping[str, str | Secret] | str) -> Mapping[str, str | Secret]:
    """Also from text: Spark's options are strings."""
    if not isinstance(given, str):
        return given
    try:
        options = json.loads(given)
    except ValueError:
        options = None
    # The text is not shown: it may hold a key.
    if not isinstance(options, dict) or not all(isinstance(one, str) for one in options.values()):
        raise Misconfigured(
            "storage_options is text, and not a JSON object of strings",
            """'{"endpoint_url": "…", "region": "…"}'""",
        )
    return options


def _held(name: str, value: str | Secret) -> str | Secret:
    is_secret = any(sign in name.lower() for sign in _SECRET_NAMES) and name not in _PLAIN
    return HeldSecret(value) if isinstance(value, str) and is_secret else value
