"""
Run one command of `.venv` with the environment that Spark needs: `tools/run.py pytest tests`.

Installs first whatever is missing, so every make target works on a fresh clone.
"""

from __future__ import annotations

import os
import sys

import setup


def environment(java_home: str) -> dict[str, str]:
    scripts = setup.VENV / "bin"
    # Compiled modules are kept, also where the shell asks not to: half of the time of a short
    # Python process goes into compiling what it imports, and tests and Spark start many.
    inherited = {key: os.environ[key] for key in os.environ.keys() - {"PYTHONDONTWRITEBYTECODE"}}
    return {
        **inherited,
        "JAVA_HOME": java_home,
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # Without it Spark starts its workers with the first `python3` of the PATH.
        "PYSPARK_PYTHON": str(setup.PYTHON),
        "VIRTUAL_ENV": str(setup.VENV),
    }


def main() -> None:
    command = sys.argv[1:]
    if not command:
        sys.exit("usage: tools/run.py COMMAND [ARGUMENT …]")
    try:
        java_home = setup.ensure()
    except (setup.SetupFailed, OSError) as error:
        setup.give_up(error)
    env = environment(java_home)
    os.chdir(setup.ROOT)
    try:
        os.execvpe(command[0], command, env)  # noqa: S606 (no shell is wanted)
    except FileNotFoundError:
        sys.exit(f"run: there is no command {command[0]} in .venv or on the PATH")


if __name__ == "__main__":
    main()
