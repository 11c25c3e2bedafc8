"""The declaration of files in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar, Literal

from epochal.contract import Limits, Task
from epochal.errors import Misconfigured
from epochal.sinks.declaration import Declaration
from epochal.sinks.files.committer import FileCommitter
from epochal.sinks.files.formats import FORMATS
from epochal.sinks.files.layout import Layout, local_path
from epochal.sinks.files.prepared import PreparedFolder
from epochal.sinks.files.writer import FileWriter, Plan
from epochal.terms import Identity, Json


@dataclass(frozen=True)
class Files(Declaration):
    """
    Files in a local or shared folder, each one whole or not there at all.

    Any reader of the folder sees decided epochs only, file by file while one is being committed.
    `read_epochs` sees whole epochs, and so does Spark with `spark_metadata=True`.

    `partition_by` gives Hive's layout as Spark writes it; the columns may be strings, integers,
    booleans or dates. In CSV a null is nothing and an empty string is `""`, and quotes are doubled:
    Spark's reader wants `escape='"'`, and takes both for null unless given another `nullValue`. How
    values look in JSON lines is told in `json_lines`.
    """

    kind: ClassVar[str] = "files"

    path: str | PathLike[str]
    """A folder, as a path or as file:///path; it is made where it does not exist."""
    _: KW_ONLY
    format: Literal["parquet", "jsonl", "csv"] = "parquet"
    partition_by: Sequence[str] = ()
    compression: str | None = None
    """None takes the format's own: snappy for parquet, none for text."""
    max_file_bytes: int = 256 * 1024 * 1024
    """A file that has reached this is closed and another begun."""
    buffer_bytes_max: int = 64 * 1024 * 1024
    """How much a task holds in memory, over all partition values."""
    open_files_max: int = 64
    """How many files a task keeps open; one more closes the one that rested longest."""
    spark_metadata: bool = False
    """Keep Spark's own `_spark_metadata` too, so that `spark.read` sees whole epochs only."""

    def __post_init__(self) -> None:
        # Absolute from here on: executors have a working directory of their own.
        object.__setattr__(self, "path", str(local_path(self.path)))
        super().__post_init__()
        if isinstance(self.partition_by, str):
            raise Misconfigured(
                f"partition_by={self.partition_by!r} is one string, not a list of columns",
                f"partition_by=[{self.partition_by!r}]",
            )
        object.__setattr__(self, "partition_by", tuple(self.partition_by))
        self._check_options()

    def _check_options(self) -> None:
        if self.format not in FORMATS:
            raise Misconfigured(f"format={self.format!r}", f"one of {', '.join(FORMATS)}")
        known = FORMATS[self.format].compressions
        if self.compression is not None and self.compression not in known:
            raise Misconfigured(
                f"compression={self.compression!r} for {self.format}", f"one of {', '.join(known)}"
            )
        for option in ("max_file_bytes", "buffer_bytes_max", "open_files_max"):
            if getattr(self, option) < 1:
                raise Misconfigured(f"{option}={getattr(self, option)}", "give a number above zero")
        hidden = [name for name in self.partition_by if name.startswith(("_", ".")) or not name]
        if hidden:
            raise Misconfigured(
                f"partition_by={hidden}: readers pass over folders that begin with _ or .",
                f'rename the column: select=["*", "{hidden[0]} as part"]',
            )
        if len(set(self.partition_by)) < len(self.partition_by):
            raise Misconfigured(f"partition_by={list(self.partition_by)} names a column twice")

    @property
    def target(self) -> str:
        return str(self.path)

    def describe(self) -> Mapping[str, Json]:
        return {
            "kind": self.kind,
            "target": self.target,
            "mode": "append",
            "format": self.format,
            "partition_by": list(self.partition_by),
        }

    def writer(self, task: Task) -> FileWriter:
        form = FORMATS[self.format]
        plan = Plan(
            format=form,
            compression=self.compression or form.default,
            partition_by=tuple(self.partition_by),
            max_file_bytes=self.max_file_bytes,
            buffer_bytes_max=self.buffer_bytes_max,
            open_files_max=self.open_files_max,
        )
        return FileWriter(task, plan, PreparedFolder(Layout(Path(self.path)), task.handle))

    def committer(self, identity: Identity, limits: Limits) -> FileCommitter:  # noqa: ARG002
        return FileCommitter(
            identity,
            Layout(Path(self.path)),
            format=self.format,
            partition_by=tuple(self.partition_by),
            spark_metadata=self.spark_metadata,
        )
