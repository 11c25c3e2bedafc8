"""The buffer of a writer and its backpressure, without a database."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from epochal.errors import Backpressure, TryAgain, from_text
from epochal.kit.sql.backpressure import Pace, Pressure, PressureLimits
from epochal.kit.sql.buffer import Buffer, BufferLimits


def batch(rows: int, first: int = 0) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(first, first + rows), pa.int64())})


def made(limits: BufferLimits, pressure: Pressure | None = None, sleep=time.sleep):
    sent = []

    def send(block: pa.Table, first: int) -> None:
        sent.append((first, block["n"].to_pylist()))

    return Buffer(send, limits=limits, pressure=pressure or Pressure(), sleep=sleep), sent


def test_small_batches_are_sent_as_one_block():
    buffer, sent = made(BufferLimits(rows=100))
    for number in range(10):
        buffer.add(batch(1, number))
    assert sent == []
    buffer.drain()
    assert sent == [(0, list(range(10)))]
    assert buffer.metrics.rows == 10


def test_a_block_is_sent_when_it_has_enough_rows_or_bytes_or_is_old_enough():
    for limits in (
        BufferLimits(rows=4),
        BufferLimits(rows=100, bytes=32),
        BufferLimits(rows=100, flush_interval_s=0.0),
    ):
        buffer, sent = made(limits)
        for number in range(8):
            buffer.add(batch(1, number))
        buffer.drain()
        assert len(sent) > 1
        assert [n for _, values in sent for n in values] == list(range(8))
        assert [first for first, _ in sent] == [values[0] for _, values in sent]


def test_how_full_the_blocks_were_is_reported():
    limits = BufferLimits(rows=10)
    buffer, _ = made(limits)
    for number in range(25):
        buffer.add(batch(1, number))
    buffer.drain()
    assert buffer.metrics.blocks == 3
    assert buffer.metrics.efficiency(limits) == pytest.approx(25 / 30)


def test_at_most_one_block_is_on_its_way_while_another_is_filled():
    release, under_way = threading.Event(), []

    def send(block: pa.Table, first: int) -> None:
        under_way.append(first)
        release.wait(60)

    buffer = Buffer(send, limits=BufferLimits(rows=1), pressure=Pressure())
    buffer.add(batch(1))
    adding = threading.Thread(target=buffer.add, args=(batch(1, 1),))
    adding.start()
    adding.join(0.1)
    assert adding.is_alive(), "a second block was sent beside the first"
    release.set()
    adding.join()
    buffer.drain()
    assert under_way == [0, 1]


def test_an_error_of_the_sender_reaches_the_writer():
    def send(block: pa.Table, first: int) -> None:
        raise TryAgain("no")

    buffer = Buffer(send, limits=BufferLimits(rows=1), pressure=Pressure())
    buffer.add(batch(1))
    with pytest.raises(TryAgain):
        buffer.drain()
    buffer.close()


def test_a_slow_target_slows_the_task_down_and_then_lets_it_go_on():
    waits = []
    pressure = Pressure(PressureLimits(slow_above_s=0.0, slow_wait_s=0.25))
    buffer, sent = made(BufferLimits(rows=1), pressure, waits.append)
    for number in range(4):
        buffer.add(batch(1, number))
    buffer.drain()
    assert waits == [0.25] * 4
    assert buffer.metrics.held_back_s == 1.0
    assert len(sent) == 4


def test_backpressure_answers_by_what_the_target_shows():
    pressure = Pressure(PressureLimits(slow_above_s=1, pause_above_s=5, drop_above_s=50))
    assert pressure.decide().pace is Pace.CONTINUE
    pressure.sent(2)
    assert pressure.decide().pace is Pace.SLOW
    pressure.sent(20)
    assert pressure.decide().pace is Pace.PAUSE
    for _ in range(10):
        pressure.sent(0.01)
    assert pressure.decide().pace is Pace.CONTINUE
    pressure.failed()
    assert pressure.decide().pace is Pace.SLOW
    pressure.failed(is_lock_wait=True)
    assert pressure.decide().pace is Pace.PAUSE
    pressure.sent(0.01)
    assert pressure.decide().pace is Pace.CONTINUE


def test_to_drop_fails_the_epoch_and_never_loses_a_row():
    pressure = Pressure(PressureLimits(drop_above_s=1))
    pressure.sent(10)
    with pytest.raises(Backpressure, match=r"10\.0 s per block") as raised:
        pressure.decide()
    assert isinstance(raised.value, TryAgain)
    assert isinstance(from_text(raised.value.to_line()), Backpressure)
    waiting = Pressure()
    for _ in range(3):
        waiting.failed(is_lock_wait=True)
    with pytest.raises(Backpressure):
        waiting.decide()
