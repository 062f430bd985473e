"""What rests outside of the device, as host arrays: for checkpoints, and for whoever wants one array whole.

Nothing here goes through device memory, and nothing is kept: host memory holds one piece at a time.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jzero.host_params import HOST
from jzero.offload.files import Place, Stored, from_device
from jzero.offload.groups import Cut, all_of
from jzero.offload.on_cpu import from_chunks
from jzero.offload.pieces import AbstractPieces, Pieces, regions
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
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    cut = all_of(x.sharding.shard_shape(x.shape))
    if isinstance(x, jax.Array):
        return Pieces(whole, [cut], [x])
    return AbstractPieces(whole, [cut], [lambda shards: to_host(whole, cut, shards)])


def as_wanted(x: Any, target: AbstractPieces) -> Any:
    """`Pieces` as `target` is: an array where that is one."""
    return x if isinstance(target, AbstractPieces) else x.parts[0]


def shards_of(whole: jax.ShapeDtypeStruct, cut: Cut, part: Any) -> list[np.ndarray]:
    """A piece at rest: the distinct shards of this process, in the order of `regions`; only to be read.

    Raises:
        ValueError: what is in files was overwritten.
        TierError: it cannot be read.
    """
    if isinstance(part, Stored):
        part.check()
        return part.tier.read(part.place)
    place = Place(whole, cut, ())
    if isinstance(part, jax.Array):
        return from_device(place, _uncached(part))
    return from_chunks(place, part)


def read(pieces: Pieces) -> Iterator[tuple[Cut, list[np.ndarray]]]:
    """Each piece and its shards, one after the other."""
    for cut, part in zip(pieces.cuts, pieces.parts, strict=True):
        yield cut, shards_of(pieces.whole, cut, part)


def empty(target: AbstractPieces) -> Pieces:
    """An array without elements, at rest."""
    parts = [
        fill([np.zeros(cut.shape, target.dtype) for _ in regions(target.whole, cut)])
        for cut, fill in zip(target.cuts, target.fills, strict=True)
    ]
    return Pieces(target.whole, target.cuts, parts)


def on_device(x: Any) -> jax.Array:
    """An array that rests elsewhere, whole and on the device; another as it is."""
    if not isinstance(x, Pieces):
        return jax.device_put(x, of_kind(x.sharding, "device")) if rests_on_host(x) else x
    shape = x.sharding.shard_shape(x.shape)
    places = list(regions(x.whole, all_of(shape)))
    shards = [np.empty(shape, x.dtype) for _ in places]
    for cut, boxes in read(x):
        at = tuple(slice(start, start + size) for start, size in zip(cut.start, cut.shape, strict=True))
        for shard, box in zip(shards, boxes, strict=True):
            shard[at] = box
    arrays = [
        jax.device_put(shard, device) for shard, (_, devices) in zip(shards, places, strict=True) for device in devices
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


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
