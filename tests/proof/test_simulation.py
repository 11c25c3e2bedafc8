"""Some hundred seeds of trouble; and the simulation sees what is broken on purpose."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from epochal.coordinator.journal import Journal
from proof import simulation
from proof.world import Target

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = 100
"""`make proof ONLY=simulation` runs many more."""


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_seed_breaks_a_promise():
    breaches = [one for one in simulation.simulate_all(range(SEEDS), jobs=2) if one.breach]
    assert not breaches


def trace(seed):
    run = simulation.Simulation(seed, keeps_trace=True)
    run.run()
    return run.trace


TRACES = """
import logging, sys
from proof.simulation import Simulation
logging.disable(logging.CRITICAL)
for seed in range(15):
    run = Simulation(seed, keeps_trace=True)
    run.run()
    print(*run.trace, sep="\\n")
"""


def traces_in_a_process_of_its_own(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", TRACES]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_a_seed_run_twice_gives_the_same_trace_to_the_letter():
    """A failure that chance found is only worth something if it comes again."""
    first, second = (traces_in_a_process_of_its_own(seed) for seed in ("1", "2"))
    assert first.count("\n") > 1500
    assert first == second
    assert trace(11) != trace(12)


TROUBLE = (
    "dies before",
    "dies after",
    "fails: ",
    "no answer: ",
    "sent, not arrived: ",
    "out of sight: ",
    "late: ",
    "hangs: ",
    "is idle",
    "throws away",
    "rejected: ",
    "PreparedLost",
    '"kind":"rewrite"',
    '"kind":"progress"',
    "log.delete(",
    "log.put_list(",
    "log.delete_lists(",
    "conflict: ",
    "sleeps before",
    "ends Fenced",
    "ends GateRefused",
    "ends JobFailed",
    "ends OutcomeUnknown",
    "ends Unsettled",
    "ends cleanly",
)


def test_all_kinds_of_trouble_come_up():
    missing = set(TROUBLE)
    for seed in range(250):
        printed = "\n".join(trace(seed))
        missing = {one for one in missing if one not in printed}
        if not missing:
            break
    assert not missing


def test_a_broken_promise_is_reported_with_the_seed_that_replays_it(monkeypatch, capsys):
    monkeypatch.setattr(Target, "abort", lambda *_: None)
    assert simulation.main(["--seeds", "3", "--jobs", "1"]) == 1
    printed = capsys.readouterr()
    seed = re.search(r"replay: python -m proof.simulation --seed (\d+)", printed.err)[1]
    assert "breaches" in printed.out
    assert simulation.main(["--seed", seed]) == 1
    printed = capsys.readouterr()
    assert f"sim: seed {seed}: I5" in printed.out
    assert "target:" in printed.err


def test_a_seed_without_a_breach_says_so(capsys):
    assert simulation.main(["--seed", "1"]) == 0
    assert capsys.readouterr().out == "sim: seed 1: no breach\n"


def test_without_the_listing_the_simulation_finds_a_breach(monkeypatch):
    monkeypatch.setattr(
        Journal, "_above_pauses", lambda self, number, state, **more: (number, state)
    )
    breaches = (simulation.simulate(seed).breach for seed in range(300))
    assert any(breach and not breach.startswith("defect") for breach in breaches)
