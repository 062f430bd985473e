"""Reads that are begun before they are asked for, in the order in which they were asked for the last time."""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol


class Pending(Protocol):
    """A read that was begun."""

    def result(self) -> Any:
        """What was read, when it is there."""
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
        """Lets go of what was read ahead: it is about to be written."""
        with self._lock:
            self._coming.clear()

    def ahead(self, size: Callable[[Any], int]) -> int:
        """The size of all that was read ahead."""
        with self._lock:
            return sum(size(pending.result()) for _, pending in self._coming)

    def _found(self, key: Hashable) -> Pending:
        for i, (coming, pending) in enumerate(self._coming):
            if coming == key:
                del self._coming[i]
                return pending
        if len(self._coming) >= self._depth:
            self._coming.popleft()  # nobody asked for it
        return self._begin(key)

    def _top_up(self) -> None:
        pair = self._last
        for number in range(self._depth):
            key = self._next.get(pair)
            if key is None:
                return
            if number >= len(self._coming):
                self._coming.append((key, self._begin(key)))
            pair = (pair[1], key)
