"""
Check the types of every Python example in README.md and docs/, with mypy and pyright: `make check`.

Each page becomes one module, its examples on the lines that they have in the page, so that an error
names page and line. basedpyright is pyright as a wheel that brings its own Node; it runs in
pyright's standard mode, as editors do.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "docs-types"
_CACHE = ROOT / ".mypy_cache" / "docs"
"""The types of PySpark and pandas, which take mypy most of its time."""

_HEAD = "import epochal as ep; from reader import *"
_READER = """\
# What the text around an example has introduced.
from typing import Any

import epochal as ep
from pyspark.sql import DataFrame, SparkSession

spark: SparkSession
orders: DataFrame
stream: DataFrame
pipeline: ep.Pipeline
kafka: DataFrame
url: str
postgres_url: str
mysql_url: str
catalog: Any
Order: Any
post_to_somewhere: Any
"""
_MYPY = """\
[mypy]
python_version = 3.11
follow_untyped_imports = True
"""
_PYRIGHT = {"pythonVersion": "3.11", "typeCheckingMode": "standard"}


def pages() -> dict[str, str]:
    """Every page that has an example in Python, by its path below the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in found}
    return {name: text for name, text in texts.items() if "```python\n" in text}


def as_module(text: str) -> str:
    """A page's examples, each on its own line; all other lines are empty."""
    lines = []
    is_python = False
    for line in text.split("\n"):
        is_fence = line.startswith("```")
        lines.append(line if is_python and not is_fence else "")
        is_python = line == "```python" if is_fence else is_python
    return "\n".join([_HEAD, *lines[1:]])


def mistakes(texts: Mapping[str, str], folder: Path = BUILD) -> list[str]:
    """What the two checkers object to, as `page:line: message`; `folder` is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "reader.pyi").write_text(_READER, encoding="utf-8")
    (folder / "mypy.ini").write_text(_MYPY, encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps(_PYRIGHT), encoding="utf-8")
    modules = {re.sub(r"\W", "_", name.removesuffix(".md")) + ".py": name for name in texts}
    for module, name in modules.items():
        (folder / module).write_text(as_module(texts[name]), encoding="utf-8")
    return [*_mypy(modules, folder), *_pyright(modules, folder)]


def _mypy(modules: Mapping[str, str], folder: Path) -> Iterable[str]:
    command = ("mypy", "--config-file=mypy.ini", "--output=json", f"--cache-dir={_CACHE}", *modules)
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"mypy failed: {done.stdout}{done.stderr}")
    # Without an error there is one empty line.
    for found in map(json.loads, filter(None, done.stdout.splitlines())):
        if found["severity"] == "error":
            yield f"{modules[found['file']]}:{found['line']}: {found['message']} (mypy)"


def _pyright(modules: Mapping[str, str], folder: Path) -> Iterable[str]:
    command = ("basedpyright", "--outputjson", "--pythonpath", sys.executable, *modules)
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"basedpyright failed: {done.stdout}{done.stderr}")
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        if found["severity"] == "error":
            page, line = modules[Path(found["file"]).name], found["range"]["start"]["line"] + 1
            yield f"{page}:{line}: {found['message']} (pyright)"


def main() -> None:
    found = mistakes(pages())
    for mistake in found:
        print(mistake, file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
