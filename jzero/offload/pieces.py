"""An array of the train state that rests in pieces, outside of the device."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import Fetch, Store
from jzero.host_params import HOST
from jzero.offload.groups import Cut


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
        fills: for each piece, the function (shards of this process as host arrays, in the order of `regions`) -> the
            piece at rest.
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


def is_pieces(x: Any) -> bool:
    """Whether a node of a tree is an array in pieces."""
    return isinstance(x, Pieces)


def leaves_of(opt_state: Any) -> list[Any]:
    """The arrays of an optimizer state, in pieces or not, in the order of its leaves."""
    return jax.tree.leaves(opt_state, is_leaf=is_pieces)


@functools.lru_cache(maxsize=64)
def cut_out(mesh: Mesh, spec: P, box: tuple[int, ...]) -> Any:
    """The jitted function (array, start) -> piece: of every device's shard the box of this shape at `start`."""

    def cut(x: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, tuple(start), box)

    return jax.jit(_manual(cut, mesh, (spec, P()), spec))


@functools.lru_cache(maxsize=64)
def paste_in(mesh: Mesh, place: NamedSharding) -> Any:
    """The jitted function (array, piece, start, whether to) -> array with the piece in it; the array is donated.

    Args:
        place: of the array, in whatever memory; the piece is on the device.
    """
    spec, away = place.spec, place.memory_kind == HOST

    def paste(x: jax.Array, piece: jax.Array, start: jax.Array, wanted: jax.Array) -> jax.Array:
        old = lax.dynamic_slice(x, tuple(start), piece.shape)
        new = jnp.where(wanted, piece, Fetch()(old) if away else old)
        return lax.dynamic_update_slice(x, Store()(new) if away else new, tuple(start))

    manual = _manual(paste, mesh, (spec, spec, P(), P()), spec)
    return jax.jit(manual, out_shardings=place, donate_argnums=0)


def piece_shape(whole: jax.ShapeDtypeStruct, cut: Cut) -> tuple[int, ...]:
    """The shape of a piece as a global array: the boxes of all devices side by side."""
    local = whole.sharding.shard_shape(whole.shape)
    return tuple(box * (n // here if here else 1) for box, n, here in zip(cut.shape, whole.shape, local, strict=True))


def regions(whole: jax.ShapeDtypeStruct, cut: Cut) -> Iterator[tuple[tuple[slice, ...], list[Any]]]:
    """(where the box of a shard lies in the whole array, the devices of this process that hold it), each once."""
    found: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in whole.sharding.addressable_devices_indices_map(whole.shape).items():
        firsts = [(part.start or 0) + start for part, start in zip(index or (), cut.start, strict=True)]
        box = tuple((first, first + size) for first, size in zip(firsts, cut.shape, strict=True))
        found.setdefault(box, []).append(device)
    for box, devices in found.items():
        yield tuple(slice(*ends) for ends in box), devices


def first_holders(whole: jax.ShapeDtypeStruct) -> list[bool]:
    """For each region of this process, in the order of `regions`, whether no earlier process holds it, too.

    What is of the whole array, a file say, is made of these of all processes.
    """
    first: dict[tuple[int, ...], int] = {}
    for device, index in whole.sharding.devices_indices_map(whole.shape).items():
        start = _start(index)
        first[start] = min(int(device.process_index or 0), first.get(start, jax.process_count()))
    own = dict.fromkeys(map(_start, whole.sharding.addressable_devices_indices_map(whole.shape).values()))
    return [first[start] == jax.process_index() for start in own]


def _start(index: Any) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index or ())


def _manual(f: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
