"""Assignors of the newer consumer protocol: which member of a group reads which partitions.

uniform   equal shares: members that could read the same partitions differ by one at most, and
          nobody loses a partition unless another one has at least two less
range     per topic, consecutive partitions in the order of the members, so that topics with as
          many partitions are read by the same members
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from epochal.broker.core.entries import Places

_PASSES_MAX = 16


class Reader(NamedTuple):
    """A member, as an assignor sees it."""

    instance_id: str | None
    topics: frozenset[str]
    """The ids of existing topics that it subscribes to."""
    target: Places
    """What it was to read so far."""


Readers = Mapping[str, Reader]
"""By member id."""
Counts = Mapping[str, int]
"""Ids of topics → the number of their partitions."""
Assignor = Callable[[Readers, Counts], dict[str, Places]]


def uniform(readers: Readers, counts: Counts) -> dict[str, Places]:
    kept = {
        member: {place for place in one.target if _may_read(one, place, counts)}
        for member, one in readers.items()
    }
    pools = _pools(readers)
    for members, topics in pools:
        taken = {place for member in members for place in kept[member]}
        places = [(topic, index) for topic in topics for index in range(counts[topic])]
        _hand_out([place for place in places if place not in taken], members, kept)
    for _ in range(_PASSES_MAX):
        if not sum(_level(members, set(topics), kept) for members, topics in pools):
            break
    return {member: frozenset(places) for member, places in kept.items()}


def in_ranges(readers: Readers, counts: Counts) -> dict[str, Places]:
    found: dict[str, list[tuple[str, int]]] = {member: [] for member in readers}
    for topic, members in _subscribers(readers).items():
        # Static members first: their order outlives their member ids.
        members.sort(key=lambda one: (readers[one].instance_id is None, _name(one, readers[one])))
        share, more = divmod(counts[topic], len(members))
        first = 0
        for number, member in enumerate(members):
            last = first + share + (number < more)
            found[member] += [(topic, index) for index in range(first, last)]
            first = last
    return {member: frozenset(places) for member, places in found.items()}


ASSIGNORS: Mapping[str, Assignor] = {"uniform": uniform, "range": in_ranges}
"""The first is the default."""


def _name(member_id: str, reader: Reader) -> str:
    return reader.instance_id or member_id


def _may_read(reader: Reader, place: tuple[str, int], counts: Counts) -> bool:
    topic, index = place
    return topic in reader.topics and index < counts[topic]


def _subscribers(readers: Readers) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for member, one in sorted(readers.items()):
        for topic in sorted(one.topics):
            found[topic].append(member)
    return found


def _pools(readers: Readers) -> list[tuple[list[str], list[str]]]:
    """Topics with the same subscribers, together; those with the fewest subscribers first."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for topic, members in _subscribers(readers).items():
        found[tuple(members)].append(topic)
    ordered = sorted(found.items(), key=lambda one: (len(one[0]), one[1]))
    return [(list(members), topics) for members, topics in ordered]


def _hand_out(
    places: Iterable[tuple[str, int]], members: list[str], kept: dict[str, set[tuple[str, int]]]
) -> None:
    """Each to the member that has least."""
    least = [(len(kept[member]), member) for member in members]
    heapq.heapify(least)
    for place in places:
        load, member = least[0]
        kept[member].add(place)
        heapq.heapreplace(least, (load + 1, member))


def _level(members: list[str], topics: set[str], kept: dict[str, set[tuple[str, int]]]) -> int:
    """Move partitions of these topics from who has most to who has least; how many were moved."""
    least = [(len(kept[member]), member) for member in members]
    heapq.heapify(least)
    most = [(-load, member) for load, member in least]
    heapq.heapify(most)
    can_give = {
        member: sorted(place for place in kept[member] if place[0] in topics)
        for load, member in least
        if load >= least[0][0] + 2
    }
    moved = 0
    while most:
        load, giver = -most[0][0], most[0][1]
        if load != len(kept[giver]) or not can_give.get(giver):
            heapq.heappop(most)
            continue
        while least[0][0] != len(kept[least[0][1]]):
            heapq.heappop(least)
        lowest, taker = least[0]
        if load - lowest < 2:
            break
        place = can_give[giver].pop()
        kept[giver].remove(place)
        kept[taker].add(place)
        heapq.heapreplace(least, (lowest + 1, taker))
        heapq.heapreplace(most, (1 - load, giver))
        moved += 1
    return moved
