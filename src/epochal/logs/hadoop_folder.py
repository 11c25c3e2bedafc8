"""One folder behind the Hadoop file system of a Spark session, and what its faults mean."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs.gateway import Java
from epochal.logs.names import first_line

FAULTS = (Py4JError, PySparkException)
"""What a call into the JVM raises: Spark turns some of the gateway's errors into its own."""
_LEFTOVER_AGE_S = 3600.0
_LEFTOVER_SUFFIX = ".tmp"

_NEXT_PATH = re.compile(r", (?=[A-Za-z0-9+.-]+:/)")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HadoopFolder:
    """Files of one folder, none of which is ever seen half. Usable from any thread."""

    jvm: Java
    conf: Java
    files: Java
    folder: Java
    publishes_at_close: bool
    """A file of this store appears when its stream is closed, and not before."""
    called: str
    """How messages speak of it."""

    def inside(self, name: str, *, called: str) -> HadoopFolder:
        return replace(self, folder=self.path(name), called=called)

    def path(self, name: str) -> Java:
        return self.jvm.org.apache.hadoop.fs.Path(self.folder, name)

    def names(self) -> Sequence[str]:
        """All files that are not hidden, in rising order; none where there is no folder yet."""
        return sorted(name for name in self._all_names() if name and not name.startswith("."))

    def _all_names(self) -> Sequence[str]:
        """In one text of the JVM: to ask for each costs more than the listing."""
        with sorting_errors("list", self.called):
            try:
                statuses = self.files.listStatus(self.folder)
            except FAULTS as error:
                if _is_missing(error):
                    return []
                raise
            paths = self.jvm.org.apache.hadoop.fs.FileUtil.stat2Paths(statuses)
            text = self.jvm.scala.runtime.ScalaRunTime.stringOf(paths)
        text = text.removeprefix("Array(").removesuffix(")")
        return [path.rpartition("/")[2] for path in _NEXT_PATH.split(text)]

    def read(self, name: str) -> bytes | None:
        with sorting_errors("read from", self.called):
            try:
                stream = self.files.open(self.path(name))
            except FAULTS as error:
                if _is_missing(error):
                    return None
                raise
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def delete(self, names: Sequence[str]) -> None:
        with sorting_errors("delete from", self.called):
            for name in names:
                self.files.delete(self.path(name), False)

    def write_hidden(self, name: str, content: bytes) -> Java:
        """Make it durable under a name that nobody looks for; returns its path."""
        hidden = self.path(f".{name}.{secrets.token_hex(8)}{_LEFTOVER_SUFFIX}")
        stream = self.files.create(hidden, False)
        try:
            stream.write(content)
            stream.hsync()
        finally:
            stream.close()
        return hidden

    def put(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""
        with sorting_errors("write to", self.called):
            if self.publishes_at_close:
                stream = self.files.create(self.path(name), True)
                # A stream that did not take all of it must stay open.
                stream.write(content)
                stream.close()
            else:
                self._replace(self.write_hidden(name, content), self.path(name))

    def _replace(self, hidden: Java, visible: Java) -> None:
        if self.files.getUri().getScheme() == "file":
            # Java's rename, which replaces; a context would go through files of checksums.
            self.files.rename(hidden, visible)
            return
        context = self.jvm.org.apache.hadoop.fs.FileContext.getFileContext(
            self.files.getUri(), self.conf
        )
        option = self.jvm.java.lang.Class.forName("org.apache.hadoop.fs.Options$Rename")
        options = self.jvm.java.lang.reflect.Array.newInstance(option, 1)
        options[0] = self.jvm.java.lang.Enum.valueOf(option, "OVERWRITE")
        context.rename(hidden, visible, options)

    def remove_leftovers(self) -> None:
        """Remove what killed writers left. A living one that is this slow finds out and retries."""
        oldest_ms = (time.time() - _LEFTOVER_AGE_S) * 1000
        for name in self._all_names():
            if name.startswith(".") and name.endswith(_LEFTOVER_SUFFIX):
                with suppress(*FAULTS):
                    status = self.files.getFileStatus(self.path(name))
                    if status.getModificationTime() < oldest_ms:
                        self.files.delete(status.getPath(), False)


@contextmanager
def sorting_errors(verb: str, called: str, *, is_put: bool = False) -> Iterator[None]:
    try:
        yield
    except FAULTS as error:
        raise _sorted(error, f"cannot {verb} {called}: {_told(error)}", is_put=is_put) from None


def _sorted(error: Exception, fact: str, *, is_put: bool) -> EpochalError:
    """The same error, by what the caller may do next."""
    kinds = kinds_of(error)
    if kinds & _FOR_A_PERSON or "Permission denied" in fact:
        return Misconfigured(fact, hint="Spark itself must be able to write to this folder")
    if is_put and not kinds & _NOTHING_WAS_DONE:
        return OutcomeUnknown(fact)
    return TryAgain(fact)


def _is_missing(error: Exception) -> bool:
    """Java tells a file that may not be read by the name of one that is not there."""
    return bool(kinds_of(error) & _MISSING) and "Permission denied" not in _told(error)


def kinds_of(error: Exception) -> set[str]:
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
