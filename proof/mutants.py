"""Mutants of the coordinator: `make proof ONLY=mutants`.

Each mutant is an exact replacement of text, applied to a copy of the project; then the judges run
on that copy: simulation, unit tests, small scenarios of the model checker, crash at every call, the
conformance of the reference sink. The first objection ends it. A mutant that nobody objects to
fails the run, and so does one whose text is no longer in the code: a rule that can't be broken any
more is not being tested either.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEEDS = 400
TIMEOUT_S = 300

CLEANUP = "src/epochal/coordinator/cleanup.py"
COMMIT = "src/epochal/coordinator/commit.py"
COORDINATOR = "src/epochal/coordinator/coordinator.py"
JOURNAL = "src/epochal/coordinator/journal.py"
TARGETS = "src/epochal/coordinator/targets.py"
REHEARSAL = "src/epochal/coordinator/rehearsal.py"
ADMISSION = "src/epochal/protocol/admission.py"
INVARIANTS = "src/epochal/protocol/invariants.py"
RECOVERY = "src/epochal/protocol/recovery.py"
RECEIPTS = "src/epochal/protocol/receipts.py"
STATE = "src/epochal/protocol/state.py"
TERMS = "src/epochal/terms.py"
ERRORS = "src/epochal/errors.py"
WORLD = "proof/world.py"
MEMORY = "src/epochal/sinks/memory/store.py"


@dataclass(frozen=True, slots=True)
class Edit:
    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]


def mutant(name: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits))


MUTANTS = (
    mutant(
        "commit before decide",
        (
            COORDINATOR,
            "        self._decide(receipts, began_with)\n",
            "        for sink, some in receipts.items():\n"
            "            self._targets.committers[sink].commit(self._open_epoch, some)\n"
            "        self._decide(receipts, began_with)\n",
        ),
    ),
    mutant(
        "no list after put",
        (
            JOURNAL,
            "            number, state = self._above_pauses(number + 1, state, has_put=True)\n",
            "            number += 1\n",
        ),
    ),
    mutant(
        "a fence put into a deleted slot",
        (
            JOURNAL,
            "self._number, self._state = self._above_pauses(number + 1, state, has_put=True)\n",
            "self._number, self._state = number + 1, state\n",
        ),
    ),
    mutant(
        "the end of the log is asked for twice by a claim",
        (
            JOURNAL,
            "            if self._fill(number + 1, kind, state, note):\n",
            "            number = self._insist(self._newest, '')[0]\n"
            "            if self._fill(number + 1, kind, state, note):\n",
        ),
    ),
    mutant(
        "an old writer puts above the fence",
        (
            JOURNAL,
            "        number = self._number\n        try:",
            "        number = max(self._numbers(), default=0)\n        try:",
        ),
    ),
    mutant(
        "a conflict taken for a record of another",
        (
            WORLD,
            "        return None\n\n    def land_late",
            "        return False\n\n    def land_late",
        ),
    ),
    mutant(
        "gap read as the end",
        (
            JOURNAL,
            "newest := max(numbers := self._numbers(), default=0)",
            "newest := number + (number + 1 in (numbers := self._numbers()))",
        ),
    ),
    mutant(
        "a driver goes on above any record",
        (
            JOURNAL,
            "if found is None or found.record.kind not in _PAUSES:",
            "if found is None:",
        ),
    ),
    mutant(
        "nonce ignored: any record is mine",
        (JOURNAL, "return data is not None and decode", "return data is not None or decode"),
    ),
    mutant(
        "nonce ignored: my own record is another's",
        (JOURNAL, " or self._holds(number, nonce)", ""),
    ),
    mutant(
        "no fence check before abort",
        (
            CLEANUP,
            "        self._journal.require_newest()\n        self._targets.ask_each(",
            "        self._targets.ask_each(",
        ),
    ),
    mutant(
        "no fence check before a sweep",
        (
            CLEANUP,
            "        self._journal.require_newest()\n        state",
            "        state",
        ),
    ),
    mutant(
        "losers not aborted",
        (CLEANUP, "        committer.abort(epoch, receipts)\n", ""),
    ),
    mutant(
        "STOP says clear with something left",
        (COORDINATOR, "is_clear = self._cleanup.is_clear\n", "is_clear = True\n"),
    ),
    mutant(
        "a failed start makes up for a crash",
        (
            JOURNAL,
            "                self.was_clear = before is None or before.is_clear\n",
            "                self.was_clear = True\n",
        ),
    ),
    mutant(
        "a target that hangs is called again",
        (TARGETS, "        self._on_hang()\n        self.committers = {}\n", ""),
    ),
    mutant(
        "what is done beside a target that hangs is noted when it is given up",
        (COMMIT, "            on_late=lambda: self._delayed(pending),\n", ""),
    ),
    mutant(
        "a listing that arrives late still aborts",
        (CLEANUP, "        if self._journal.is_halted:\n            return left\n", ""),
    ),
    mutant(
        "a sink waits for the retries of another that hangs",
        (
            COMMIT,
            "is_last = clock.monotonic() + wait_s > deadline_s or",
            "is_last = True or",
        ),
    ),
    mutant(
        "a refused record is taken for an unanswered one",
        (
            JOURNAL,
            "        except (TryAgain, Misconfigured):\n            self.is_halted = False\n",
            "        except (TryAgain, Misconfigured):\n",
        ),
    ),
    mutant(
        "a lost reply is forgotten once the log refuses",
        (
            JOURNAL,
            "                is_unknown |= has_effect and",
            "                is_unknown = has_effect and",
        ),
    ),
    mutant(
        "a record is taken for refused where only its listing failed",
        (JOURNAL, "            if not has_put:\n                raise\n", "            raise\n"),
    ),
    mutant(
        "STOP says clear although tasks may come late",
        (CLEANUP, "return self._is_swept and not self.has_late_tasks", "return self._is_swept"),
    ),
    mutant(
        "an idle driver does not sweep",
        (
            COORDINATOR,
            "        if self._phase not in _RESTING or self._journal.is_halted:\n",
            "        if self._phase is not None:\n",
        ),
    ),
    mutant(
        "a sweep runs while an epoch is open",
        (
            COORDINATOR,
            "        if self._phase not in _RESTING or self._journal.is_halted:\n",
            "        if self._journal.is_halted:\n",
        ),
    ),
    mutant(
        "a log that was moved away is not missed",
        (
            JOURNAL,
            "        if self._number and self._number not in numbers:\n",
            "        if self._number < 0:\n",
        ),
    ),
    mutant(
        "a sweep aborts what a decision names",
        (
            TERMS,
            "one.handle for some in self.receipts.values() for one in some",
            "one.handle for some in () for one in some",
        ),
    ),
    mutant(
        "lists written after the record that names them",
        (JOURNAL, "        self._put_lists(lists)\n        # Until", "        # Until"),
        (
            JOURNAL,
            "            number, state = self._above_pauses(number + 1, state, has_put=True)\n",
            "            self._put_lists(lists)\n"
            "            number, state = self._above_pauses(number + 1, state, has_put=True)\n",
        ),
    ),
    mutant(
        "lists deleted while the newest record names them",
        (
            JOURNAL,
            "        self.has_unwritten_state = True\n",
            "        self.has_unwritten_state = True\n        self._note_lists(state)\n",
        ),
    ),
    mutant(
        "lists listed after the question who is newest",
        (
            JOURNAL,
            "        if found - self._lists:\n            self.require_newest()\n",
            "",
        ),
    ),
    mutant(
        "lists deleted while a put is unanswered",
        (
            JOURNAL,
            "        if self.is_halted:\n            return\n        self._is_untidy",
            "        self._is_untidy",
        ),
    ),
    mutant(
        "two appends may write the same list",
        (RECEIPTS, "% (_MAGIC, FORMAT, nonce.encode())", '% (_MAGIC, FORMAT, b"")'),
    ),
    mutant(
        "lists of killed drivers are never found",
        (CLEANUP, "self._journal.tidy(with_strays=True)", "self._journal.tidy()"),
    ),
    mutant(
        "the log is tidied by time only",
        (CLEANUP, "            self._journal.tidy_if_many()\n", ""),
    ),
    mutant(
        "a zombie aborts what a newer driver prepared",
        (INVARIANTS, "    if seen > mine:\n", "    if seen > mine + 1000:\n"),
    ),
    mutant(
        "unanswered put treated as failed and aborted",
        (
            CLEANUP,
            "            if self._journal.is_halted:\n                return\n",
            "",
        ),
    ),
    mutant(
        "empty epoch skipped",
        (
            COORDINATOR,
            "        try:\n            self._move(Move.GATHER)\n",
            "        if not any(receipts.values()):\n            return self.abort({})\n"
            "        try:\n            self._move(Move.GATHER)\n",
        ),
    ),
    mutant(
        "replay written again",
        (ADMISSION, "    return Admission.REPLAY\n", "    return Admission.FRESH\n"),
    ),
    mutant(
        "rehearse after decide",
        (
            REHEARSAL,
            "        self._rehearse(state, epoch, receipts)\n        # Last, as",
            "        # Last, as",
        ),
        (
            COORDINATOR,
            "        self._move(Move.DECIDE)\n",
            "        self._rehearsal._rehearse(self.state, decision.epoch, receipts)\n"
            "        self._move(Move.DECIDE)\n",
        ),
    ),
    mutant(
        "marks not compared",
        (
            COORDINATOR,
            "            admit_marks(self.state, self._targets.newest(), start.run)\n",
            "",
        ),
    ),
    mutant(
        "offsets not compared at begin",
        (ADMISSION, "state.last.offsets.digest != offsets.digest", "state.last.offsets is None"),
    ),
    mutant(
        "offsets not compared before deciding",
        (REHEARSAL, "if began_with.digest != now.digest:", "if began_with.digest is now:"),
    ),
    mutant(
        "decision overwritten",
        (
            WORLD,
            "        if number in self.records:\n            return False\n",
            "",
        ),
    ),
    mutant(
        "lost receipts dropped",
        (
            COMMIT,
            "            self.lost |= _lost_by_sink(group, result)\n",
            "            self._done |= group.keys()\n",
        ),
    ),
    mutant(
        "sums not compared before writing again",
        (RECOVERY, "return decided == again and decided.is_comparable_to(again)", "return True"),
    ),
    mutant(
        "unknown taken for done",
        (
            COMMIT,
            "return all(group.values()) and Proof.UNKNOWN not in proofs.values()",
            "return True",
        ),
    ),
    mutant(
        "unknown taken for lost",
        (COMMIT, "if proof is Proof.ABORTED)", "if proof is not Proof.COMMITTED)"),
    ),
    mutant(
        "what is done is not noted",
        (COMMIT, "            self.note_done(news)\n", ""),
    ),
    mutant(
        "settled although a sink failed",
        (
            COMMIT,
            "            self._errors |= dict.fromkeys(group, result)\n",
            "            self._done |= group.keys()\n",
        ),
    ),
    mutant(
        "decided although a target's deadline has passed",
        (COORDINATOR, "            self._rehearsal.require_time(self._open_epoch)\n", ""),
    ),
    mutant(
        "a sweep at a target that went back in time",
        (CLEANUP, "        require_not_back(state, sink, committer.newest())\n", ""),
    ),
    mutant(
        "a sweep before the question whether the target went back in time",
        (
            CLEANUP,
            "        require_not_back(state, sink, committer.newest())\n",
            "",
        ),
        (
            CLEANUP,
            "        abort_judged(committer, judged, state)\n        room",
            "        abort_judged(committer, judged, state)\n"
            "        require_not_back(state, sink, committer.newest())\n        room",
        ),
    ),
    mutant(
        "an epoch at a target that went back in time",
        (
            ERRORS,
            "if committed is not None and (proven is None or proven < committed):",
            "if False:",
        ),
    ),
    mutant(
        "a retargeted sink keeps its newest epoch",
        (
            STATE,
            "sink: epoch for sink, epoch in state.newest_committed.items() if sink in staying",
            "sink: epoch for sink, epoch in state.newest_committed.items() if staying",
        ),
    ),
    mutant(
        "a claim does not raise the generation",
        (
            STATE,
            "        generation=Generation(state.generation + 1),\n",
            "        generation=Generation(max(1, state.generation)),\n",
        ),
    ),
    mutant(
        "two winners for one partition",
        (
            INVARIANTS,
            "if len(partitions) != len(set(partitions)):",
            "if not receipts and partitions:",
        ),
    ),
    mutant(
        "a sweep aborts what a driver with a copy of the log prepared",
        (RECOVERY, "    if handle.claim not in state.claims or", "    if"),
    ),
    mutant(
        "all drivers have one claim",
        (
            COORDINATOR,
            "uid, claim = self._environment.new_uid(), self._environment.new_claim()",
            'uid, claim = self._environment.new_uid(), Claim("a" * 8)',
        ),
    ),
    mutant(
        "two copies of one log carry an epoch out, simulated",
        (WORLD, "if receipts and epoch <= newest and not is_ours:", "if not is_ours and not key:"),
    ),
    mutant(
        "an epoch of a copied log is taken for done, simulated",
        (
            WORLD,
            "        self._take(identity, epoch, receipts)\n        if epoch <",
            "        if (identity.uid, epoch) in self.epochs or epoch <",
        ),
    ),
    mutant(
        "an epoch of a copied log is taken for done, memory",
        (
            MEMORY,
            "                _require_ours(ledger, identity, epoch, handles)\n",
            "",
        ),
    ),
    mutant(
        "ledger ignored on commit, simulated",
        (WORLD, "        if handle in self.committed:\n            return True\n", ""),
    ),
    mutant(
        "ledger ignored on commit, memory",
        (
            MEMORY,
            "            if ledger.proves(epoch):\n",
            "            if ledger.proves(epoch) and not handles:\n",
        ),
    ),
    mutant(
        "abort reaches committed rows, memory",
        (
            MEMORY,
            "                self._prepared.pop(handle, None)\n",
            "                self._prepared.pop(handle, None)\n"
            "                self._visible.clear()\n",
        ),
    ),
)


UNBROKEN = Mutant("nothing broken", ())
"""Judges that object to the code as it is prove nothing about mutants."""


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    caught_by: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.mutants", description=__doc__)
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--judge", action="store_true", help="judge the code on the path (internal)"
    )
    options = parser.parse_args(arguments)
    if options.judge:
        return judged()
    chosen = [one for one in MUTANTS if not options.only or options.only in one.name]
    began_s = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        unbroken, *verdicts = pool.map(tried, [UNBROKEN, *chosen])
    if unbroken.caught_by:
        print(f"mutants: the code as it is meets an objection: {unbroken.caught_by}")
        return 1
    width = max(len(one.name) for one in chosen)
    for verdict in verdicts:
        print(
            f"{verdict.mutant.name:{width}}  {verdict.caught_by or 'SURVIVED':40.40}  "
            f"{verdict.seconds:5.1f} s"
        )
    alive = [one for one in verdicts if not one.caught_by or one.caught_by.startswith("STALE")]
    spent_s = time.monotonic() - began_s
    print(f"mutants: {len(verdicts) - len(alive)} of {len(verdicts)} caught, {spent_s:.0f} s")
    return 1 if alive else 0


def tried(one: Mutant) -> Verdict:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        copy_of_the_project(copy)
        stale = [edit for edit in one.edits if not applied(edit, copy)]
        caught = f"STALE: {stale[0].path} has changed" if stale else objection(copy)
    print(f"mutant: {one.name}: {caught[:120] or 'no objection'}", file=sys.stderr, flush=True)
    return Verdict(one, caught, time.monotonic() - began_s)


def copy_of_the_project(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "kafka")
    for name in ("src", "proof", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def applied(edit: Edit, project: Path) -> bool:
    path = project / edit.path
    if not path.exists():
        return False
    text = path.read_text()
    if text.count(edit.old) != 1:
        return False
    path.write_text(text.replace(edit.old, edit.new))
    return True


def objection(project: Path) -> str:
    """The first objection to the code of this copy; empty where there is none."""
    command = [sys.executable, "-m", "proof.mutants", "--judge"]
    path = os.pathsep.join([str(project / "src"), str(project)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=project,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it never ends"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("objects: ")]
    return lines[-1].removeprefix("objects: ") if lines else "STALE: it does not even run"


# In the process that runs on the copy


def judged() -> int:
    logging.disable(logging.CRITICAL)
    for judge in (by_simulation, by_unit_tests, by_model, by_crashes, by_conformance):
        found = judge()
        if found:
            print(f"objects: {found}")
            return 1
    return 0


def by_simulation() -> str:
    from proof.simulation import simulate  # noqa: PLC0415  from the copy

    for seed in range(SEEDS):
        verdict = simulate(seed)
        if verdict.breach:
            return f"sim, seed {seed}: {verdict.breach}"
    return ""


def by_model() -> str:
    from proof.model import explore  # noqa: PLC0415  from the copy
    from proof.scenarios import SCENARIOS  # noqa: PLC0415  from the copy

    small = {"faults", "patient", "attempts", "empty", "thrown-away", "thrown-away-other"}
    for scenario in SCENARIOS:
        walk = explore(scenario) if scenario.name in small else None
        if walk is not None and walk.breach is not None:
            return f"model, {scenario.name}: {walk.breach}"
    return ""


def by_crashes() -> str:
    return _pytest("tests/testing/test_crash.py", "-k", "not second")


def by_unit_tests() -> str:
    return _pytest("tests/protocol", "tests/coordinator")


def by_conformance() -> str:
    return _pytest("tests/testing/test_conformance_memory.py")


def _pytest(*paths: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split("::")[-1] if failed else f"pytest ends with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
