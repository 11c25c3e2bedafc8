"""
Build what an index takes, and try it as users do: `make release URL=https://…/epochal`.

    1. the sources of git, with the repository's address in the metadata, and README's links and
       pictures made absolute, as an index shows it apart from the repository
    2. a wheel and an sdist in dist/
    3. their metadata: version, classifiers, extras, README as it is rendered (twine)
    4. every extra alone in an environment of its own: it imports its parts and checks its sink

URL is the address of the repository. It is no part of the sources, so that a fork's metadata does
not name somebody else's.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path

import setup

ROOT = setup.ROOT
DIST = ROOT / "dist"
BUILD = ROOT / "build" / "release"
TRIALS = ROOT / "tools" / "extra_trials.py"
SHIPPED = ("src", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def absolute_links(text: str, url: str, version: str) -> str:
    """A page whose links into the repository work wherever it is shown."""

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        inner = absolute_links(found[2], url, version)
        return f"{found[1]}[{inner}]({url}/{kind}/v{version}/{found[3]})"

    return _LINK.sub(absolute, text)


def project_urls(url: str, version: str) -> str:
    pages = {
        "Homepage": url,
        "Documentation": f"{url}/blob/v{version}/docs/index.md",
        "Changelog": f"{url}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{url}/issues",
        "Source": url,
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{page}"\n' for name, page in pages.items())


def version() -> str:
    """Of pyproject.toml; the package and the changelog must have the same."""
    found = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    if f'__version__ = "{found}"' not in (ROOT / "src" / "epochal" / "__init__.py").read_text():
        sys.exit(f"release: src/epochal/__init__.py does not have the version {found}")
    if f"\n## {found}\n" not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"release: CHANGELOG.md has no section {found}")
    return found


def copied_sources(folder: Path, url: str) -> None:
    """The files of git, as an index shall have them."""
    listed = subprocess.run(
        [shutil.which("git") or "git", "ls-files", "-z", *SHIPPED],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    readme, settings = folder / "README.md", folder / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(), url, version()))
    text = settings.read_text()
    settings.write_text(
        text.replace("\n[project.scripts]", f"{project_urls(url, version())}\n[project.scripts]")
    )


def build(url: str, build_folder: Path = BUILD, dist: Path = DIST) -> tuple[Path, Path]:
    """The wheel and the sdist, by the locked hatchling."""
    for folder in (build_folder, dist):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    copied_sources(build_folder, url)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(dist)],
        cwd=build_folder,
        check=True,
        capture_output=True,
    )
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def mistakes(wheel: Path, sdist: Path, url: str) -> list[str]:
    """What an index, or somebody who reads there, would stumble over."""
    from trove_classifiers import classifiers  # noqa: PLC0415  comes with hatchling

    metadata = metadata_of(wheel)
    readme = str(metadata.get_payload())
    found = [
        f"unknown classifier: {one}"
        for one in metadata.get_all("Classifier", [])
        if one not in classifiers
    ]
    found += [f"README has a relative link: {link[0]}" for link in _LINK.finditer(readme)]
    found += [
        f"no URL {label}"
        for label in ("Homepage", "Documentation", "Changelog", "Issues", "Source")
        if not any(one.startswith(f"{label}, {url}") for one in metadata.get_all("Project-URL", []))
    ]
    if metadata["Description-Content-Type"] != "text/markdown":
        found.append("README is not declared as Markdown")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    found += [
        f"the wheel lacks {name}"
        for name in (
            "epochal/py.typed",
            "epochal/telemetry/grafana.json",
            "epochal/config/example.yaml",
        )
        if name not in inside
    ]
    found += [f"the wheel has {name}" for name in inside if not name.startswith("epochal")]
    with tarfile.open(sdist) as archive_of_sources:
        names = {Path(*Path(one).parts[1:]).as_posix() for one in archive_of_sources.getnames()}
    found += [
        f"the sdist lacks {name}"
        for name in (
            "LICENSE",
            "README.md",
            "CHANGELOG.md",
            "pyproject.toml",
            "src/epochal/py.typed",
        )
        if name not in names
    ]
    return found


def extras_of(wheel: Path) -> list[str]:
    return sorted(metadata_of(wheel).get_all("Provides-Extra", []))


def try_extras(wheel: Path, extras: Sequence[str]) -> list[str]:
    """The extras that are not enough for their parts, each tried in a new environment."""
    uv, env = setup.uv_command(), setup.uv_environment()
    failed = []
    for extra in ("", *extras):
        folder = BUILD / f"venv-{extra or 'alone'}"
        python = folder / "bin" / "python"
        made: list[str | Path] = [uv, "venv", "--quiet", "--python", sys.executable, folder]
        subprocess.run(made, check=True, env=env)
        wanted = f"epochal[{extra}] @ {wheel.as_uri()}" if extra else f"epochal @ {wheel.as_uri()}"
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", python, wanted], check=True, env=env
        )
        print(f"release: trying {extra or 'the package alone'}", file=sys.stderr, flush=True)
        clean = {key: os.environ[key] for key in os.environ.keys() - {"PYTHONPATH", "VIRTUAL_ENV"}}
        tried = subprocess.run([python, TRIALS, extra], check=False, cwd=BUILD, env=clean)
        if tried.returncode:
            failed.append(extra or "without an extra")
        shutil.rmtree(folder)
    return failed


def main() -> None:
    url = os.environ.get("URL", "").rstrip("/")
    if not url.startswith("https://"):
        sys.exit("release: give the repository's address: make release URL=https://…/epochal")
    wheel, sdist = build(url)
    found = mistakes(wheel, sdist, url)
    uv = setup.uv_command()
    shown: list[str | Path] = [
        uv,
        "tool",
        "run",
        "--quiet",
        "twine",
        "check",
        "--strict",
        wheel,
        sdist,
    ]
    if subprocess.run(shown, check=False, env=setup.uv_environment()).returncode:
        found.append("twine objects")
    found += [f"the extra is not enough: {one}" for one in try_extras(wheel, extras_of(wheel))]
    for one in found:
        print(f"release: {one}", file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"release: {wheel.relative_to(ROOT)} and {sdist.relative_to(ROOT)} are ready")


if __name__ == "__main__":
    main()
