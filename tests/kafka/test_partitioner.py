"""Rows of one key go to one partition, whichever client wrote them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from epochal.kafka import partitioner


def test_the_hash_is_that_of_the_java_client(java: Callable[[str, list[str]], list[str]]) -> None:
    rng = random.Random(1)
    keys = [rng.randbytes(size) for size in (*range(40), 255, 256, 1_001)]
    hashes = java("Batches.java", [f"murmur2 {key.hex()}" for key in keys])
    column = pa.array([b"skipped", *keys]).slice(1)
    found = partitioner.murmur2(column).view(np.int32)
    assert found.tolist() == [int(line) for line in hashes]


def test_rows_without_a_key_go_where_the_caller_decides() -> None:
    keys = pa.array(["a", None, "a", "b", None])
    found = partitioner.assign(keys, 7, unkeyed=6)
    assert found[0] == found[2]
    assert found[1] == found[4] == 6
    assert partitioner.assign(pa.nulls(3, pa.binary()), 4, unkeyed=1).tolist() == [1, 1, 1]
    assert partitioner.assign(pa.array([], pa.string()), 4, unkeyed=1).tolist() == []


def test_grouping_keeps_the_order_within_a_partition() -> None:
    order, spans = partitioner.group(np.array([2, 0, 2, 0, 5], dtype=np.int32))
    assert order.tolist() == [1, 3, 0, 2, 4]
    assert spans == [(0, 0, 2), (2, 2, 2), (5, 4, 1)]
