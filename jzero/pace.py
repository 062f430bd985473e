"""How many programs may be under way at a time on CPU devices.

The devices of one process share its threads, and in a collective each thread waits for those of the other devices.  Of
a few programs under way all can run; when hundreds of steps are dispatched and nothing is read, the threads fill with
programs that wait for devices that no thread is left for, and XLA ends the process after a minute.  Accelerators have
queues of their own.

Between processes there is one program at a time: of two under way that reduce over the same devices, each may get
the numbers of the other, since XLA:CPU keeps only those programs in order that run on several devices of a process.
"""

from collections import deque
from typing import Any

import jax
from jax.sharding import Mesh

IN_FLIGHT = 2  # programs beyond the one that is waited for


def in_turn(result: Any) -> Any:
    """What a program with collectives returns; on CPU devices of several processes, when it has ended."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(result)
    return result


class Pace:
    """Waits, on a mesh of several CPU devices, until all programs but the last few have ended."""

    def __init__(self, mesh: Mesh) -> None:
        """A pace for the programs of one mesh."""
        self._waits = mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._under_way: deque[Any] = deque()

    def dispatched(self, result: Any) -> None:
        """Takes in what a program that was just dispatched returns, arrays that nobody donates."""
        if self._waits:
            in_turn(result)
            self._under_way.append(result)
            while len(self._under_way) > IN_FLIGHT:
                jax.block_until_ready(self._under_way.popleft())
