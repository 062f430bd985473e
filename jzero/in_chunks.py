"""Arrays that come piece by piece, as the chunks of a file.

A piece of an array is a contiguous stretch of the shard that a device has, and so is a chunk here, of another length.
So a shard goes by as one stream of elements, of which host memory holds the end of one piece that is not yet a chunk.
A chunk lies in one shard: no two processes write to one, and none is read to be written again.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Start = tuple[int, ...]


def chunk_shape(shape: Sequence[int], shard: Sequence[int], most: int) -> tuple[int, ...]:
    """The shape of chunks, the same all over an array, but for shorter ones at its end.

    Args:
        shape: of the array.
        shard: of the part of a device, which divides it.
        most: elements of a chunk.
    """
    if math.prod(shard) <= most:
        return tuple(shard)
    row = math.prod(shard[1:])
    if row > most:
        return (1, *chunk_shape(shape[1:], shard[1:], most))
    return (_rows(shape[0], shard[0], max(1, most // row)), *shard[1:])


def in_chunks(
    pieces: Iterable[Sequence[np.ndarray]], starts: Sequence[Start], shard: Sequence[int], chunk: Sequence[int]
) -> Iterator[tuple[int, Start, np.ndarray]]:
    """(number of the shard, where the chunk begins in the whole array, chunk), as the pieces come.

    Args:
        pieces: of several shards side by side, in the order of their elements.
        starts: where each shard begins in the whole array.
        shard, chunk: shapes.
    """
    streams = [_Stream(shard, chunk) for _ in starts]
    for boxes in pieces:
        for number, (stream, start, box) in enumerate(zip(streams, starts, boxes, strict=True)):
            for at, part in stream.feed(box.reshape(-1)):
                yield number, tuple(a + b for a, b in zip(start, at, strict=True)), part


class _Stream:
    """Cuts the elements of one shard into chunks, as they come."""

    def __init__(self, shard: Sequence[int], chunk: Sequence[int]) -> None:
        self._boxes = _grid(shard, chunk)
        self._at, self._shape = next(self._boxes)
        self._begun: np.ndarray | None = None  # elements of a chunk, of which the first are there
        self._filled = 0

    def feed(self, flat: np.ndarray) -> Iterator[tuple[Start, np.ndarray]]:
        """The chunks that are complete with these elements; what needs no copy is not copied."""
        while flat.size:
            size = math.prod(self._shape)
            if self._begun is None and flat.size >= size:
                done, flat = flat[:size], flat[size:]
            else:
                self._begun = np.empty(size, flat.dtype) if self._begun is None else self._begun
                taken = min(size - self._filled, flat.size)
                self._begun[self._filled : self._filled + taken] = flat[:taken]
                self._filled, flat = self._filled + taken, flat[taken:]
                if self._filled < size:
                    return
                done = self._begun
            yield self._at, done.reshape(self._shape)
            self._begun, self._filled = None, 0
            self._at, self._shape = next(self._boxes, ((), (0,)))


def _grid(shard: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[Start, tuple[int, ...]]]:
    """(start, shape) of the chunks of a shard, in the order of its elements."""
    counts = [-(-size // step) for size, step in zip(shard, chunk, strict=True)]
    for index in np.ndindex(*counts):
        at = tuple(i * step for i, step in zip(index, chunk, strict=True))
        yield at, tuple(min(step, size - a) for a, step, size in zip(at, chunk, shard, strict=True))


def _rows(rows: int, of_shard: int, most: int) -> int:
    """Rows of a chunk: where the array goes on in another shard, the next chunk begins with it."""
    if rows == of_shard:
        return min(most, rows)
    return next(n for n in range(min(most, of_shard), 0, -1) if of_shard % n == 0)


def bounds(start: Start, x: Any) -> tuple[slice, ...]:
    """Where a box lies in an array."""
    return tuple(slice(first, first + size) for first, size in zip(start, x.shape, strict=True))
