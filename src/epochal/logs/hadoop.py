"""An epoch log through the Hadoop file system of a Spark session.

For places that only Spark can reach: HDFS, and stores whose credentials live in Spark's settings.
A slot must be filled at most once *and* never with a torn record, and Hadoop has no single call
that promises both everywhere:

- `FileSystem.create(overwrite=False)` on HDFS refuses an existing name, but the record grows in
  sight of readers, and a killed writer leaves half of one.
- `FileContext.rename` without overwrite is one step of the namenode, so on HDFS a record written
  and synced under a hidden name appears whole, and only where there was none. On the local file
  system the same call looks first and renames then: two drivers may both win. There a hard link,
  which the system itself refuses to make twice, takes its place.
- Object stores have no rename; it copies. Those that can create an object at `close` only where
  there is none say so (`fs.option.create.conditional.overwrite`, S3A from Hadoop 3.4.2 on).

Other file systems are refused, unless a person vouches for their rename by writing `hadoop+scheme`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from epochal.errors import Misconfigured
from epochal.logs.gateway import Java, hadoop_conf, jvm_of
from epochal.logs.hadoop_folder import FAULTS, HadoopFolder, kinds_of, sorting_errors
from epochal.logs.names import PROBE, record_name, record_number, without_secrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CREATES_ONCE = "fs.option.create.conditional.overwrite"
_RENAMES_ONCE = {"hdfs", "webhdfs", "swebhdfs"}
_HAS_NO_RENAME = {"cosn", "gs", "obs", "oss", "s3", "s3a", "s3n", "wasb", "wasbs"}
_TAKEN = {"FileAlreadyExistsException", "RemoteFileChangedException"}


class HadoopLog:
    """Records as files of one folder that Spark can reach. Usable from any thread of the driver."""

    def __init__(self, spark: SparkSession, url: str, *, is_vouched_for: bool = False) -> None:
        self._place = without_secrets(url)
        self._is_vouched_for = is_vouched_for
        self._is_ready = False
        self._jvm = jvm_of(spark)
        with self._sorting_errors("open"):
            self._conf = hadoop_conf(spark)
            self._folder = self._jvm.org.apache.hadoop.fs.Path(url)
            self._files = self._open_files()
            self._scheme = self._files.getUri().getScheme()
            self._creates_once = self._files.hasPathCapability(self._folder, _CREATES_ONCE)
        self._records = HadoopFolder(
            jvm=self._jvm,
            conf=self._conf,
            files=self._files,
            folder=self._folder,
            publishes_at_close=self._creates_once,
            called=f"the epoch log {self.place}",
        )
        self._refuse_what_could_fill_twice()

    @property
    def place(self) -> str:
        return self._place

    def put_if_absent(self, number: int, record: bytes) -> bool:
        self._make_ready()
        return self._fill(record_name(number), record)

    def numbers(self) -> Sequence[int]:
        numbers = (record_number(name) for name in self._records.names())
        return sorted(number for number in numbers if number is not None)

    def read(self, number: int) -> bytes | None:
        return self._records.read(record_name(number))

    def delete(self, numbers: Sequence[int]) -> None:
        self._records.delete([record_name(number) for number in numbers])

    def folder(self, name: str) -> HadoopFolder:
        """A folder beside the records, for what nobody decides by."""
        return self._records.inside(name, called=f"{self.place}/{name}")

    def close(self) -> None:
        """The file system is Spark's own, and stays open."""

    def _open_files(self) -> Java:
        files = self._folder.getFileSystem(self._conf)
        # Checksums would be files of their own, which no hard link carries along.
        return files.getRawFileSystem() if files.getUri().getScheme() == "file" else files

    def _refuse_what_could_fill_twice(self) -> None:
        if self._creates_once or self._scheme in {"file", *_RENAMES_ONCE}:
            return
        if self._is_vouched_for and self._scheme not in _HAS_NO_RENAME:
            return
        if self._scheme in _HAS_NO_RENAME:
            hint = (
                "S3A needs Hadoop 3.4.2 or newer with fs.s3a.create.conditional.enabled; or give "
                "the driver credentials in its environment, or keep the epoch log elsewhere"
            )
        else:
            hint = (
                f"keep the epoch log elsewhere, or write hadoop+{self._scheme}://… if its rename "
                "is one step that never replaces a file"
            )
        raise Misconfigured(
            f"Spark's file system for {self.place} does not promise to fill a name only once", hint
        )

    def _make_ready(self) -> None:
        if self._is_ready:
            return
        with self._sorting_errors("create"):
            if not self._files.mkdirs(self._folder):
                raise Misconfigured(
                    f"cannot create the folder of the epoch log {self.place}",
                    hint="the driver's user must be able to write there",
                )
        self._records.remove_leftovers()
        if self._fill(PROBE, b"") and self._fill(PROBE, b""):
            raise Misconfigured(
                f"the file system of {self.place} replaces a file where it was asked not to",
                hint="keep the epoch log elsewhere: a folder, an object store, or sqlite:///path",
            )
        self._is_ready = True

    def _fill(self, name: str, content: bytes) -> bool:
        if self._creates_once:
            with self._sorting_errors("write to", is_put=True):
                return _is_new(lambda: self._create(self._path(name), content))
        with self._sorting_errors("write to"):
            hidden = self._records.write_hidden(name, content)
        try:
            with self._sorting_errors("write to", is_put=True):
                return self._publish(hidden, self._path(name))
        finally:
            with suppress(*FAULTS):
                self._files.delete(hidden, False)

    def _create(self, path: Java, content: bytes) -> None:
        stream = self._files.createFile(path).create().must(_CREATES_ONCE, True).build()
        # Closing is what publishes, so a stream that did not take all of it must stay open.
        stream.write(content)
        stream.close()

    def _publish(self, hidden: Java, visible: Java) -> bool:
        if self._scheme == "file":
            return self._link(hidden, visible)
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(
            self._files.getUri(), self._conf
        )
        no_options = self._array("org.apache.hadoop.fs.Options$Rename")
        return _is_new(lambda: context.rename(hidden, visible, no_options))

    def _link(self, hidden: Java, visible: Java) -> bool:
        nio = self._jvm.java.nio
        paths = [nio.file.Paths.get(path.toUri()) for path in (visible, hidden, self._folder)]
        is_mine = _is_new(lambda: nio.file.Files.createLink(*paths[:2]))
        # Synced also where the name was taken: it must not vanish after it was reported.
        folder = nio.channels.FileChannel.open(paths[2], self._array("java.nio.file.OpenOption"))
        try:
            folder.force(True)
        finally:
            folder.close()
        return is_mine

    def _path(self, name: str) -> Java:
        return self._records.path(name)

    def _array(self, class_name: str) -> Java:
        """No options, for a call that takes any number of them."""
        kind = self._jvm.java.lang.Class.forName(class_name)
        return self._jvm.java.lang.reflect.Array.newInstance(kind, 0)

    def _sorting_errors(self, verb: str, *, is_put: bool = False) -> AbstractContextManager[None]:
        return sorting_errors(verb, f"the epoch log {self.place}", is_put=is_put)


def _is_new(publish: Callable[[], object]) -> bool:
    try:
        publish()
    except FAULTS as error:
        if kinds_of(error) & _TAKEN:
            return False
        raise
    return True
