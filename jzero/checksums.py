"""Checksums of arrays that do not depend on how the arrays are sharded.

A checksum is the sum, modulo 2^32, of a mixed word per element, and the word depends on the element's bits and its
place in the whole array.  Sums of integers are exact in any order, so an array has one checksum on every mesh: it is
written beside an array that eight devices saved, and holds on the three that read it.  Mixing is murmur3's finalizer
(Appleby 2011): each flipped bit changes the word, and exchanged elements change the sum.

Every device goes through its own shard a piece at a time.  A backend that does not fuse the mixing into the sum (CPU)
would otherwise make the mixed words of all arrays first: the whole state once more.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_PIECE = 2**17  # elements
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # of 8 bytes become two words
_GOLDEN = np.uint32(0x9E3779B9)
_MIX = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))


def checksums(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """uint32 of each array; one pass over its memory, on the devices that hold it.

    Args:
        leaves: by name, all on one mesh or all on one device.
    """
    shardings = {name: _named(x.sharding) for name, x in leaves.items()}
    if not leaves:
        return {}
    (mesh,) = {sharding.mesh for sharding in shardings.values()}
    specs = tuple((name, sharding.spec, leaves[name].shape) for name, sharding in shardings.items())
    return _over(mesh, specs)(dict(leaves))


def of_box(x: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """What a box of an array adds to the array's checksum; computed on the host, in its pass over the box.

    Args:
        x: the box.
        start: where in the array it begins, and shape: of the array.
    """
    strides = _strides(x.dtype, shape)
    place = sum(first * stride for first, stride in zip(start, strides, strict=True))
    (device, *_) = jax.local_devices(backend="cpu")
    return int(_of_box(tuple(strides))(jax.device_put(x, device), _word(place)))


@functools.lru_cache(maxsize=256)  # shapes of arrays
def _of_box(strides: tuple[int, ...]) -> Any:
    return jax.jit(lambda x, start: _in_pieces(x, start, list(strides)))


def total(parts: Iterable[int]) -> int:
    """The checksum of an array from what its boxes add to it."""
    return sum(parts) % 2**32


@functools.lru_cache(maxsize=8)  # runs of one process
def _over(mesh: Mesh, specs: tuple[tuple[str, P, tuple[int, ...]], ...]) -> Any:
    """Checksums of arrays that lie on a mesh: the jitted function."""

    def local(shards: dict[str, jax.Array]) -> dict[str, jax.Array]:
        sums = jnp.stack([_of_shard(shards[name], spec, shape, mesh) for name, spec, shape in specs])
        sums = lax.psum(sums, tuple(mesh.axis_names))
        return {name: sums[i] for i, (name, *_) in enumerate(specs)}

    in_specs = {name: spec for name, spec, _ in specs}
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=P(), check_vma=False))


def _of_shard(x: jax.Array, spec: P, shape: tuple[int, ...], mesh: Mesh) -> jax.Array:
    """What the shard of this device contributes; where shards are copies, the first does."""
    strides = _strides(x.dtype, shape)
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
    starts = [
        lax.axis_index(entry).astype(jnp.uint32) * _word(size) * _word(stride)
        for entry, size, stride in zip(spec, x.shape, strides, strict=False)
        if entry
    ]
    copied = [axis for axis in mesh.axis_names if axis not in {name for entry in axes for name in entry}]
    first = lax.axis_index(tuple(copied)) == 0 if copied else True
    return jnp.where(first, _in_pieces(x, sum(starts, np.uint32(0)), strides), np.uint32(0))


def _strides(dtype: Any, shape: Sequence[int]) -> list[int]:
    """Words from one index of each dim to the next."""
    words = max(1, dtype.itemsize // 4)
    return [words * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _in_pieces(x: jax.Array, start: Any, strides: list[int]) -> jax.Array:
    """The sum over an array whose first element has the place `start` and whose dims have these strides."""
    if x.size <= _PIECE:
        return _sum(x, start, strides)
    rows, row = x.shape[0], x.size // x.shape[0]
    at_once = max(1, _PIECE // row)

    def piece(i: Any, total: Any) -> Any:
        at = start + i.astype(jnp.uint32) * _word(at_once * strides[0])
        part = lax.dynamic_slice_in_dim(x, i * at_once, at_once)
        return total + (_in_pieces(part[0], at, strides[1:]) if row > _PIECE else _sum(part, at, strides))

    whole = rows // at_once
    total = lax.fori_loop(0, whole, piece, jnp.uint32(0))
    if rest := rows % at_once:
        total += _sum(x[-rest:], start + _word(whole * at_once * strides[0]), strides)
    return total


def _sum(x: jax.Array, start: Any, strides: list[int]) -> jax.Array:
    words = _words(x)
    place = jnp.full(words.shape, start, jnp.uint32)
    for dim, stride in enumerate([*strides, 1][: words.ndim]):
        place += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * _word(stride)
    return jnp.sum(_mixed(_mixed(words) + place * _GOLDEN), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32, those of more than 4 bytes as several in a new last dim."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = lax.bitcast_convert_type(jnp.stack([x.real, x.imag], -1), jnp.uint32)
        return parts.reshape(*x.shape, -1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    elif (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype).bits < 8:
        x = x.astype(jnp.float32)  # exact: fewer than 8 bits are fewer than float32 has
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    for shift, factor in zip((16, 13), _MIX, strict=True):
        x = (x ^ (x >> np.uint32(shift))) * factor
    return x ^ (x >> np.uint32(16))


def _word(x: int) -> np.uint32:
    return np.uint32(x % 2**32)


def _named(sharding: jax.sharding.Sharding) -> NamedSharding:
    if isinstance(sharding, NamedSharding):
        return sharding
    (device,) = sharding.device_set
    return NamedSharding(Mesh(np.asarray([device]), ("device",)), P())
