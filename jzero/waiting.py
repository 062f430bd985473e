"""Metrics of steps on their way to the host, which never makes the devices wait for it."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np


class Ended(NamedTuple):
    """A step that has ended, with its metrics and the time, in seconds on the clock of `Waiting`."""

    step: int
    metrics: dict[str, float]
    at: float


class Waiting:
    """Metrics on their way to the host.  Those of a step are read when `depth` later steps are dispatched.

    Reading waits for the step to end; by then the devices have work for `depth` steps, so they never wait for the host,
    and the host is never further ahead.  Of steps that are read at once, before a save say, each has its own end: a
    thread waits for it.
    """

    def __init__(self, depth: int, now: Callable[[], float]) -> None:
        """Nothing is on its way.

        Args:
            depth: so many steps are dispatched beyond the one whose metrics are read.
            now: the time, in seconds.
        """
        self._depth, self._now = depth, now
        self._steps: deque[tuple[int, Mapping[str, jax.Array], Future[float]]] = deque()
        self._thread = ThreadPoolExecutor(1, "jzero-steps")

    def put(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Starts the copy of a step's metrics, which may not be computed yet."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._steps.append((step, metrics, self._thread.submit(self._end, metrics)))

    def ready(self) -> Iterator[Ended]:
        """The steps that are `depth` behind, in order."""
        while len(self._steps) > self._depth:
            yield self._read()

    def rest(self) -> Iterator[Ended]:
        """All steps; waits for the last."""
        while self._steps:
            yield self._read()

    def _end(self, metrics: Mapping[str, jax.Array]) -> float:
        jax.block_until_ready(metrics)
        return self._now()

    def _read(self) -> Ended:
        step, metrics, end = self._steps.popleft()
        return Ended(step, {name: np.asarray(value).item() for name, value in metrics.items()}, end.result())
