"""A store through the Hadoop file system of a Spark session. The module that calls FileSystem.

For places that only Spark can reach: HDFS, and stores whose credentials live in Spark's settings.
A key must be created at most once *and* never with half of its content, and Hadoop has no single
call that promises both everywhere:

- `FileSystem.create(overwrite=False)` on HDFS refuses an existing name, but the content grows in
  sight of readers, and a killed writer leaves half of it.
- `FileContext.rename` without overwrite is one step of the namenode, so on HDFS a file written and
  synced under a hidden name appears whole, and only where there was none. On the local file system
  the same call looks first and renames then: two drivers may both win. There a hard link, which the
  system itself refuses to make twice, takes its place.
- Object stores have no rename; it copies. Those that can create an object at `close` only where
  there is none declare it (`fs.option.create.conditional.overwrite`, S3A from Hadoop 3.4.2 on).

On other file systems `put_if_absent` is refused, unless a person vouches for their rename by
writing `hadoop+scheme`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.store import Entry, checked, gone
from epochal.storage.urls import THROUGH_HADOOP, first_line, host_of, scheme_of, without_secrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Java: TypeAlias = Any
"""An object that lives in Spark's JVM."""
_JVM_ERRORS = (Py4JError, PySparkException)
"""What a call into the JVM raises: Spark turns some of the gateway's errors into its own."""

PROBE = ".put-if-absent"
"""A file beside the keys by which a file system shows that it refuses to create a name twice."""
_LEFTOVER_AGE_S = 3600.0
_CREATE_ATTEMPTS = 5
_SCRATCH_SUFFIX = ".tmp"
_CREATES_ONCE = "fs.option.create.conditional.overwrite"
_RENAMES_ONCE = {"hdfs", "webhdfs", "swebhdfs"}
_HAS_NO_RENAME = {"cosn", "gs", "obs", "oss", "s3", "s3a", "s3n", "wasb", "wasbs"}
_SET_BY_DEFAULT = re.compile(r"core-default\.xml|from AWS_")
_NEXT_PATH = re.compile(r", (?=[A-Za-z0-9+.-]+:/)")

_EXISTS = {"FileAlreadyExistsException", "RemoteFileChangedException"}
_MISSING = {"FileNotFoundException", "NoSuchFileException"}
_RIGHTS = "Spark itself must be able to write to this folder"
_FOR_A_PERSON: tuple[type[EpochalError], str] = (Misconfigured, _RIGHTS)
_NOTHING_DONE: tuple[type[EpochalError], str] = (TryAgain, "")
_ERRORS: Mapping[str, tuple[type[EpochalError], str]] = {
    "AccessControlException": _FOR_A_PERSON,
    "AccessDeniedException": _FOR_A_PERSON,
    "ClassNotFoundException": _FOR_A_PERSON,
    "IllegalArgumentException": _FOR_A_PERSON,
    "NotDirectoryException": _FOR_A_PERSON,
    "ParentNotDirectoryException": _FOR_A_PERSON,
    "UnsupportedFileSystemException": _FOR_A_PERSON,
    "UnsupportedOperationException": _FOR_A_PERSON,
    "FileNotFoundException": _NOTHING_DONE,
    "NoSuchFileException": _NOTHING_DONE,
    "SafeModeException": _NOTHING_DONE,
}
"""What a Java exception or one of its causes means; after any other a put's outcome is unknown."""


