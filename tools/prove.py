"""
Prove by brute force, one part after the other: `make proof`, or `make proof ONLY="model kills"`.

Parts: `model` walks every scenario of the model checker, `simulation` runs SEEDS seeds,
`shared-journal` as many of a broker on several machines, `mutants` breaks the coordinator,
`compat` runs the small suite on every supported PySpark, `connect` the tests of Spark Connect on
those from 4.0 on, `hudi` those of Hudi tables on the one that Hudi has a bundle for, `servers` all
tests of database sinks on the servers that most of them do not use by themselves: PostgreSQL 15 and
MySQL. Three parts run tests that are marked `proof`: `clients` suites of other people's Kafka
clients on the embedded broker, `kills` those of Spark drivers that write to databases, topics,
files and tables under one decision, `storms` all others (standbys, executors, servers, the broker
under kills, power cuts and damage, random schedules). KILLS says how long their loops are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

PYTHON = sys.executable
_MARKED = ("pytest", "-m", "proof", "-n", "2", "--dist", "loadfile")
_CLIENTS = ("tests/broker/test_client_suites.py",)
_SERVERS = ("EPOCHAL_POSTGRES=15", "EPOCHAL_MYSQL=mysql")
_DATABASES = ("tests/sinks/postgres", "tests/sinks/mysql")
_HUDI = ("tests/sinks/hudi",)
_KILLS = ("tests/spark/test_kills.py", "tests/spark/test_lake_kills.py")


def parts(seeds: int) -> dict[str, list[str]]:
    return {
        "model": [PYTHON, "-m", "proof.model"],
        "simulation": [PYTHON, "-m", "proof.simulation", "--seeds", str(seeds)],
        "shared-journal": [PYTHON, "-m", "proof.shared_journal", "--seeds", str(seeds)],
        "mutants": [PYTHON, "-m", "proof.mutants"],
        "clients": [*_MARKED, *_CLIENTS],
        "kills": [*_MARKED, *_KILLS],
        "storms": [*_MARKED, "tests", *(f"--ignore={one}" for one in (*_CLIENTS, *_KILLS, *_HUDI))],
        "servers": ["env", *_SERVERS, "pytest", "-n", "2", "--dist", "loadfile", *_DATABASES],
        "compat": [PYTHON, "tools/compat.py"],
        "connect": [PYTHON, "tools/compat.py", "connect"],
        "hudi": [PYTHON, "tools/compat.py", "hudi"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="make proof", description=__doc__)
    parser.add_argument("parts", nargs="*", help="all of them where none is named")
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    known = parts(options.seeds)
    if unknown := set(options.parts) - known.keys():
        parser.error(f"no part is named {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    failed = []
    for name in options.parts or known:
        print(f"proof: {name}", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        environment = {**os.environ, "EPOCHAL_KILLS": str(options.kills)}
        if subprocess.run(known[name], check=False, env=environment).returncode != 0:
            failed.append(name)
        print(f"proof: {name} took {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"proof: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
