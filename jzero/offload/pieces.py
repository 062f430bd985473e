"""An array of the train state that rests in pieces, outside of the device."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero.offload.groups import Cut
from jzero.offload.piece import Piece


@jax.tree_util.register_pytree_with_keys_class
class Pieces:
    """One array of the train state in the pieces in which it streams through the device.

    Attributes:
        whole: shape, dtype and sharding of the array that the pieces make up.
        cuts: where each piece lies in the shard of a device.
        parts: the pieces at rest, in the same order: arrays, or handles of what is in files.
    """

    def __init__(self, whole: jax.ShapeDtypeStruct, cuts: Sequence[Cut], parts: Sequence[Any]) -> None:
        """Takes the pieces as they are."""
        self.whole, self.cuts, self.parts = whole, tuple(cuts), tuple(parts)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children: the pieces."""
        keyed = [(jax.tree_util.SequenceKey(i), part) for i, part in enumerate(self.parts)]
        return keyed, (self.whole, self.cuts)

    @classmethod
    def tree_unflatten(cls, static: Any, parts: Sequence[Any]) -> Self:
        """The same with other pieces."""
        whole, cuts = static
        return cls(whole, cuts, parts)

    def __repr__(self) -> str:
        """Shape, dtype and number of pieces."""
        return f"Pieces({self.whole.shape}, {self.whole.dtype}, {len(self.parts)} pieces)"

    @property
    def each(self) -> list[Piece]:
        """Where the parts lie."""
        return [Piece(self.whole, cut) for cut in self.cuts]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return self.whole.shape

    @property
    def dtype(self) -> Any:
        """Of the whole array."""
        return self.whole.dtype

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return self.whole.size

    @property
    def sharding(self) -> NamedSharding:
        """Of the whole array."""
        return self.whole.sharding


class AbstractPieces(jax.ShapeDtypeStruct):
    """An array that is to rest in pieces, abstract: whole to whoever asks for shape, dtype or sharding.

    Attributes:
        cuts: as of `Pieces`.
        fills: for each piece, the function (its shards, on the host) -> the piece at rest.
    """

    __slots__ = ("cuts", "fills")

    def __init__(
        self, whole: jax.ShapeDtypeStruct, cuts: Sequence[Cut], fills: Sequence[Callable[[Sequence[np.ndarray]], Any]]
    ) -> None:
        """Of an array that is known, abstract."""
        super().__init__(whole.shape, whole.dtype, sharding=whole.sharding)
        self.cuts, self.fills = tuple(cuts), tuple(fills)

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """The array alone."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def each(self) -> list[Piece]:
        """Where the parts are to lie."""
        return [Piece(self.whole, cut) for cut in self.cuts]


def is_pieces(x: Any) -> bool:
    """Whether a node of a tree is an array in pieces."""
    return isinstance(x, Pieces)


def leaves_of(opt_state: Any) -> list[Any]:
    """The arrays of an optimizer state, in pieces or not, in the order of its leaves."""
    return jax.tree.leaves(opt_state, is_leaf=is_pieces)
