"""The search for the largest size that trains: with a pretended memory, out of time, and with processes that die."""

import importlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "examples/benchmarks"
sys.path.insert(0, str(BENCHMARKS))
search = importlib.import_module("largest_size")
sys.path.remove(str(BENCHMARKS))


class Pretended:
    """A device that trains up to a size, and a clock that goes on by what a try takes."""

    def __init__(self, memory, takes_s=0.0, hangs_at=math.inf):
        self.memory, self.takes_s, self.hangs_at = memory, takes_s, hangs_at
        self.now, self.sizes = 0.0, []

    def attempt(self, size, seconds):
        self.sizes.append(size)
        if size >= self.hangs_at or self.takes_s > seconds:
            self.now += seconds
            return {"error": search.OUT_OF_TIME}
        self.now += self.takes_s
        return {"layers": size} if size <= self.memory else {"layers": size, "error": "RESOURCE_EXHAUSTED"}

    def largest(self, guess, seconds=1000.0, **how):
        return search.largest(self.attempt, guess, search.Budget(seconds, lambda: self.now), **how)


@pytest.mark.parametrize("memory", [1, 2, 7, 40, 41, 63, 100, 101, 333])
@pytest.mark.parametrize("guess", [1, 40, 100])
def test_with_enough_tries_the_largest_size_is_found(memory, guess):
    device = Pretended(memory)
    assert device.largest(guess, tries=60, closeness=0.0) == {"layers": memory}
    assert len(device.sizes) == len(set(device.sizes)), "no size is tried twice"


@pytest.mark.parametrize("memory", [90, 100, 110, 120])
def test_four_tries_from_a_good_guess_come_within_a_tenth(memory):
    device = Pretended(memory)
    assert 0.9 * memory <= device.largest(100)["layers"] <= memory
    assert len(device.sizes) <= 4


def test_out_of_memory_at_the_first_size_goes_down_to_one_that_trains():
    device = Pretended(50)
    assert device.largest(100)["layers"] == 49
    assert device.sizes[:3] == [100, 70, 49]


def test_where_nothing_trains_the_reason_is_what_is_found():
    device = Pretended(0)
    assert device.largest(3, tries=60) == {"layers": 1, "error": "RESOURCE_EXHAUSTED"}


def test_a_budget_that_runs_out_in_the_middle_leaves_what_was_found():
    device = Pretended(200, takes_s=100.0)
    assert device.largest(100, seconds=250.0) == {"layers": 115}
    assert device.sizes == [100, 115, 132], "the third was ended"
    assert device.now == 250.0
    assert device.largest(100, seconds=250.0) == {"error": search.OUT_OF_TIME}
    assert device.sizes == [100, 115, 132], "with no time left nothing begins"


def test_a_size_that_hangs_ends_the_search_with_what_was_found():
    device = Pretended(200, takes_s=1.0, hangs_at=110)
    assert device.largest(100, seconds=60.0) == {"layers": 100}
    assert device.now == 60.0


def test_a_part_of_a_budget_ends_within_it():
    whole = search.Budget(100.0, lambda: 40.0)
    assert (whole.part(0.5).left_s, whole.part(1.0).left_s) == (30.0, 60.0)


def run(code, seconds=20.0):
    return search.in_process([sys.executable, "-c", code], os.environ, seconds)


def test_what_a_process_says_last_is_its_outcome_and_what_ends_it_the_reason():
    assert run("print('x'); print('{\"seconds\": 2}')") == {"seconds": 2}
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == {"error": "ended by SIGKILL"}
    assert run("raise SystemExit('RESOURCE_EXHAUSTED: 9 GB')") == {"error": "RESOURCE_EXHAUSTED: 9 GB"}
    assert run("raise SystemExit(3)") == {"error": "exit status 3"}
    assert run("print('no JSON')") == {"error": "no result"}
    assert run("") == {"error": "no result"}


def test_a_process_that_hangs_ends_in_time_with_all_that_it_started():
    child = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    begun = time.monotonic()
    assert run(child, 1.0) == {"error": search.OUT_OF_TIME}
    assert time.monotonic() - begun < 10


def test_the_benchmark_ends_within_its_minutes_and_prints_what_it_has():
    command = [sys.executable, str(BENCHMARKS / "gpu_offload.py"), "--tiny", "--minutes", "0.06"]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert time.monotonic() - begun < 20
    assert done.returncode == 1, done.stderr
    assert "| nothing | 2 | out of time |" in done.stdout
