"""Checksums of arrays that do not depend on how the arrays are sharded.

A checksum is the sum, modulo 2^32, of a mixed word per element, and the word depends on the element's bits and its
place in the whole array.  Sums of integers are exact in any order, so an array has one checksum on every mesh: it is
written beside an array that eight devices saved, and holds on the three that read it.  Mixing is murmur3's finalizer
(Appleby 2011): each flipped bit changes the word, and exchanged elements change the sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # of 8 bytes become two words
_GOLDEN = np.uint32(0x9E3779B9)
_MIX = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))


@jax.jit
def checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """uint32 of each array; one pass over its memory, on the devices that hold it."""
    return {name: _checksum(x) for name, x in leaves.items()}


def _checksum(x: jax.Array) -> jax.Array:
    words = _words(x)
    place, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return jnp.sum(_mixed(_mixed(words) + place * _GOLDEN), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32, those of 8 bytes as two in a new last dim."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    for shift, factor in zip((16, 13), _MIX, strict=True):
        x = (x ^ (x >> np.uint32(shift))) * factor
    return x ^ (x >> np.uint32(16))
