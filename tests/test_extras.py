"""Each extra, alone, is enough to import the parts of the package that it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from extra_trials import PARTS

_IMPORT_ALL = """
import importlib, json, os, pkgutil, sys, traceback

blocked = []

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not among the packages of this extra", name=name)

def import_all(absent, parts):
    blocked[:] = absent
    for part in parts:
        module = importlib.import_module(part)
        for found in pkgutil.walk_packages(getattr(module, "__path__", []), part + "."):
            importlib.import_module(found.name)

def imports_alone(extra, absent, parts):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        import_all(absent, parts)
    except BaseException:
        print(extra, traceback.format_exc(limit=-2))
        os._exit(1)
    os._exit(0)

sys.meta_path.insert(0, Absent)
base, *extras = json.load(sys.stdin)
import_all(*base[1:])
sys.exit(not all([imports_alone(*one) for one in extras]))
"""
"""What needs no extra is imported once, under the same rule; each extra adds to a copy of that."""


def closure(extra: str) -> set[str]:
    """The distributions that this extra installs, and those that they need."""
    wanted, seen = [("epochal", frozenset({extra}))], set()
    while wanted:
        one = wanted.pop()
        if one in seen:
            continue
        seen.add(one)
        name, extras = one
        for line in requires(name) or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in extras | {""}):
                wanted.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return {name for name, _ in seen}


def absent_with(extra: str, modules: Mapping[str, Sequence[str]]) -> list[str]:
    installed = closure(extra)
    return [
        module
        for module, distributions in modules.items()
        if not installed & {canonicalize_name(one) for one in distributions}
    ]


def test_an_extra_alone_is_enough_for_what_it_is_for():
    modules = packages_distributions()
    asked = [(extra, absent_with(extra, modules), parts) for extra, parts in PARTS.items()]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORT_ALL],
        input=json.dumps(asked),
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-600:]
