"""Gradients on their way from where they were accumulated to the update: a group's pieces, finished as they arrive.

They were accumulated as sums over the batch.  The division by its weight and the clip are done to a piece, and so is
the fetch from the host where they rest there.  The update is the same program either way, and so are its numbers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.layerwise import arrived
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.step import Factors
from jzero.zero import Path

Arrive = Callable[[Mapping[Path, Any], Factors], list[jax.Array]]


def arrival(in_groups: InGroups, group: Sequence[Cut]) -> Arrive:
    """(accumulated gradients, what finishes them) -> those of the group's pieces, on the device.

    A piece is float32, of the mean loss, clipped.  Nothing is donated: of what rests on the host, the next step
    accumulates in the same memory.
    """
    program, starts = _program(in_groups, group), [cut.at for cut in group]
    return lambda grads, factors: program([grads[cut.path] for cut in group], starts, factors)


def arrival_program(
    in_groups: InGroups, group: Sequence[Cut], accumulated: Mapping[Path, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted program of `arrival` for a group and those like it, and its abstract arguments.

    Args:
        accumulated: gradients, abstract.
    """
    scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(in_groups.mesh, P()))
    starts = [jax.ShapeDtypeStruct((len(cut.start),), jnp.int32) for cut in group]
    return _program(in_groups, group), ([accumulated[cut.path] for cut in group], starts, Factors(scalar, scalar))


def _program(in_groups: InGroups, group: Sequence[Cut]) -> Any:
    layouts = [in_groups.layouts[cut.path] for cut in group]
    places = tuple((to.opt_state, to.grads_memory) for to in layouts)
    return _jitted(in_groups.mesh, places, tuple(cut.shape for cut in group))


@functools.lru_cache(maxsize=256)
def _jitted(mesh: Mesh, places: tuple[tuple[P, str | None], ...], shapes: tuple[tuple[int, ...], ...]) -> Any:
    specs = [spec for spec, _ in places]

    def local(grads: list[Any], starts: list[Any], factors: Factors) -> list[jax.Array]:
        pieces = [lax.dynamic_slice(x, tuple(at), shape) for x, at, shape in zip(grads, starts, shapes, strict=True)]
        finished = [arrived(x, memory) for x, (_, memory) in zip(pieces, places, strict=True)]
        return [x / factors.weight * factors.scale for x in finished]

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(), P()), out_specs=specs, check_vma=False)
    return jax.jit(run, out_shardings=[NamedSharding(mesh, spec) for spec in specs])
