"""Jars for tests, from Maven, fetched at the first call, one at a time."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from servers.programs import fetched, program

_POM = (
    '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
    "<groupId>epochal.tests</groupId><artifactId>jars</artifactId><version>1</version>"
    "<dependencies>{dependencies}</dependencies></project>\n"
)
_FETCH_MAX_S = 900


class NoJars(Exception):
    """Why there is nothing to prove anything with."""


def dependencies(
    name: str, *coordinates: str, without: tuple[str, ...] = (), alone: bool = False
) -> Path:
    """
    A folder with these artifacts, `group:name:version` or `group:name:version:classifier`, and with
    what they need but for `without` (`group:name`); or with nothing else at all.
    """
    excluded = ("*:*",) if alone else without

    def fetch(home: Path) -> None:
        listed = "".join(_dependency(one, excluded) for one in coordinates)
        (home / "pom.xml").write_text(_POM.format(dependencies=listed), encoding="utf-8")
        words = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
        _maven(home, *words, f"-DoutputDirectory={home / 'jars'}")

    return _once(name, fetch, *coordinates, *excluded) / "jars"


def artifact(name: str, coordinate: str) -> Path:
    """One jar, `group:name:version:jar:classifier`, by itself."""

    def fetch(home: Path) -> None:
        words = [f"-Dartifact={coordinate}", f"-DoutputDirectory={home / 'jars'}"]
        _maven(home, "dependency:copy", *words)

    (jar,) = (_once(name, fetch, coordinate) / "jars").glob("*.jar")
    return jar


def unpacked(name: str, coordinate: str) -> Path:
    """The folder of an archive, `group:name:version:tar.gz:classifier`."""

    def fetch(home: Path) -> None:
        words = [f"-Dartifact={coordinate}", f"-DoutputDirectory={home / 'archives'}"]
        _maven(home, "dependency:copy", *words)
        (archive,) = (home / "archives").iterdir()
        with tarfile.open(archive) as opened:
            opened.extractall(home / "unpacked", filter="data")
        archive.unlink()

    return _once(name, fetch, coordinate) / "unpacked"


def _once(name: str, fetch: Callable[[Path], None], *coordinates: str) -> Path:
    """
    By what is fetched, as the cache outlives a change of it; one at a time, as Maven's own store of
    jars does not like two of it at work.
    """
    digest = hashlib.sha256(" ".join(coordinates).encode()).hexdigest()[:8]
    return fetched(f"{name}-{digest}", fetch, lock="maven")


def _maven(home: Path, *words: str) -> None:
    ran = subprocess.run(
        [program("mvn", "maven"), "-q", "-B", *words],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=_FETCH_MAX_S,
        check=False,
    )
    if ran.returncode:
        raise NoJars(f"Maven could not fetch {home.name}:\n{ran.stdout}{ran.stderr}")


def _dependency(coordinate: str, excluded: tuple[str, ...]) -> str:
    group, name, version, *classifier = coordinate.split(":")
    parts = [_tag("groupId", group), _tag("artifactId", name), _tag("version", version)]
    parts += [_tag("classifier", one) for one in classifier]
    if excluded:
        pairs = [one.split(":") for one in excluded]
        each = [_tag("groupId", group) + _tag("artifactId", name) for group, name in pairs]
        parts.append(_tag("exclusions", "".join(_tag("exclusion", one) for one in each)))
    return _tag("dependency", "".join(parts))


def _tag(name: str, text: str) -> str:
    return f"<{name}>{text}</{name}>"