class HadoopStore:
    """Keys as files below one folder that Spark can reach. Used on the driver only."""

    def __init__(
        self, spark: SparkSession, url: str, *, folder: str = "", is_vouched_for: bool = False
    ) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._is_vouched_for = is_vouched_for
        self._is_ready = False
        self._jvm = jvm_of(spark)
        with self._errors("open"):
            self._conf = hadoop_conf(spark)
            self._root = self._jvm.org.apache.hadoop.fs.Path(url)
            self._base = self._below_root(folder) if folder else self._root
            self._files = self._open_files()
            self._scheme = self._files.getUri().getScheme()
            self._creates_once = self._files.hasPathCapability(self._root, _CREATES_ONCE)

    @property
    def location(self) -> str:
        return f"{without_secrets(self._url).rstrip('/')}/{self._folder}".rstrip("/")

    def put(self, key: str, content: bytes) -> None:
        path = self._path(key)
        if self._creates_once:
            self._write_at_close(key, path, content, is_new=False)
            return
        with self._errors("write", key):
            scratch = self._write_scratch(content)
        with self._errors("write", key, is_put=True):
            self._in_folder(path, lambda: self._replace(scratch, path))

    def put_if_absent(self, key: str, content: bytes) -> bool:
        path = self._path(key)
        self._make_ready()
        return self._create(key, path, content)

    def read(self, key: str) -> bytes | None:
        with self._errors("read", key):
            content: bytes | None = _unless_missing(lambda: self._read(self._path(key)))
        return content

    def read_range(self, key: str, start: int, end: int) -> bytes:
        def read() -> bytes:
            stream = self._files.open(self._path(key))
            try:
                stream.seek(start)
                return bytes(stream.readNBytes(end - start))
            finally:
                stream.close()

        with self._errors("read", key):
            content: bytes | None = _unless_missing(read)
        if content is None:
            raise gone(self.location, key)
        return content

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        found = self._listed(folder, "isFile")
        return sorted(name for name in found if name > after and not name.startswith("."))

    def folders(self, folder: str = "") -> Sequence[str]:
        return sorted(self._listed(folder, "isDirectory"))

    def entries(self, folder: str = "") -> Sequence[Entry]:
        keys = [f"{folder}/{name}" if folder else name for name in self.names(folder)]
        return [found for key in keys if (found := self.entry(key)) is not None]

    def entry(self, key: str) -> Entry | None:
        with self._errors("read", key):
            status = _unless_missing(lambda: self._files.getFileStatus(self._path(key)))
            if status is None:
                return None
            return Entry(
                name=key.rpartition("/")[2],
                size=status.getLen(),
                modified_at=status.getModificationTime() / 1000,
            )

    def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        with self._errors("delete", ", ".join(keys)):
            for path in paths:
                self._files.delete(path, False)
        folders = {
            key.rpartition("/")[0]: path.getParent() for key, path in zip(keys, paths, strict=True)
        }
        for folder in folders.values():
            self._remove_empty(folder)

    def beside(self, name: str) -> HadoopStore:
        inner = f"{self._folder}/{name}" if self._folder else name
        return HadoopStore(
            self._spark, self._url, folder=inner, is_vouched_for=self._is_vouched_for
        )

    def close(self) -> None:
        """The file system is Spark's own, and stays open."""

    def _open_files(self) -> Java:
        files = self._root.getFileSystem(self._conf)
        # Checksums would be files of their own, which no hard link carries along.
        return files.getRawFileSystem() if files.getUri().getScheme() == "file" else files

    def _path(self, key: str) -> Java:
        return self._jvm.org.apache.hadoop.fs.Path(self._base, checked(key))

    def _below_root(self, name: str) -> Java:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

    def _read(self, path: Java) -> bytes:
        stream = self._files.open(path)
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def _listed(self, folder: str, kind: str) -> Sequence[str]:
        """
        The names of one kind (a predicate of FileStatus) in a folder.

        Filtered and joined in the JVM: to ask for each name costs more than the listing.
        """
        path = self._base if not folder else self._path(folder)
        scala, streams = self._jvm.scala, self._jvm.java.util.stream
        with self._errors("list", folder):
            statuses = _unless_missing(lambda: self._files.listStatus(path))
            if not statuses:
                return []
            wrapped = scala.runtime.ScalaRunTime.genericWrapArray(statuses)
            stream = scala.jdk.javaapi.StreamConverters.asJavaSeqStream(wrapped)
            matching = stream.filter(self._of_status("Predicate", kind, "boolean"))
            paths = matching.map(self._of_status("Function", "getPath", "Path"))
            text = paths.collect(streams.Collectors.toList()).toString()[1:-1]
        return [path.rpartition("/")[2] for path in _NEXT_PATH.split(text) if path]

    def _of_status(self, interface: str, method: str, result: str) -> Java:
        """A method of FileStatus as a function for Java's streams."""
        lang = self._jvm.java.lang
        results = {"boolean": lang.Boolean.TYPE, "Path": self._base.getClass()}
        handle = lang.invoke.MethodHandles.publicLookup().findVirtual(
            lang.Class.forName("org.apache.hadoop.fs.FileStatus"),
            method,
            lang.invoke.MethodType.methodType(results[result]),
        )
        function = lang.Class.forName(f"java.util.function.{interface}")
        return lang.invoke.MethodHandleProxies.asInterfaceInstance(function, handle)

    def _make_ready(self) -> None:
        """Before the first `put_if_absent`: see that the file system can be trusted."""
        if self._is_ready:
            return
        self._refuse_what_could_create_twice()
        with self._errors("create"):
            if not self._files.mkdirs(self._root):
                raise Misconfigured(f"cannot create the folder {self.location}", _RIGHTS)
        self._remove_leftovers()
        probe = self._below_root(PROBE)
        if self._create(PROBE, probe, b"") and self._create(PROBE, probe, b""):
            raise Misconfigured(
                f"the file system of {self.location} replaces a file where it was asked not to",
                hint="use a folder, an object store, or sqlite:///path",
            )
        self._is_ready = True

    def _refuse_what_could_create_twice(self) -> None:
        if self._creates_once or self._scheme in {"file", *_RENAMES_ONCE}:
            return
        if self._is_vouched_for and self._scheme not in _HAS_NO_RENAME:
            return
        if self._scheme in _HAS_NO_RENAME:
            hint = (
                "S3A needs Hadoop 3.4.2 or newer with fs.s3a.create.conditional.enabled; or give "
                "the driver credentials in its environment, or choose another location"
            )
        else:
            hint = (
                f"choose another location, or write {THROUGH_HADOOP}{self._scheme}://… if its "
                "rename is one step that never replaces a file"
            )
        raise Misconfigured(
            f"Spark's file system for {self.location} does not promise to create a name only once",
            hint,
        )

    def _create(self, key: str, path: Java, content: bytes) -> bool:
        if self._creates_once:
            return self._write_at_close(key, path, content, is_new=True)
        with self._errors("write", key):
            scratch = self._write_scratch(content)
        try:
            with self._errors("write", key, is_put=True):
                return bool(self._in_folder(path, lambda: self._publish(scratch, path)))
        finally:
            with suppress(*_JVM_ERRORS):
                self._files.delete(scratch, False)

    def _write_at_close(self, key: str, path: Java, content: bytes, *, is_new: bool) -> bool:
        """Closing is what publishes: a stream that did not take all of it stays open."""
        with self._errors("write", key):
            stream = _unless_exists(lambda: self._opened(path, content, is_new=is_new))
        if stream is None:
            return False
        with self._errors("write", key, is_put=True):
            return _is_new(stream.close)

    def _opened(self, path: Java, content: bytes, *, is_new: bool) -> Java:
        if is_new:
            stream = self._files.createFile(path).create().must(_CREATES_ONCE, True).build()
        else:
            stream = self._files.create(path, True)
        stream.write(content)
        return stream

    def _write_scratch(self, content: bytes) -> Java:
        """
        Make it durable under a hidden name; returns its path. In the folder of all keys: in that of
        its key nobody may ever look for what a killed process left.
        """
        name = f".{secrets.token_hex(8)}{_SCRATCH_SUFFIX}"
        scratch = self._jvm.org.apache.hadoop.fs.Path(self._base, name)
        stream = self._create_scratch(scratch)
        try:
            stream.write(content)
            stream.hsync()
        finally:
            stream.close()
        return scratch

    def _create_scratch(self, scratch: Java) -> Java:
        """With its folder, which a delete elsewhere may remove between the two steps."""
        for _ in range(_CREATE_ATTEMPTS - 1):
            with suppress(*_JVM_ERRORS):
                return self._files.create(scratch, True)
        return self._files.create(scratch, True)

    def _in_folder(self, path: Java, create: Callable[[], Any]) -> Any:
        """Create a name, with its folder, which a delete elsewhere may remove meanwhile."""
        for _ in range(_CREATE_ATTEMPTS - 1):
            if self._scheme == "file":
                # Where there is no folder, Hadoop's rename copies.
                self._files.mkdirs(path.getParent())
            try:
                return create()
            except _JVM_ERRORS as error:
                if not _kinds(error) & _MISSING:
                    raise
                self._files.mkdirs(path.getParent())
        return create()

    def _publish(self, scratch: Java, path: Java) -> bool:
        if self._scheme == "file":
            return self._link(scratch, path)
        return _is_new(lambda: self._context().rename(scratch, path, self._options()))

    def _replace(self, scratch: Java, path: Java) -> None:
        if self._scheme == "file":
            # Java's rename, which replaces; a context would go through files of checksums.
            self._files.rename(scratch, path)
        else:
            self._context().rename(scratch, path, self._options("OVERWRITE"))

    def _link(self, scratch: Java, path: Java) -> bool:
        nio = self._jvm.java.nio
        visible, hidden, folder = (
            nio.file.Paths.get(one.toUri()) for one in (path, scratch, path.getParent())
        )
        is_mine = _is_new(lambda: nio.file.Files.createLink(visible, hidden))
        # Synced also where the name exists: it must not vanish after it was reported.
        channel = nio.channels.FileChannel.open(folder, self._array("java.nio.file.OpenOption", 0))
        try:
            channel.force(True)
        finally:
            channel.close()
        return is_mine

    def _context(self) -> Java:
        return self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(
            self._files.getUri(), self._conf
        )

    def _options(self, *names: str) -> Java:
        """Options of a rename."""
        kind = "org.apache.hadoop.fs.Options$Rename"
        options = self._array(kind, len(names))
        for at, name in enumerate(names):
            option = self._jvm.java.lang.Class.forName(kind)
            options[at] = self._jvm.java.lang.Enum.valueOf(option, name)
        return options

    def _array(self, class_name: str, size: int) -> Java:
        kind = self._jvm.java.lang.Class.forName(class_name)
        return self._jvm.java.lang.reflect.Array.newInstance(kind, size)

    def _remove_leftovers(self) -> None:
        """Remove scratch files of killed writers. A living one that is this slow retries."""
        oldest_ms = (time.time() - _LEFTOVER_AGE_S) * 1000
        pattern = self._jvm.org.apache.hadoop.fs.Path(self._base, f".*{_SCRATCH_SUFFIX}")
        with suppress(*_JVM_ERRORS):
            for status in self._files.globStatus(pattern):
                if status.getModificationTime() < oldest_ms:
                    self._files.delete(status.getPath(), False)

    def _remove_empty(self, folder: Java) -> None:
        with suppress(*_JVM_ERRORS):
            while not folder.equals(self._root) and not self._files.listStatus(folder):
                self._delete_empty(folder)
                folder = folder.getParent()

    def _delete_empty(self, folder: Java) -> None:
        if self._scheme == "file":
            # Hadoop's own looks and then deletes, with all that was put there in between.
            files = self._jvm.java.nio.file
            files.Files.delete(files.Paths.get(folder.toUri()))
        else:
            self._files.delete(folder, False)

    @contextmanager
    def _errors(self, verb: str, key: str = "", *, is_put: bool = False) -> Iterator[None]:
        try:
            yield
        except _JVM_ERRORS as error:
            place = f"{self.location}/{key}" if key else self.location
            fact = f"cannot {verb} {place}: {_reason(error)}"
            raise _translated(error, fact, is_put=is_put) from None


