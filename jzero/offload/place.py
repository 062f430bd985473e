"""Where a piece rests in files: in equal blocks, one or several for each of its shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jzero.offload.piece import Piece


@dataclass(frozen=True)
class Place:
    """The blocks of one piece.

    Attributes:
        piece: which one.
        blocks: names, of each of its shards one after the other.
        per_shard: how many equal blocks a shard is in, one after the other.
    """

    piece: Piece
    blocks: tuple[str, ...]
    per_shard: int = 1

    @property
    def shards(self) -> int:
        """How many there are."""
        return len(self.blocks) // self.per_shard

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return self.piece.shard_bytes // self.per_shard

    def each(self, shards: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """(name, bytes) of each block, of shards in memory, contiguous."""
        names = iter(self.blocks)
        for shard in shards:
            parts = shard.reshape(-1).view(np.uint8).reshape(self.per_shard, self.block_bytes)
            yield from ((next(names), part) for part in parts)
