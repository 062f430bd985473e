"""Which parts of an optimizer's state are worked on together: the groups that stream through a device.

A group is some whole parameters, or one piece of a large one, with its gradient and all that the optimizer keeps for
it; it is about as large as asked for, whatever the size of the model (DeepSpeed's `sub_group_size`).  A piece is a box
of the shard that a device holds, and its elements lie one after another in the shard.  So every device cuts its own
shard, nothing is sent, and a piece is a contiguous stretch of a file as well.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jzero.zero import Path


@dataclass(frozen=True)
class Cut:
    """A piece of one parameter, on every device the same part of its shard.

    Attributes:
        path: of the parameter.
        start, shape: of the box in the shard of one device.
        whole: it is all of the shard.
    """

    path: Path
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: bool

    @property
    def at(self) -> np.ndarray:
        """Where it begins, as a program is told: int32 [dims]."""
        return np.asarray(self.start, np.int32)

    @property
    def index(self) -> tuple[slice, ...]:
        """The box, of a shard on the host."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


def all_of(shard: Sequence[int], path: Path = ()) -> Cut:
    """All of a shard, as one piece."""
    return Cut(path, (0,) * len(shard), tuple(shard), whole=True)


@dataclass(frozen=True)
class Share:
    """What groups are made of: one parameter's share of what is worked on, on one device.

    Attributes:
        shape: of the shard.
        nbytes: of all that its update takes, on one device.
        divisible: it may be cut.
    """

    shape: tuple[int, ...]
    nbytes: int
    divisible: bool


def grouped(shares: Mapping[Path, Share], group_bytes: int) -> list[tuple[Cut, ...]]:
    """The groups, in the order of the parameters.

    Pieces of one parameter are equal but for the last, so that they share a program.

    Args:
        group_bytes: on one device, at most, but for a parameter that is not divisible.
    """
    groups: list[tuple[Cut, ...]] = []
    gathered: list[Cut] = []
    filled = 0
    for path, share in shares.items():
        fits = share.nbytes <= group_bytes or not share.divisible
        if gathered and (not fits or filled + share.nbytes > group_bytes):
            groups.append(tuple(gathered))
            gathered, filled = [], 0
        if fits:
            gathered.append(all_of(share.shape, path))
            filled += share.nbytes
        else:
            most = max(1, group_bytes * math.prod(share.shape) // share.nbytes)
            groups += [(Cut(path, start, shape, whole=False),) for start, shape in boxes(share.shape, most)]
    return [*groups, tuple(gathered)] if gathered else groups


def boxes(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of boxes that make up an array, in the order of its elements, each of at most `most` elements."""
    shape, size = tuple(shape), math.prod(shape)
    if size <= most:
        yield (0,) * len(shape), shape
        return
    row = size // shape[0]
    if row > most:
        for i in range(shape[0]):
            yield from (((i, *start), (1, *box)) for start, box in boxes(shape[1:], most))
        return
    rows = math.ceil(shape[0] / math.ceil(shape[0] / (most // row)))
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])
