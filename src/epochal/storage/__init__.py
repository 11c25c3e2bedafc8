"""Stores: bytes by key in a folder, an object store, Hadoop's file systems, a database or etcd.

`Store` is the interface, `open_store` opens one by its URL. A new kind of store is one module with
a class, and one line in `_OPENERS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.errors import Misconfigured
from epochal.storage.store import (
    UNFINISHED,
    Entry,
    FileStore,
    Output,
    ScannedStore,
    ServedStore,
    Store,
)
from epochal.storage.urls import (
    OBJECT_SCHEMES,
    THROUGH_HADOOP,
    host_of,
    local_path,
    scheme_of,
    without_secrets,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "UNFINISHED",
    "Entry",
    "FileStore",
    "Output",
    "ScannedStore",
    "ServedStore",
    "Store",
    "open_file_store",
    "open_store",
]

_S3A_SETTINGS = ("access.key", "aws.credentials.provider", "endpoint")


def open_store(
    url: str | os.PathLike[str],
    *,
    spark: SparkSession | None = None,
    options: Mapping[str, str] | None = None,
) -> Store:
    """
    The store at a URL. Opening creates nothing; the first put does.

    The scheme decides:

    - a plain path, `file:`: a local folder;
    - `s3:`, `s3a:`, `gs:`, `az:`, `abfs:`, `abfss:`: an object store, with credentials and
      endpoints from the environment or from `options`;
    - `sqlite:///path`: one SQLite file;
    - `postgresql://…#name`: a table in a PostgreSQL database, one store per name;
    - `etcd://host:2379,host2:2379/prefix`, `etcds:` with TLS: an etcd cluster;
    - `hdfs:`, and any other scheme where a Spark session is given: Spark's Hadoop file system,
      which refuses to put if absent where it can't promise it;
    - `hadoop+scheme:`: the same, on the promise of the person who writes it.

    One exception: `s3a:` goes through Hadoop where Spark's settings name credentials or an
    endpoint, as only those are then sure to reach the bucket that Spark means.

    Paths are read as Spark reads them: nothing in them is percent-decoded.
    """
    text = os.fspath(url)
    scheme = scheme_of(text) or "file"
    if spark is not None and (
        scheme not in _OPENERS or _is_configured_in_spark(scheme, text, spark)
    ):
        from epochal.storage.hadoop import open_at  # noqa: PLC0415  needs py4j, comes with Spark

        return open_at(spark, text)
    if scheme not in _OPENERS:
        raise _only_by_spark(scheme, without_secrets(text))
    return _OPENERS[scheme](text, options or {})


def open_file_store(url: str, options: Mapping[str, str] | None = None) -> FileStore:
    """The store at a path or at a URL of an object store: those that take large files."""
    scheme = scheme_of(url) or "file"
    if scheme == "file":
        return _local(url, {})
    if scheme in OBJECT_SCHEMES:
        return _objects(url, options or {})
    raise Misconfigured(
        f"{without_secrets(url)} is neither a folder nor in an object store",
        "a folder, or " + ", ".join(f"{known}://…" for known in sorted(OBJECT_SCHEMES)),
    )


def _local(url: str, _: Mapping[str, str]) -> FileStore:
    from epochal.storage.local import LocalStore  # noqa: PLC0415  each process needs few of these

    return LocalStore(Path(local_path(url)))


def _private(url: str, _: Mapping[str, str]) -> Store:
    from epochal.storage.local import LocalStore  # noqa: PLC0415  each process needs few of these

    return LocalStore(Path(local_path(url)), is_private=True)


def _objects(url: str, options: Mapping[str, str]) -> FileStore:
    from epochal.storage.objects import open_at  # noqa: PLC0415  loads the object store's client

    return open_at(url, options)


def _sqlite(url: str, _: Mapping[str, str]) -> Store:
    from epochal.storage.sqlite import SqliteStore  # noqa: PLC0415  each process needs few of these

    return SqliteStore(Path(local_path(url)))


def _postgres(url: str, _: Mapping[str, str]) -> Store:
    from epochal.storage.postgres import PostgresStore  # noqa: PLC0415  needs epochal[postgres]

    return PostgresStore(url)


def _etcd(url: str, _: Mapping[str, str]) -> Store:
    from epochal.storage.etcd import EtcdStore  # noqa: PLC0415  needs epochal[etcd]

    return EtcdStore(url)


_OPENERS: Mapping[str, Callable[[str, Mapping[str, str]], Store]] = {
    "file": _private,
    "sqlite": _sqlite,
    "postgres": _postgres,
    "postgresql": _postgres,
    "etcd": _etcd,
    "etcds": _etcd,
    **dict.fromkeys(OBJECT_SCHEMES, _objects),
}


def _is_configured_in_spark(scheme: str, url: str, spark: SparkSession) -> bool:
    if scheme != "s3a":
        return False
    from epochal.storage.hadoop import is_set_by_a_person  # noqa: PLC0415  comes with Spark

    prefixes = ("fs.s3a.", f"fs.s3a.bucket.{host_of(url)}.")
    return is_set_by_a_person(spark, [one + name for one in prefixes for name in _S3A_SETTINGS])


def _only_by_spark(scheme: str, url: str) -> Misconfigured:
    fact = f"no store can be opened at {url} without a Spark session"
    if scheme == "hdfs" or scheme.startswith(THROUGH_HADOOP):
        return Misconfigured(
            f"{fact}: only a driver reaches that file system, and commands start none",
            hint="a start of the pipeline recovers by itself; to look, copy the log: "
            f"`hdfs dfs -get {url.removeprefix(THROUGH_HADOOP)} log`, then name the copy; for "
            "commands that act, keep the log where they reach it: s3://…, postgresql://…#name, "
            "etcd://…/prefix, sqlite:///path",
        )
    return Misconfigured(
        fact,
        hint="a folder, file:///folder, sqlite:///path, postgresql://…#name, etcd://…/prefix, "
        + ", ".join(f"{known}://…" for known in sorted(OBJECT_SCHEMES))
        + "; with a Spark session also hdfs://… and what else Spark can reach",
    )
