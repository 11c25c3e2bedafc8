"""Run every static check, all of them even when one fails, and say which did: `make check`."""

from __future__ import annotations

import subprocess
import sys

CHECKS = {
    "ruff": ("ruff", "check"),
    "format": ("ruff", "format", "--check"),
    "mypy": ("mypy",),
    "layers": ("lint-imports", "--no-logo"),
    "docs types": ("python", "tools/docs_types.py"),
}
FIXES = {
    "ruff": ("ruff", "check", "--fix"),
    "format": ("ruff", "format"),
}


def main() -> None:
    commands = FIXES if "--fix" in sys.argv[1:] else CHECKS
    failed = []
    for name, command in commands.items():
        print(f"check: {name}", file=sys.stderr, flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        sys.exit(f"check: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
