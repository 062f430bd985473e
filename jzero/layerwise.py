"""Arithmetic on stacks of layers wherever they rest: a layer at a time on the device, whatever the model's size.

    zeros           per layer: store
    accumulation    per layer: fetch the sum and the new gradient, add, store
    global norm     per layer: fetch, square, add up

Of what rests on the device nothing is fetched.  The order is the same, and so are the numbers, element for element.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.collectives import Fetch, Store, over_tp
from jzero.zero import Layout, Path

Values = Mapping[Path, jax.Array]


def in_its_memory(x: jax.Array, memory: str | None, tp_spec: P) -> jax.Array:
    """`x` in the memory that it rests in, stored there if it is not.

    Arrays of absent devices come to a program as if all were on the device, since only a device that is here names its
    memories.  Inside of the program there are both, and from here on it is the program of devices that have a host.
    """
    if memory is None or jax.typeof(x).memory_space == jax.memory.Space.Host:
        return x
    return over_tp(Store(), tp_spec)(x)


def arrived(x: jax.Array, memory: str | None) -> jax.Array:
    """An accumulated gradient, or a piece of it, as a finished one: float32, in device memory.

    Args:
        memory: in which it was accumulated (`Layout.grads_memory`).
    """
    return (Fetch()(x) if memory else x).astype(jnp.float32)


def zeroed(x: jax.Array, layer_dims: int, tp_spec: P) -> jax.Array:
    """Zeros in the host memory of `x`, [layers.., ..], never more than a layer of them on the device."""

    def zero(x: jax.Array) -> jax.Array:
        shape = (1,) * layer_dims + x.shape[layer_dims:]
        return _each_layer(x, layer_dims, lambda x, at: _put(x, jnp.zeros(shape, x.dtype), at))

    return over_tp(zero, tp_spec)(x)


def added(total: jax.Array, new: jax.Array, layer_dims: int, tp_spec: P) -> jax.Array:
    """total + new in the host memory of `total`, both [layers.., ..] there, a layer of each at a time on the device."""

    def add(total: jax.Array, new: jax.Array) -> jax.Array:
        def of_layer(total: jax.Array, at: Any) -> jax.Array:
            a, b = (Fetch()(_layer(x, layer_dims, at)) for x in (total, new))
            return _put(total, a + b, at)

        return _each_layer(total, layer_dims, of_layer)

    return over_tp(add, tp_spec)(total, new)


def norm(grads: Values, layouts: Mapping[Path, Layout], layers: Mapping[Path, int], mesh: Mesh, weight: Any) -> Any:
    """The global norm of gradients divided by `weight`, float32, a layer at a time on the device.

    Args:
        grads: accumulated over microbatches and devices, in the layout of the optimizer state.
        layers: how many leading dims of each number layers.
    """

    def local(grads: Values, weight: Any) -> jax.Array:
        squares: dict[tuple[str, ...], Any] = {}
        for path, x in grads.items():
            axes = _axes(layouts[path].opt_state)
            squares[axes] = squares.get(axes, 0.0) + _squares(x, layouts[path], layers[path], weight)
        return jnp.sqrt(sum(lax.psum(x, axes) if axes else x for axes, x in squares.items()))

    specs = {path: layouts[path].opt_state for path in grads}
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)(grads, weight)


def _squares(x: jax.Array, layout: Layout, layer_dims: int, weight: Any) -> jax.Array:
    def of_layer(total: jax.Array, at: Any) -> jax.Array:
        grad = arrived(_layer(x, layer_dims, at), layout.grads_memory) / weight
        return total + jnp.sum(jnp.square(grad))

    return _each_layer(jnp.zeros((), jnp.float32), layer_dims, of_layer, x.shape)


def _axes(spec: P) -> tuple[str, ...]:
    return tuple(axis for entry in spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,)))


def _each_layer(
    carry: jax.Array, layer_dims: int, f: Callable[[jax.Array, Any], jax.Array], shape: tuple[int, ...] | None = None
) -> jax.Array:
    """carry = f(carry, the indices of a layer), for one layer of an array of `shape` after the other."""
    sizes = (carry.shape if shape is None else shape)[:layer_dims]

    def body(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return f(carry, jnp.unravel_index(i, sizes)), None

    return lax.scan(body, carry, jnp.arange(math.prod(sizes)))[0] if sizes else f(carry, ())


def _layer(x: jax.Array, layer_dims: int, at: tuple[Any, ...]) -> jax.Array:
    """[layers.., ..] -> [1.., ..]."""
    return lax.dynamic_slice(x, _start(x, at), (1,) * layer_dims + x.shape[layer_dims:])


def _put(x: jax.Array, layer: jax.Array, at: tuple[Any, ...]) -> jax.Array:
    return lax.dynamic_update_slice(x, Store()(layer), _start(x, at))


def _start(x: jax.Array, at: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*at, *(jnp.zeros((), jnp.int32) for _ in range(x.ndim - len(at))))
