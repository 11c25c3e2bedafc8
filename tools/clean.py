"""Remove all that the make targets made inside this checkout: `make clean`."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE = (
    ".venv", ".venv-uv", ".venvs", ".setup.log", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    ".import_linter_cache", ".hypothesis", "build", "dist", "metastore_db", "spark-warehouse",
    "derby.log",
)  # fmt: skip
SOURCES = ("src", "tests", "tools", "bench")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    for name in MADE:
        remove(ROOT / name)
    for folder in SOURCES:
        for cache in list((ROOT / folder).rglob("__pycache__")):
            remove(cache)


if __name__ == "__main__":
    main()
