"""
Resolve pyproject.toml anew into the two lock files: `make lock`.

The locks name packages, versions and hashes, and no index: any machine's own index serves.
"""

from __future__ import annotations

import sys

import setup

COMPILE = (
    "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--upgrade",
    "--no-header", "--no-annotate", "--no-emit-index-url", "--python-version", "3.11",
)  # fmt: skip


def main() -> None:
    try:
        setup.refuse_old_python()
        setup.LOG.write_text("", encoding="utf-8")
        uv = setup.uv_command()
        env = setup.uv_environment()
        project = ("--all-extras", "--group", "pyproject.toml:dev", "pyproject.toml")
        java = ("--group", "pyproject.toml:java")
        setup.run("lock the packages", uv, *COMPILE, *project, "-o", setup.LOCK, env=env)
        setup.run("lock Java", uv, *COMPILE, *java, "-o", setup.JAVA_LOCK, env=env)
    except (setup.SetupFailed, OSError) as error:
        setup.give_up(error)
    print(f"wrote {setup.LOCK.name} and {setup.JAVA_LOCK.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
