"""The largest size that trains, found by tries within a time that is given, each try a process of its own.

A try says what it measured, or under "error" why it did not train.  Nothing here knows what is tried, so a test may
pretend a memory (`tests/test_gpu_offload.py`).
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Outcome = dict[str, Any]
OUT_OF_TIME = "out of time"
_LEAST_S = 1.0  # with less left no try begins
_STEP = 0.15  # how far to go up or down while nothing on that side is known


@dataclass(frozen=True)
class Budget:
    """Time until `ends`, as `clock` counts it in seconds."""

    ends: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        """What is left; negative when it is over."""
        return self.ends - self.clock()

    def part(self, share: float) -> "Budget":
        """A share, between 0 and 1, of what is left."""
        return Budget(self.clock() + share * self.left_s, self.clock)


def largest(
    attempt: Callable[[int, float], Outcome], guess: int, budget: Budget, tries: int = 4, closeness: float = 0.05
) -> Outcome:
    """The outcome of the largest size that trained, or of the last one that did not where none has.

    From the guess up until one fails, or down until one trains, then halving what is between.

    Args:
        attempt: (size, seconds that it may take) -> outcome.
        guess: at least 1.
        tries: at most.
        closeness: ends when the next larger size known to fail is so close, as a part.
    """
    fits, fails, best, last = 0, 0, Outcome(), Outcome(error=OUT_OF_TIME)
    size = guess
    for _ in range(tries):
        if budget.left_s <= _LEAST_S:
            break
        last = attempt(size, budget.left_s)
        if last.get("error") == OUT_OF_TIME:
            break
        if "error" in last:
            fails = size
        else:
            fits, best = size, last
        size = _next(fits, fails)
        if size in (fits, fails) or (fits and fails and fails - fits <= closeness * fits):
            break
    return best or last


def _next(fits: int, fails: int) -> int:
    """Which size to try; one of the two where none is left.  0: none is known."""
    if not fails:
        return fits + max(1, round(_STEP * fits))
    if not fits:  # the further off, the longer the steps: the guess may be far too large
        return max(1, fails - max(1, round(2 * _STEP * fails)))
    return (fits + fails) // 2


def in_process(command: Sequence[str], env: Mapping[str, str], seconds: float) -> Outcome:
    """What a process prints as JSON on its last line; it and all that it started are ended when the time is over."""
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return {"error": OUT_OF_TIME}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    if process.returncode < 0:
        return {"error": f"ended by {signal.Signals(-process.returncode).name}"}
    if process.returncode:
        return {"error": (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1][:120]}
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": "no result"}
