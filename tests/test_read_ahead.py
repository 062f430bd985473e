"""What is read in an order that repeats is read before it is asked for."""

import threading

import numpy as np
import pytest

from jzero.block_files import aligned
from jzero.offload import read_ahead
from jzero.offload.read_ahead import Buffers, ReadAhead

STEP = [0, 1, 2, 3, 3, 2, 1, 0]  # layers of a forward and a backward pass


class Disk:
    """Tells what was begun, and in which order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.used: list[int] = []  # or dropped

    def begin(self, key: int) -> "Read":
        self.begun.append(key)
        return Read(key, self.used)


class Read:
    def __init__(self, key: int, used: list[int]) -> None:
        self._key, self._used = key, used

    def result(self) -> str:
        self.drop()
        return f"layer {self._key}"

    def drop(self) -> None:
        self._used.append(self._key)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_from_the_second_step_on_reads_are_begun_ahead(depth):
    disk = Disk()
    reads = ReadAhead(disk.begin, depth)
    for _ in range(2):  # the turns from one step to the next are known after two
        assert [reads.take(i) for i in STEP] == [f"layer {i}" for i in STEP]
    for step in range(3):
        for number, key in enumerate(STEP):
            asked = 2 * len(STEP) + step * len(STEP) + number
            assert len(disk.begun) >= asked + depth - 1, "begun before it is asked for"
            assert reads.take(key) == f"layer {key}"
    assert disk.begun[-depth - len(STEP) : -depth] == STEP, "each once, in the order of the step"


def test_no_more_is_under_way_than_was_asked_for():
    disk = Disk()
    reads = ReadAhead(disk.begin, 2)
    for number, key in enumerate(STEP * 4):
        reads.take(key)
        assert len(disk.begun) <= number + 1 + 2


def test_what_is_about_to_be_written_is_read_again():
    disk = Disk()
    reads = ReadAhead(disk.begin, 3)
    for key in STEP * 3:
        reads.take(key)
    before = len(disk.begun)
    reads.forget()
    reads.take(STEP[0])
    assert disk.begun[before] == STEP[0]


def test_all_that_is_read_is_asked_for_or_dropped():
    disk = Disk()
    reads = ReadAhead(disk.begin, 3)
    for order in (STEP, STEP, STEP, [0, 1, 2, 3], [2, 0, 3, 1]):  # of which some break off what was ahead
        for key in order:
            reads.take(key)
    reads.forget()
    assert sorted(disk.used) == sorted(disk.begun)


def test_nothing_is_read_that_is_written_before_it_is_used():
    disk = Disk()
    reads = ReadAhead(disk.begin, 3)
    for _ in range(4):
        before = len(disk.begun)
        for key in STEP:
            reads.take(key)
        reads.forget()  # the update
    assert len(disk.begun) - before == len(STEP)


def test_calls_that_swap_places_cost_no_read():
    disk = Disk()
    reads = ReadAhead(disk.begin, 4)
    for step in range(6):
        order = [0, 1, 2, 3, 4, 5] if step % 2 else [1, 0, 2, 3, 4, 5]
        before = len(disk.begun)
        for key in order:
            reads.take(key)
    assert len(disk.begun) - before <= len(order) + 2


def test_another_order_is_followed_and_learnt():
    disk = Disk()
    reads = ReadAhead(disk.begin, 2)
    for key in STEP * 2 + [0, 1, 2, 3] * 3:  # evaluation has no way back
        assert reads.take(key) == f"layer {key}"
    before = len(disk.begun)
    assert [reads.take(key) for key in (0, 1, 2, 3)] == [f"layer {i}" for i in range(4)]
    assert len(disk.begun) - before == 4, "nothing is read that is not asked for"


def test_memory_comes_back_with_the_array_that_had_it():
    buffers = Buffers()
    array = buffers.lent(buffers.take(64), np.float32, (4, 4))
    place = array.ctypes.data
    assert buffers.take(64).ctypes.data != place
    del array
    assert buffers.take(64).ctypes.data == place


def test_memory_may_come_back_while_some_is_taken(monkeypatch):
    """As when the collector of garbage runs there."""
    buffers = Buffers()
    lent = [buffers.lent(buffers.take(64), np.uint8, (64,))]
    monkeypatch.setattr(read_ahead, "aligned", lambda nbytes: (lent.clear(), aligned(nbytes))[1])
    taking = threading.Thread(target=buffers.take, args=(64,), daemon=True)
    taking.start()
    taking.join(10)
    assert not taking.is_alive(), "it waits for itself"
    assert not lent