def open_at(spark: SparkSession, url: str) -> HadoopStore:
    """The store below a URL; `hadoop+scheme:` is a person's promise that its rename is one step."""
    plain = url.removeprefix(THROUGH_HADOOP)
    return HadoopStore(spark, plain, is_vouched_for=plain != url)


def jvm_of(spark: SparkSession) -> Java:
    """The JVM beside this driver; a Spark Connect session has none."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        raise Misconfigured(
            "this Spark session has no JVM of its own, so its file systems are out of reach",
            hint="run the driver in Spark's classic mode, or choose a location that the driver "
            "reaches by itself: a folder, s3://…, gs://…, abfss://… or sqlite:///path",
        )
    return jvm


def hadoop_conf(spark: SparkSession) -> Java:
    """Hadoop's settings as Spark's own checkpoints see them."""
    return spark._jsparkSession.sessionState().newHadoopConf()


def qualified(spark: SparkSession, path: str) -> str:
    """
    A path as Spark reads it: without a scheme, and without a host, it is of Spark's default file
    system, which may be HDFS.
    """
    scheme, host = scheme_of(path), host_of(path)
    if host or scheme == "file":
        return path
    file_system = jvm_of(spark).org.apache.hadoop.fs.FileSystem
    default = str(file_system.getDefaultUri(hadoop_conf(spark)).toString())
    if scheme is not None:
        below = path.partition(":")[2].lstrip("/")
        return f"{default.rstrip('/')}/{below}" if scheme == scheme_of(default) else path
    if default.startswith("file:"):
        return path
    if not path.startswith("/"):
        raise Misconfigured(
            f"the checkpoint {path} is relative, and Spark's default file system is {default}",
            hint=f"write the whole path, such as {default.rstrip('/')}/folder/{path}",
        )
    return default.rstrip("/") + path


def file_exists(spark: SparkSession, uri: str) -> bool:
    """Whether Spark sees a file, by an encoded URI as file sources log it."""
    jvm = jvm_of(spark)
    path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
    return bool(path.getFileSystem(hadoop_conf(spark)).exists(path))


def is_set_by_a_person(spark: SparkSession, keys: Sequence[str]) -> bool:
    """Whether one of these settings is neither Hadoop's default nor Spark's copy of a variable."""
    if getattr(spark, "_jvm", None) is None:
        return False
    conf = hadoop_conf(spark)
    sources = [source for key in keys for source in conf.getPropertySources(key) or ()]
    return any(not _SET_BY_DEFAULT.search(source) for source in sources)


def _is_new(publish: Callable[[], object]) -> bool:
    return _unless_exists(lambda: (publish(), True)) is not None


def _unless_exists(create: Callable[[], Any]) -> Any:
    try:
        return create()
    except _JVM_ERRORS as error:
        if _kinds(error) & _EXISTS:
            return None
        raise


def _unless_missing(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except _JVM_ERRORS as error:
        # Java reports a file that may not be read by the class of one that does not exist.
        if _kinds(error) & _MISSING and "Permission denied" not in _reason(error):
            return None
        raise


def _translated(error: Exception, fact: str, *, is_put: bool) -> EpochalError:
    meanings = [_ERRORS[kind] for kind in _kinds(error) if kind in _ERRORS]
    if _FOR_A_PERSON in meanings or "Permission denied" in fact:
        return Misconfigured(fact, _RIGHTS)
    if meanings:
        kind, hint = meanings[0]
        return kind(fact, hint)
    return OutcomeUnknown(fact) if is_put else TryAgain(fact)


def _kinds(error: Exception) -> set[str]:
    """The class names of a Java exception and of its causes, without their packages."""
    kinds = set()
    thrown = _thrown(error)
    while thrown is not None:
        kinds.add(thrown.getClass().getSimpleName())
        thrown = thrown.getCause()
    return kinds


def _reason(error: Exception) -> str:
    thrown = _thrown(error)
    return first_line(str(error) if thrown is None else thrown.toString())


def _thrown(error: Exception) -> Java | None:
    """The Java exception behind an error of the gateway, or behind what Spark made of it."""
    return getattr(error, "java_exception", None) or getattr(error, "_origin", None)
