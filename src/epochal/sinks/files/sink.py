"""The declaration of files in a folder or a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from typing import ClassVar, Literal

from epochal.contract import Committer, Task, Writer
from epochal.errors import Misconfigured
from epochal.kit.secrets import Secret
from epochal.kit.sink_base import Promises, SinkBase
from epochal.sinks.files.backend import Backend, LocalBackend, Uploads, backend_for
from epochal.sinks.files.formats import FORMATS, Format
from epochal.sinks.files.target import Target, parse, storage_options
from epochal.terms import Ability, Identity, Json, Limits

_MAX_FILE_BYTES = 256 * 1024 * 1024
_NO_CONSTRAINTS = "a file takes every row that fits its schema"
_ABOVE_ZERO = (
    "max_file_bytes",
    "max_records_per_file",
    "buffer_bytes_max",
    "open_files_max",
    "recovery_days",
)

FOLDER = Promises(
    sink="`Files`, a folder",
    at_one_instant="a file; whole epochs by `read_epochs`, and by Spark with `spark_metadata=True`",
    readers_must="not search from above the folder: prepared files are beside it",
    proof="a manifest per epoch",
    limits=["driver and executors must share the file system"],
    cannot={
        "refuse rows": _NO_CONSTRAINTS,
        "be unreachable": "a folder has no server that could be away",
    },
)
S3 = Promises(
    sink="`Files`, S3",
    at_one_instant="an object; whole epochs by `read_epochs`",
    proof="a manifest per epoch",
    limits=['the server must list uploads by prefix; others take `uploads="manifest"`'],
    cannot={"refuse rows": _NO_CONSTRAINTS},
)
MANIFESTS = Promises(
    sink='`Files`, Google, Azure, `uploads="manifest"`',
    at_one_instant="a whole epoch",
    readers_must="read by `read_epochs`",
    proof="the manifest, which is what shows the rows",
    cannot={"refuse rows": _NO_CONSTRAINTS},
)
PROMISES = (FOLDER, S3, MANIFESTS)


@dataclass(frozen=True)
class Files(SinkBase):
    """
    Files in a folder or a bucket, each one whole or not there at all. The path's scheme decides.

    Any reader of the folder sees decided epochs only, file by file while one is being committed.
    `read_epochs` sees whole epochs, and so does Spark with `spark_metadata=True` on a folder. On S3
    files are multipart uploads, completed once the epoch is decided; in other object stores, and
    with `uploads="manifest"`, the data lies beside the folder and only `read_epochs` shows it.

    `partition_by` gives Hive's layout as Spark writes it; the columns may be strings, integers,
    booleans or dates. In CSV a null is nothing and an empty string is `""`, and quotes are doubled:
    Spark's reader wants `escape='"'`, and takes both for null unless given another `nullValue`. The
    form of values in JSON lines is described in `json_lines`.
    """

    kind: ClassVar[str] = "files"
    writes_on_driver: ClassVar[bool] = True

    path: str | PathLike[str]
    """
    A folder, as a path or as file:///path, which is made where it does not exist; or
    `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder`, whose bucket must exist.
    """
    _: KW_ONLY
    format: Literal["parquet", "orc", "avro", "jsonl", "csv"] = "parquet"
    """ORC and Avro are written by Spark's own writer only, Avro where spark-avro is there."""
    partition_by: Sequence[str] = ()
    """Columns that become folders, in Hive's layout: strings, integers, booleans, dates."""
    compression: str | None = None
    """None takes the format's own: snappy (ORC: zstd), and none for text."""
    max_file_bytes: int | None = None
    """
    A file that has reached this is closed and another begun; 256 MiB where tasks write. Spark's own
    writer makes one file per task and partition value, so where this is given, tasks write.
    """
    sort_by: Sequence[str] = ()
    """The order of rows within each file, by Spark's own writer only."""
    max_records_per_file: int | None = None
    """A file with so many rows is closed and another begun, by Spark's own writer only."""
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Of Spark's own writer, such as `parquet.block.size`: the guide lists them by format."""
    buffer_bytes_max: int = 64 * 1024 * 1024
    """How much a task holds in memory, over all partition values."""
    open_files_max: int = 64
    """How many files a task keeps open; one more closes the one that rested longest."""
    spark_metadata: bool = False
    """Keep Spark's own `_spark_metadata` too, so that `spark.read` sees whole epochs only."""
    uploads: Uploads = "auto"
    """How an object store keeps rows invisible: "multipart" (S3) or "manifest"; "auto" chooses."""
    storage_options: Mapping[str, str | Secret] | str = field(default_factory=dict)
    """How an object store is reached: endpoint, region, encryption, keys. See the guide."""
    recovery_days: int = 3
    """How long S3 must keep what is prepared: checked against the bucket's lifecycle rules."""

    _target: Target = field(init=False, repr=False, compare=False)
    _backend: Backend = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Absolute from here on: executors have a working directory of their own.
        target = parse(self.path)
        self._set("path", target.text)
        self._set("_target", target)
        super().__post_init__()
        options = storage_options(target.scheme, self.storage_options)
        self._set("storage_options", dict(options))
        self._set("_backend", backend_for(target, self.uploads, options))
        for option in ("partition_by", "sort_by"):
            given = getattr(self, option)
            if isinstance(given, str):
                raise Misconfigured(
                    f"{option}={given!r} is one string, not a list of columns",
                    f"{option}=[{given!r}]",
                )
            self._set(option, tuple(given))
        self._check_options()
        self._check_uploads()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_uploads(self) -> None:
        if self.uploads not in ("auto", "multipart", "manifest"):
            raise Misconfigured(f"uploads={self.uploads!r}", "auto, multipart or manifest")
        scheme = self._target.scheme
        if self.uploads == "multipart" and scheme != "s3":
            raise Misconfigured(
                f"uploads='multipart' on {scheme}: only S3 has uploads that another process may "
                "complete",
                "leave uploads out",
            )
        if self.uploads == "manifest" and scheme == "file":
            raise Misconfigured("uploads='manifest' is for object stores", "leave uploads out")
        if self.spark_metadata and scheme != "file":
            raise Misconfigured(
                f"spark_metadata=True on {scheme}: Spark's log is kept on file systems only",
                "leave it out; read_epochs(…, spark=spark) gives Spark whole epochs",
            )

    def _check_options(self) -> None:
        if self.format not in FORMATS:
            raise Misconfigured(f"format={self.format!r}", f"one of {', '.join(FORMATS)}")
        known = FORMATS[self.format].compressions
        if self.compression is not None and self.compression not in known:
            raise Misconfigured(
                f"compression={self.compression!r} for {self.format}", f"one of {', '.join(known)}"
            )
        for option in _ABOVE_ZERO:
            given = getattr(self, option)
            if given is not None and given < 1:
                raise Misconfigured(f"{option}={given}", "give a number above zero")
        self._set("options", {name: _option_text(value) for name, value in self.options.items()})
        self._form.require_accepted(self.format, self.options)
        self._check_writer()
        hidden = [name for name in self.partition_by if name.startswith(("_", ".")) or not name]
        if hidden:
            raise Misconfigured(
                f"partition_by={hidden}: readers pass over folders that begin with _ or .",
                f'rename the column: select=["*", "{hidden[0]} as part"], partition_by=["part"]',
            )
        if len(set(self.partition_by)) < len(self.partition_by):
            raise Misconfigured(
                f"partition_by={list(self.partition_by)} names a column twice", "name each once"
            )

    def _check_writer(self) -> None:
        """Refuse what no writer has together."""
        if self._tasks_refusal is not None and self.max_file_bytes is not None:
            raise Misconfigured(
                f"{self._tasks_refusal}, and max_file_bytes is for files that tasks write",
                "leave max_file_bytes out; max_records_per_file limits the files of Spark's writer",
            )

    @property
    def _form(self) -> Format:
        return FORMATS[self.format]

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
            "uploads": self._mechanism,
        }

    def grants(self) -> str:
        """The IAM policy that gives credentials the least this sink needs, as JSON."""
        if self._target.scheme != "s3":
            raise Misconfigured(
                f"{self.target} is not on S3: there is no policy to print",
                "a folder needs to be writable; other stores need list, get, put and delete",
            )
        options: Mapping[str, object] = dict(self.storage_options)  # type: ignore[arg-type] # parsed
        from epochal.sinks.files.operate import iam_policy  # noqa: PLC0415  only operators ask

        key = options.get("kms_key_id")
        return iam_policy(self._target, kms_key_id=None if key is None else str(key))

    @property
    def _mechanism(self) -> str:
        if self._target.scheme == "file":
            return "rename"
        return (
            "multipart"
            if self._target.scheme == "s3" and self.uploads != "manifest"
            else "manifest"
        )

    def writer(self, task: Task) -> Writer:
        # Here, as the driver does without it.
        from epochal.kit.file_buffer import BufferLimits  # noqa: PLC0415
        from epochal.sinks.files.writer import FileShape, FileWriter  # noqa: PLC0415

        if self._tasks_refusal is not None:
            raise Misconfigured(
                self._tasks_refusal, "here rows are written by a task, or by the driver itself"
            )
        form = self._form
        file_bytes_max = self.max_file_bytes or _MAX_FILE_BYTES
        shape = FileShape(
            format=form,
            compression=self.compression or form.default,
            limits=BufferLimits(
                partition_by=tuple(self.partition_by),
                split_rows=task.limits.buffer_rows,
                group_rows=form.rows_at_once,
                max_file_bytes=file_bytes_max,
                buffer_bytes_max=self.buffer_bytes_max,
                open_files_max=self.open_files_max,
            ),
        )
        attempt = self._backend.attempt(task.handle, file_bytes_max=file_bytes_max)
        return FileWriter(task, shape, attempt)

    def committer(self, identity: Identity, limits: Limits) -> Committer:  # noqa: ARG002
        # Here, as tasks do without it: a new worker process pays for every import.
        from epochal.sinks.files.committer import EngineFiles, FileCommitter  # noqa: PLC0415
        from epochal.sinks.files.spark_log import SparkLog  # noqa: PLC0415

        backend = self._backend
        return FileCommitter(
            identity,
            backend.staging(identity, recovery_days=self.recovery_days),
            format=self.format,
            partition_by=tuple(self.partition_by),
            whole_epochs=self._whole_epochs(),
            engine=EngineFiles(
                compression=self.compression or self._form.default,
                sort_by=tuple(self.sort_by),
                options=self._writer_options(),
                refusal=self._engine_refusal(),
                tasks_refusal=self._tasks_refusal,
            ),
            log=SparkLog(backend.root) if isinstance(backend, LocalBackend) else None,
            has_log=self.spark_metadata,
        )

    def _engine_refusal(self) -> str | None:
        """Why tasks write the files, and not Spark's own writer."""
        if self.max_file_bytes is not None:
            return "max_file_bytes is given, and Spark does not split files by their size"
        return None

    def _writer_options(self) -> dict[str, str]:
        given = {name: str(value) for name, value in self.options.items()}
        if self.max_records_per_file is not None:
            given["maxRecordsPerFile"] = str(self.max_records_per_file)
        return given

    @property
    def _tasks_refusal(self) -> str | None:
        """Why tasks can't write the files."""
        by_spark = "by Spark's own writer only"
        if self._form.encoder is None:
            return f"{self.format} files are written {by_spark}"
        for option in ("sort_by", "max_records_per_file", "options"):
            if getattr(self, option):
                return f"{option} is obeyed {by_spark}"
        return None

    def _whole_epochs(self) -> Ability:
        if self.spark_metadata:
            return Ability(
                name="whole epochs for Spark's readers",
                granted=True,
                because="_spark_metadata is kept",
            )
        if self._mechanism == "manifest":
            return Ability(
                name="rows for readers that list the folder",
                granted=False,
                because="data is beside it; read_epochs shows it",
            )
        way_out = "; spark_metadata=True makes Spark do so" if self._mechanism == "rename" else ""
        return Ability(
            name="whole epochs for plain readers",
            granted=False,
            because="files of an epoch appear one by one; read_epochs shows whole epochs" + way_out,
        )


def _option_text(value: object) -> str:
    """As Spark reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
