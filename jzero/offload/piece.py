"""A piece of an array of the train state: on every device the same part of its shard."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import Fetch, Store
from jzero.host_params import HOST
from jzero.offload.groups import Cut, all_of


@dataclass(frozen=True)
class Piece:
    """One piece of one array of the train state.

    As a global array it is the boxes of all devices side by side.  On the host it is its shards: the distinct boxes of
    this process, in the order of `regions`.

    Attributes:
        whole: the array, abstract, with its sharding.
        cut: where the piece lies in the shard of a device.
    """

    whole: jax.ShapeDtypeStruct
    cut: Cut

    @staticmethod
    def all_of(whole: jax.ShapeDtypeStruct) -> "Piece":
        """An array as one piece."""
        return Piece(whole, all_of(whole.sharding.shard_shape(whole.shape)))

    @property
    def dtype(self) -> np.dtype:
        """Of the array."""
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the piece as a global array."""
        shard = self.whole.sharding.shard_shape(self.whole.shape)
        sizes = zip(self.cut.shape, self.whole.shape, shard, strict=True)
        return tuple(box * (n // here if here else 1) for box, n, here in sizes)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """The piece as a global array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.whole.sharding)

    @property
    def shard_bytes(self) -> int:
        """Of one shard."""
        return math.prod(self.cut.shape) * self.dtype.itemsize

    def box(self, memory: np.ndarray) -> np.ndarray:
        """A shard, of its bytes."""
        return memory.view(self.dtype).reshape(self.cut.shape)

    @property
    def regions(self) -> list[tuple[tuple[slice, ...], list[Any]]]:
        """(where a box lies in the whole array, the devices of this process that hold it), each box once."""
        found: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in self.whole.sharding.addressable_devices_indices_map(self.whole.shape).items():
            firsts = [(part.start or 0) + start for part, start in zip(index or (), self.cut.start, strict=True)]
            box = tuple((first, first + size) for first, size in zip(firsts, self.cut.shape, strict=True))
            found.setdefault(box, []).append(device)
        return [(tuple(slice(*ends) for ends in box), devices) for box, devices in found.items()]

    def shards_of(self, x: jax.Array) -> list[jax.Array]:
        """The shards of the piece `x`, each from the first device that holds it."""
        held = {shard.device: shard.data for shard in x.addressable_shards}
        return [held[devices[0]] for _, devices in self.regions]

    def from_shards(
        self,
        shards: Sequence[np.ndarray],
        put: Callable[[np.ndarray, Any], jax.Array] = jax.device_put,
        sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """The piece as a global array, from its shards.

        Args:
            put: (shard, device) -> an array there.
            sharding: of the result, where `put` takes it to another memory than that of the array.
        """
        held = zip(shards, self.regions, strict=True)
        arrays = [put(shard, device) for shard, (_, devices) in held for device in devices]
        place = sharding or self.whole.sharding
        return jax.make_array_from_single_device_arrays(self.shape, place, arrays)

    def cut_from(self, x: jax.Array, at: Any) -> jax.Array:
        """The piece of `x` that begins at `at` in each shard."""
        sharding = self.whole.sharding
        return x if self.cut.whole else cut_out(sharding.mesh, sharding.spec, self.cut.shape)(x, at)


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


def first_holders(whole: jax.ShapeDtypeStruct) -> list[bool]:
    """For each region of this process, in the order of `Piece.regions`, whether no earlier process holds it, too.

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
