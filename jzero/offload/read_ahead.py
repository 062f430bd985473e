"""Reads that are begun before they are asked for, in the order in which they were asked for the last time."""

import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np

from jzero.block_files import aligned


class Pending(Protocol):
    """A read that was begun."""

    def result(self) -> Any:
        """What was read, when it is there."""
        ...

    def drop(self) -> None:
        """Nobody asks for it any more."""
        ...


class ReadAhead:
    """The reads of one reader, who asks in an order that repeats, as the layers of a step do.

    What comes after a key depends on the key before it, too: at the end of the forward pass, layer N - 1 after N - 2 is
    followed by N - 1 again, and in the backward pass N - 2 after N - 1 by N - 3.  So nobody has to say what a step is.
    """

    def __init__(self, begin: Callable[[Hashable], Pending], depth: int) -> None:
        """Nothing is known yet: the first time, each read begins when it is asked for.

        Args:
            begin: begins to read what a key names.
            depth: how many reads are begun before they are asked for.
        """
        self._begin, self._depth = begin, depth
        self._next: dict[tuple[Hashable, Hashable], Hashable] = {}
        self._last: tuple[Hashable, Hashable] = (None, None)
        self._coming: deque[tuple[Hashable, Pending]] = deque()
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> Any:
        """What `key` names, read ahead or now."""
        with self._lock:
            pending = self._found(key)
            self._next[self._last] = key
            self._last = (self._last[1], key)
            self._top_up()
        return pending.result()

    def forget(self) -> None:
        """Lets go of what was read ahead: it is about to be written.  What comes next begins anew."""
        with self._lock:
            self._drop()
            self._last = (None, None)

    def _found(self, key: Hashable) -> Pending:
        for i, (coming, pending) in enumerate(self._coming):
            if coming == key:
                del self._coming[i]
                return pending
        self._drop()  # another order than the last time
        return self._begin(key)

    def _drop(self) -> None:
        while self._coming:
            self._coming.popleft()[1].drop()

    def _top_up(self) -> None:
        pair, there = self._last, Counter(key for key, _ in self._coming)
        for _ in range(self._depth):
            key = self._next.get(pair)
            if key is None:
                return
            if there[key]:
                there[key] -= 1
            else:
                self._coming.append((key, self._begin(key)))
            pair = (pair[1], key)


class Buffers:
    """Aligned memory for what is read, used again when nobody holds it any more.  Threads share it.

    Memory comes back wherever the collector of garbage runs, in a thread that asks for some, too: so there is no lock.
    """

    def __init__(self) -> None:
        """None yet."""
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)

    def take(self, nbytes: int) -> np.ndarray:
        """So many bytes."""
        try:
            return self._free[nbytes].pop()
        except IndexError:
            return aligned(nbytes)

    def lent(self, buffer: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """A buffer as an array, with which its memory comes back: nobody may keep a view of it for longer.

        JAX (0.10 to 0.12) holds what a call of the host returns, the object itself, until it is copied.
        """
        array = buffer.view(dtype).reshape(shape)
        weakref.finalize(array, self.returned, buffer).atexit = False
        return array

    def returned(self, buffer: np.ndarray) -> None:
        """A buffer that nobody holds any more."""
        self._free[buffer.nbytes].append(buffer)
