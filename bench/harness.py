"""Comparisons with a peer: interleaved rounds, medians, one JSON object per line."""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil

_SAMPLE_EVERY_S = 0.05


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Figures of ours and of a peer, taken in turn."""

    name: str
    peer_name: str
    unit: str
    is_rate: bool
    """A rate is better when larger; a time when smaller."""
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    beside: dict[str, object] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "peer": []})
    """Of this process and all it started, by whose turn it was: it says more on a busy machine."""

    def run(
        self,
        ours: Callable[[], float],
        peer: Callable[[], float],
        *,
        rounds: int,
        beside: Mapping[str, Callable[[], float]] | None = None,
    ) -> None:
        """
        Measure in turn, the order changing each round; a first round warms up and is dropped.
        `beside`: variants that are measured in the same rounds, as a JVM gets faster with each.
        """
        others: dict[str, list[float]] = {name: [] for name in beside or {}}
        turns = [
            (self.ours, self._with_cpu("ours", ours)),
            (self.peer, self._with_cpu("peer", peer)),
            *((others[name], measure) for name, measure in (beside or {}).items()),
        ]
        for number in range(rounds + 1):
            for figures, measure in turns if number % 2 else reversed(turns):
                figures.append(measure())
            say(f"{self.name}: round {number}: ours {self.ours[-1]:.6g}, peer {self.peer[-1]:.6g}")
        self.ours, self.peer = self.ours[1:], self.peer[1:]
        for name, figures in others.items():
            self.beside[name] = round(statistics.median(figures[1:]), 3)

    def _with_cpu(self, who: str, measure: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            before_s = sum(cpu_seconds().values())
            figure = measure()
            self.cpu_s[who].append(sum(cpu_seconds().values()) - before_s)
            return figure

        return measured

    def _cpu_ratio(self) -> Mapping[str, float]:
        """The peer's CPU time per turn, which does the same work, to ours."""
        ours, peer = (statistics.median(some[1:] or [0.0]) for some in self.cpu_s.values())
        return {"cpu_ratio": round(peer / ours, 3)} if ours else {}

    def as_json(self) -> Mapping[str, object]:
        ratios = sorted(
            mine / theirs if self.is_rate else theirs / mine
            for mine, theirs in zip(self.ours, self.peer, strict=True)
        )
        return {
            "name": self.name,
            "ours": round(statistics.median(self.ours), 3),
            "peer": round(statistics.median(self.peer), 3),
            "peer_name": self.peer_name,
            "unit": self.unit,
            "ratio": round(statistics.median(ratios), 3),
            "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            **self._cpu_ratio(),
            **self.beside,
        }


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


def report(comparison: Comparison) -> None:
    print(json.dumps(comparison.as_json()), flush=True)


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Seconds since the block was entered."""
    started_s = time.perf_counter()
    yield lambda: time.perf_counter() - started_s


def cpu_seconds(*roots: int) -> dict[str, float]:
    """CPU time so far of this process, of these, and of all they started, by the program's name."""
    trees = [[root, *_children(root)] for root in (psutil.Process(), *map(psutil.Process, roots))]
    found: dict[str, float] = {}
    # A server that this process has started is in both trees.
    for process in {process for tree in trees for process in tree}:
        with suppress(psutil.Error):
            times, name = process.cpu_times(), process.name()
            used = times.user + times.system + times.children_user + times.children_system
            found[name] = found.get(name, 0.0) + used
    return found


class PeakMemory:
    """The largest resident memory of this process and all it started, by sampling."""

    def __enter__(self) -> PeakMemory:
        self.bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._is_over.wait(_SAMPLE_EVERY_S):
            self.bytes = max(self.bytes, sum(_resident(p) for p in [me, *_children(me)]))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
