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

import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs.gateway import Java, hadoop_conf, jvm_of
from epochal.logs.names import PROBE, first_line, record_name, record_number, without_secrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FAULTS = (Py4JError, PySparkException)
"""What a call into the JVM raises: Spark turns some of the gateway's errors into its own."""
_CREATES_ONCE = "fs.option.create.conditional.overwrite"
_RENAMES_ONCE = {"hdfs", "webhdfs", "swebhdfs"}
_HAS_NO_RENAME = {"cosn", "gs", "obs", "oss", "s3", "s3a", "s3n", "wasb", "wasbs"}
_LEFTOVER_AGE_S = 3600.0
_LEFTOVER_SUFFIX = ".tmp"

_NEXT_PATH = re.compile(r", (?=[A-Za-z0-9+.-]+:/)")
_TAKEN = {"FileAlreadyExistsException", "RemoteFileChangedException"}
_MISSING = {"FileNotFoundException", "NoSuchFileException"}
_NOTHING_WAS_DONE = {*_MISSING, "SafeModeException"}
_FOR_A_PERSON = {
    "AccessControlException",
    "AccessDeniedException",
    "ClassNotFoundException",
    "IllegalArgumentException",
    "NotDirectoryException",
    "ParentNotDirectoryException",
    "UnsupportedFileSystemException",
    "UnsupportedOperationException",
}


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
        self._refuse_what_could_fill_twice()

    @property
    def place(self) -> str:
        return self._place

    def put_if_absent(self, number: int, record: bytes) -> bool:
        self._make_ready()
        return self._fill(record_name(number), record)

    def numbers(self) -> Sequence[int]:
        numbers = (record_number(name) for name in self._names())
        return sorted(number for number in numbers if number is not None)

    def read(self, number: int) -> bytes | None:
        with self._sorting_errors("read from"):
            try:
                stream = self._files.open(self._path(record_name(number)))
            except _FAULTS as error:
                if _is_missing(error):
                    return None
                raise
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def delete(self, numbers: Sequence[int]) -> None:
        with self._sorting_errors("delete from"):
            for number in numbers:
                self._files.delete(self._path(record_name(number)), False)

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
        self._remove_leftovers()
        if self._fill(PROBE, b"") and self._fill(PROBE, b""):
            raise Misconfigured(
                f"the file system of {self.place} replaces a file where it was asked not to",
                hint="keep the epoch log elsewhere: a folder, an object store, or sqlite:///path",
            )
        self._is_ready = True

    def _remove_leftovers(self) -> None:
        """Remove what killed writers left. A living one that is this slow finds out and retries."""
        oldest_ms = (time.time() - _LEFTOVER_AGE_S) * 1000
        for name in self._names():
            if name.startswith(".") and name.endswith(_LEFTOVER_SUFFIX):
                with suppress(*_FAULTS):
                    status = self._files.getFileStatus(self._path(name))
                    if status.getModificationTime() < oldest_ms:
                        self._files.delete(status.getPath(), False)

    def _names(self) -> Sequence[str]:
        """All files here, in one text of the JVM: to ask for each costs more than the listing."""
        with self._sorting_errors("list"):
            try:
                statuses = self._files.listStatus(self._folder)
            except _FAULTS as error:
                if _is_missing(error):
                    return []
                raise
            paths = self._jvm.org.apache.hadoop.fs.FileUtil.stat2Paths(statuses)
            text = self._jvm.scala.runtime.ScalaRunTime.stringOf(paths)
        text = text.removeprefix("Array(").removesuffix(")")
        return [path.rpartition("/")[2] for path in _NEXT_PATH.split(text)]

    def _fill(self, name: str, content: bytes) -> bool:
        if self._creates_once:
            with self._sorting_errors("write to", is_put=True):
                return _is_new(lambda: self._create(self._path(name), content))
        with self._sorting_errors("write to"):
            hidden = self._write_hidden(name, content)
        try:
            with self._sorting_errors("write to", is_put=True):
                return self._publish(hidden, self._path(name))
        finally:
            with suppress(*_FAULTS):
                self._files.delete(hidden, False)

    def _create(self, path: Java, content: bytes) -> None:
        stream = self._files.createFile(path).create().must(_CREATES_ONCE, True).build()
        # Closing is what publishes, so a stream that did not take all of it must stay open.
        stream.write(content)
        stream.close()

    def _write_hidden(self, name: str, content: bytes) -> Java:
        hidden = self._path(f".{name}.{secrets.token_hex(8)}{_LEFTOVER_SUFFIX}")
        stream = self._files.create(hidden, False)
        try:
            stream.write(content)
            stream.hsync()
        finally:
            stream.close()
        return hidden

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
        return self._jvm.org.apache.hadoop.fs.Path(self._folder, name)

    def _array(self, class_name: str) -> Java:
        """No options, for a call that takes any number of them."""
        kind = self._jvm.java.lang.Class.forName(class_name)
        return self._jvm.java.lang.reflect.Array.newInstance(kind, 0)

    @contextmanager
    def _sorting_errors(self, verb: str, *, is_put: bool = False) -> Iterator[None]:
        try:
            yield
        except _FAULTS as error:
            raise self._sorted(error, verb, is_put=is_put) from None

    def _sorted(self, error: Exception, verb: str, *, is_put: bool) -> EpochalError:
        """The same error, by what the caller may do next."""
        fact = f"cannot {verb} the epoch log {self.place}: {_told(error)}"
        kinds = _kinds(error)
        if kinds & _FOR_A_PERSON or "Permission denied" in fact:
            return Misconfigured(fact, hint="Spark itself must be able to write to this folder")
        if is_put and not kinds & _NOTHING_WAS_DONE:
            return OutcomeUnknown(fact)
        return TryAgain(fact)


def _is_new(publish: Callable[[], object]) -> bool:
    try:
        publish()
    except _FAULTS as error:
        if _kinds(error) & _TAKEN:
            return False
        raise
    return True


def _is_missing(error: Exception) -> bool:
    """Java tells a file that may not be read by the name of one that is not there."""
    return bool(_kinds(error) & _MISSING) and "Permission denied" not in _told(error)


def _kinds(error: Exception) -> set[str]:
    """The class names of a Java exception and of its causes, without their packages."""
    kinds = set()
    thrown = _thrown(error)
    while thrown is not None:
        kinds.add(thrown.getClass().getSimpleName())
        thrown = thrown.getCause()
    return kinds


def _told(error: Exception) -> str:
    thrown = _thrown(error)
    return first_line(str(error) if thrown is None else thrown.toString())


def _thrown(error: Exception) -> Java | None:
    """The Java exception behind an error of the gateway, or behind what Spark made of it."""
    return getattr(error, "java_exception", None) or getattr(error, "_origin", None)
