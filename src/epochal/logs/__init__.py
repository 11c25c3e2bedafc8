"""Epoch logs: where decisions live.

One file a kind of storage. A log only stores; the rules of the sequence are the journal's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.contract import EpochLog
from epochal.errors import Misconfigured
from epochal.logs.files import FilesLog
from epochal.logs.gateway import is_set_by_a_person, qualified
from epochal.logs.names import without_secrets
from epochal.logs.objects import ObjectsLog
from epochal.logs.sqlite import SqliteLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["checkpoint_log", "open_log"]

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?://(?P<host>[^/]*))?(?P<path>.*)", re.DOTALL
)
_OBJECT_STORES = {"abfs", "abfss", "az", "gs", "s3", "s3a"}
_POSTGRES = {"postgres", "postgresql"}
_THROUGH_HADOOP = "hadoop+"
_FOLDER = "epochal/log"
_S3A_SETTINGS = ("access.key", "aws.credentials.provider", "endpoint")


def open_log(place: str | os.PathLike[str], *, spark: SparkSession | None = None) -> EpochLog:
    """
    The epoch log at a place. Opening creates nothing; the first put does.

    The scheme decides:

    - a plain path, `file:`: a local folder;
    - `s3:`, `s3a:`, `gs:`, `az:`, `abfs:`, `abfss:`: an object store, with credentials and
      endpoints from the environment;
    - `sqlite:///path`: one SQLite file;
    - `postgresql://…#name`: a table in a PostgreSQL database, one log a name;
    - `hdfs:`, and any other scheme where a Spark session is given: Spark's Hadoop file system,
      which refuses those that can't fill a name only once;
    - `hadoop+scheme:`: the same, on the word of the person who writes it.

    One exception: `s3a:` goes through Hadoop where Spark's settings name credentials or an
    endpoint, as only those are then sure to reach the bucket that Spark means.

    Paths are read as Spark reads them: nothing in them is percent-decoded.
    """
    text = str(place)
    url = _URL.fullmatch(text)
    if url is None:
        return FilesLog(Path(text))
    scheme = url["scheme"].lower()
    if scheme == "file":
        return FilesLog(Path(_local_path(url)))
    if scheme == "sqlite":
        return SqliteLog(Path(_local_path(url)))
    if scheme in _POSTGRES:
        return _postgres_log(text)
    if scheme in _OBJECT_STORES and not _is_spark_configured(scheme, url["host"], spark):
        return ObjectsLog.at(text)
    if spark is not None:
        return _hadoop_log(text, spark)
    raise _only_by_spark(scheme, without_secrets(text))


def checkpoint_log(
    checkpoint: str | os.PathLike[str], *, spark: SparkSession | None = None
) -> EpochLog:
    """
    The default log of a pipeline: the folder `epochal/log` inside Spark's checkpoint location.

    A path without a scheme is where Spark sees it: on a cluster that may be HDFS.
    """
    text = str(checkpoint)
    if spark is not None and _URL.fullmatch(text) is None:
        text = qualified(spark, text)
    return open_log(f"{text.rstrip('/')}/{_FOLDER}", spark=spark)


def _local_path(url: re.Match[str]) -> str:
    if url["host"] not in {None, "", "localhost"}:
        raise Misconfigured(
            f"{without_secrets(url.string)} names a machine, and this kind of log is a local file",
            hint=f"{url['scheme']}:///path, with three slashes",
        )
    return url["path"]


def _is_spark_configured(scheme: str, bucket: str | None, spark: SparkSession | None) -> bool:
    if scheme != "s3a" or spark is None:
        return False
    prefixes = ("fs.s3a.", f"fs.s3a.bucket.{bucket}.")
    keys = [prefix + setting for prefix in prefixes for setting in _S3A_SETTINGS]
    return is_set_by_a_person(spark, keys)


def _postgres_log(url: str) -> EpochLog:
    from epochal.logs.postgres import PostgresLog  # noqa: PLC0415  needs epochal[postgres]

    return PostgresLog(url)


def _only_by_spark(scheme: str, place: str) -> Misconfigured:
    fact = f"no epoch log can be opened at {place} without a Spark session"
    if scheme == "hdfs" or scheme.startswith(_THROUGH_HADOOP):
        return Misconfigured(
            f"{fact}: only a driver reaches that file system, and commands start none",
            hint="a start of the pipeline recovers by itself; to look, copy the log: "
            f"`hdfs dfs -get {place.removeprefix(_THROUGH_HADOOP)} log`, then name the copy; for "
            "commands that act, keep the log where they reach it: s3://…, postgresql://…#name, "
            "sqlite:///path",
        )
    return Misconfigured(
        fact,
        hint="a folder, file:///folder, sqlite:///path, "
        + ", ".join(f"{known}://…" for known in sorted(_OBJECT_STORES))
        + "; with a Spark session also hdfs://… and what else Spark can reach",
    )


def _hadoop_log(url: str, spark: SparkSession) -> EpochLog:
    from epochal.logs.hadoop import HadoopLog  # noqa: PLC0415  needs py4j, which comes with Spark

    plain = url.removeprefix(_THROUGH_HADOOP)
    return HadoopLog(spark, plain, is_vouched_for=plain != url)
