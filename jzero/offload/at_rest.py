"""What rests outside of the device, as host arrays: for checkpoints, and for whoever wants one array whole.

Nothing here goes through device memory, and nothing is kept: host memory holds one piece at a time.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jzero.host_params import HOST
from jzero.offload.files import Stored, from_device
from jzero.offload.groups import Cut
from jzero.offload.on_cpu import from_chunks
from jzero.offload.piece import Piece
from jzero.offload.pieces import AbstractPieces, Pieces
from jzero.offload.tiers import of_kind, to_host


def rests_on_host(x: Any) -> bool:
    """Whether an array, abstract or not, is in pieces or in pinned host memory."""
    if isinstance(x, Pieces | AbstractPieces):
        return True
    return getattr(x.sharding, "memory_kind", None) == HOST


def in_pieces(x: Any) -> Any:
    """An array that rests on the host as `Pieces`, an abstract one as `AbstractPieces`: a whole one is one piece."""
    if isinstance(x, Pieces | AbstractPieces):
        return x
    piece = Piece.all_of(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))
    if isinstance(x, jax.Array):
        return Pieces(piece.whole, [piece.cut], [x])
    return AbstractPieces(piece.whole, [piece.cut], [functools.partial(to_host, piece)])


def as_wanted(x: Any, target: AbstractPieces) -> Any:
    """`Pieces` as `target` is: an array where that is one."""
    return x if isinstance(target, AbstractPieces) else x.parts[0]


def shards_of(piece: Piece, part: Any) -> list[np.ndarray]:
    """The shards of a piece at rest; only to be read.

    Raises:
        ValueError: what is in files was overwritten.
        TierError: it cannot be read.
    """
    if isinstance(part, Stored):
        part.check()
        return part.tier.read(part.place)
    return from_device(piece, _uncached(part)) if isinstance(part, jax.Array) else from_chunks(piece, part)


def read(pieces: Pieces) -> Iterator[tuple[Cut, list[np.ndarray]]]:
    """Each piece and its shards, one after the other.

    Raises:
        ValueError: what is in files was overwritten.
        TierError: it cannot be read.
    """
    for piece, part in zip(pieces.each, pieces.parts, strict=True):
        yield piece.cut, shards_of(piece, part)


def empty(target: AbstractPieces) -> Pieces:
    """An array without elements, at rest.

    Raises:
        TierError: it cannot be written.
    """
    parts = [
        fill([np.zeros(piece.cut.shape, target.dtype) for _ in piece.regions])
        for piece, fill in zip(target.each, target.fills, strict=True)
    ]
    return Pieces(target.whole, target.cuts, parts)


def on_device(x: Any) -> jax.Array:
    """An array that rests elsewhere, whole and on the device; another as it is.

    Raises:
        ValueError: what is in files was overwritten.
        TierError: it cannot be read.
    """
    if not isinstance(x, Pieces):
        return jax.device_put(x, of_kind(x.sharding, "device")) if rests_on_host(x) else x
    whole = Piece.all_of(x.whole)
    shards = [np.empty(whole.cut.shape, x.dtype) for _ in whole.regions]
    for cut, boxes in read(x):
        for shard, box in zip(shards, boxes, strict=True):
            shard[cut.index] = box
    return whole.from_shards(shards)


def _uncached(x: jax.Array) -> jax.Array:
    """The same buffers in another array: an array keeps the host copy that it was once asked for."""
    return jax.make_array_from_single_device_arrays(
        x.shape,
        x.sharding,
        [
            jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
            for shard in x.addressable_shards
        ],
    )
