"""Where pieces of the train state rest between two steps, and how they come to the update and go back.

A tier is asked to `fetch` pieces, which begins, and returns a function to call for the arrays when the update needs
them; and to `store` what the update returned, which begins, and returns the pieces at rest with a function that waits
until nothing of it is under way.  So the stream (`stream.py`) can have one group on its way in and one on its way out
while a third is worked on, whatever the tier.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jzero.host_params import HOST
from jzero.offload.piece import Piece

Arrived = Callable[[], list[Any]]
Left = Callable[[], None]


class Tier(Protocol):
    """Where pieces rest."""

    name: str

    def fetch(self, group: int, parts: Sequence[Any]) -> Arrived:
        """Begins to bring the pieces of a group to the update.

        Raises:
            ValueError: what is in files was overwritten.
            TierError: it cannot be read; the returned function raises it, too.
        """
        ...

    def store(self, group: int, arrays: Sequence[Any]) -> tuple[list[Any], Left]:
        """Begins to bring what the update returned to rest.

        Raises:
            TierError: it cannot be written; the returned function raises it, too.
        """
        ...

    def fill(self, group: int, number: int, piece: Piece, shards: Sequence[np.ndarray]) -> Any:
        """A piece at rest, from a checkpoint.

        Args:
            group, number: which piece of which group.
            shards: of the piece, on the host.

        Raises:
            TierError: it cannot be written.
        """
        ...


Make = Callable[[Piece, Sequence[np.ndarray]], Any]  # (which piece, its shards) -> the piece


class Stays:
    """Pieces rest where they are updated: nothing moves."""

    def __init__(self, name: str, make: Make) -> None:
        """The tier that this is: "device", or "host" for an update on the CPU.

        Args:
            make: a piece, as the update takes it.
        """
        self.name, self._make = name, make

    def fetch(self, group: int, parts: Sequence[Any]) -> Arrived:  # noqa: ARG002 (the same for all groups)
        """The pieces themselves."""
        return lambda: list(parts)

    def store(self, group: int, arrays: Sequence[Any]) -> tuple[list[Any], Left]:  # noqa: ARG002
        """The arrays themselves."""
        return list(arrays), lambda: None

    def fill(self, group: int, number: int, piece: Piece, shards: Sequence[np.ndarray]) -> Any:  # noqa: ARG002
        """As it is made for the update."""
        return self._make(piece, shards)


class InHostMemory:
    """Pieces rest in pinned host memory, from which a device copies by itself."""

    name = "host"

    def fetch(self, group: int, parts: Sequence[Any]) -> Arrived:  # noqa: ARG002 (the same for all groups)
        """Copies to the device; the pieces are used up, else host memory would hold the old and the new state."""
        arrays = [jax.device_put(part, of_kind(part.sharding, "device")) for part in parts]
        for part in parts:
            part.delete()  # once it is copied; JAX donates nothing from one kind of memory to another
        return lambda: arrays

    def store(self, group: int, arrays: Sequence[Any]) -> tuple[list[Any], Left]:  # noqa: ARG002
        """Copies to the host."""
        parts = [jax.device_put(x, of_kind(x.sharding, HOST)) for x in arrays]

        def wait() -> None:
            jax.block_until_ready(parts)

        return parts, wait

    def fill(self, group: int, number: int, piece: Piece, shards: Sequence[np.ndarray]) -> Any:  # noqa: ARG002
        """From host memory to host memory."""
        return to_host(piece, shards)


def to_host(piece: Piece, shards: Sequence[np.ndarray]) -> jax.Array:
    """A piece in pinned host memory, from its shards."""

    def put(shard: np.ndarray, device: Any) -> jax.Array:
        return jax.device_put(shard, SingleDeviceSharding(device, memory_kind=HOST))

    return piece.from_shards(shards, put, of_kind(piece.whole.sharding, HOST))


def of_kind(sharding: Any, memory_kind: str) -> NamedSharding:
    """The same sharding in another memory."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=memory_kind)
