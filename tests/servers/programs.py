"""Programs that no Python package brings: Debian's packages do, where they may be installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_LEAN = ("--no-install-recommends",)


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
    with (Path(tempfile.gettempdir()) / "epochal-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, apt in one
        for words in (["update", "-q"], ["install", "-q", "-y", *_LEAN, package]):
            ran = subprocess.run(["apt-get", *words], capture_output=True, text=True, check=False)
            if ran.returncode:
                raise NoProgram(f"apt-get {' '.join(words)} failed: {ran.stderr[-500:]}")
