"""Programs that no Python package brings: Debian's packages do.

Packages of this machine's own release are installed, where root runs the tests. Those of another
suite are only unpacked, into the user's cache, and run with the libraries unpacked beside them:
nothing of the system changes, and a fresh clone finds what another one has fetched.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epochal-tests"
_LEAN = ("--no-install-recommends",)
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_FETCH_MAX_S = 900


class NoProgram(RuntimeError):
    """Why a program that a test needs can't be had."""


@cache
def program(name: str, package: str) -> str:
    """The path of a program, installed first where it is missing and root runs the tests."""
    found = shutil.which(name)
    if found is None:
        _install(name, package)
        found = shutil.which(name)
    if found is None:
        raise NoProgram(f"{package} is installed, and `{name}` is still not on the path")
    return found


def jdk_java() -> str:
    """The `java` of a whole JDK, which compiles single-file programs; a bare runtime does not."""
    return str(Path(program("javac", "default-jdk-headless")).resolve().parent / "java")


def _install(name: str, package: str) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoProgram(f"`{name}` is not on the path: install it (Debian's package: {package})")
    _update()
    _apt("install", "-q", "-y", *_LEAN, package)


@cache
def _update() -> None:
    """Fetch the lists of packages, if root runs the tests: a new machine has none, or old ones."""
    if os.geteuid() == 0:
        _apt("update", "-q")


def _apt(*words: str, folder: Path | None = None) -> None:
    """
    Run apt-get in one process of the tests at a time, and wait for those of others. An update in
    a folder of its own, too: in images for containers it removes what others are fetching.
    """
    with locked(Path(tempfile.gettempdir()) / "epochal-apt.lock"):
        _run(["apt-get", "-o", f"DPkg::Lock::Timeout={_FETCH_MAX_S}", *words], folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Tests run in several processes: one of them at a time."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetched(name: str, fetch: Callable[[Path], None], *, lock: str) -> Path:
    """A folder of the cache that `fetch` fills, once on this machine."""
    home = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / f"{lock}.lock"):
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            fetch(home)
            (home / "complete").touch()
    return home


# Packages that are only unpacked


def unpack_alone(package: str, root: Path) -> None:
    """A package of this machine's own release, which has what it needs."""
    if shutil.which("apt-get") is None:
        raise NoProgram(f"apt-get is needed: {package} comes from Debian")
    _update()
    with tempfile.TemporaryDirectory(prefix="epochal-apt-") as folder:
        _apt("download", package, folder=Path(folder))
        (archive,) = Path(folder).glob("*.deb")
        _run(["dpkg", "-x", str(archive), str(root)])


def unpack(package: str, suite: str, root: Path) -> None:
    """Packages of another suite of Debian, and all that they need, the C library too."""
    if shutil.which("apt-get") is None:
        raise NoProgram(f"apt-get is needed: {package} comes from Debian's suite {suite}")
    with tempfile.TemporaryDirectory(prefix="epochal-apt-") as folder:
        private = _private_apt(Path(folder), suite)
        _apt(*private, "update", "-q")
        _apt(*private, "install", "-q", "-y", *_LEAN, "--download-only", *package.split())
        for archive in sorted(Path(folder).glob("archives/*.deb")):
            _run(["dpkg", "-x", str(archive), str(root)])


def unpack_source(package: str, suite: str, root: Path) -> None:
    """The source of a package of another suite, as its authors released it."""
    if shutil.which("apt-get") is None:
        raise NoProgram(f"apt-get is needed: the source of {package} comes from Debian")
    with tempfile.TemporaryDirectory(prefix="epochal-apt-") as folder:
        private = _private_apt(Path(folder), suite, "deb-src")
        _apt(*private, "update", "-q")
        _apt(*private, "source", "-q", "--download-only", package, folder=Path(folder))
        (archive,) = Path(folder).glob("*.orig.tar.*")
        _run(["tar", "-xf", str(archive), "-C", str(root), "--strip-components=1"])


def unpacked_command(root: Path, path: str) -> list[str]:
    """The command that runs a program of `unpack`: by its own loader, with its own libraries."""
    folder = f"{platform.machine()}-linux-gnu"
    libraries = [root / "usr/lib" / folder, root / "lib" / folder]  # before trixie also /lib
    (loader,) = (found for one in libraries for found in one.glob("ld-linux*.so.*"))
    where = ":".join(map(str, libraries))
    return [str(loader), "--library-path", where, str(root / path)]


def _private_apt(folder: Path, suite: str, kind: str = "deb") -> list[str]:
    """
    Settings of an apt-get in a folder of its own, for which nothing is installed: it reads the
    machine's configuration and touches none of its state.
    """
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(_source(suite, kind), encoding="utf-8")
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::State::extended_states": folder / "extended_states",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        # Where root runs it, another user could not enter the folder.
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    return [word for key, to in settings.items() for word in ("-o", f"{key}={to}")]


def _source(suite: str, kind: str) -> str:
    """A source entry for another suite, from where this machine has its own release from."""
    _update()
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    wanted = ("Created-By: Packages", f"Release: {release}", "Component: main")
    listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted]).split()
    if not listed:
        raise NoProgram(f"apt has no source of the release {release!r} that leads to {suite}")
    signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    return f"{kind} {signed}{listed[0]} {suite} main\n"


def _run(words: Iterable[str], folder: Path | None = None) -> str:
    command = list(words)
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_FETCH_MAX_S, cwd=folder
    )
    if ran.returncode:
        raise NoProgram(f"{command[0]} {command[-1]} failed: {ran.stderr[-500:]}")
    return ran.stdout
