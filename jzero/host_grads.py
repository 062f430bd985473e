"""Gradients that rest in host memory: each layer's goes there as the backward pass makes it, and comes back in pieces.

What takes a gradient to where it is accumulated ends with a store, so the loop over layers that makes gradients also
brings them away, one layer's at a time; the slots that they land in, and the sums over microbatches, are host memory
that the program is handed and hands back.  Whatever follows reads them as they were written:

    accumulation    per layer: fetch the sum and the new gradient, add, store
    global norm     per layer: fetch, square, add up
    the update      per group: fetch the piece, divide by the weight, clip

so at most two layers' gradients are on the device, whatever the model's size, and the arithmetic is that of gradients
on the device, element for element.

A sum over devices that is formed after accumulation (stages 0 and 1, hybrid sharding) needs whole stacks on the
device, and is refused.  ZeRO-Offload (Ren et al. 2021, section 4) keeps gradients on the host at stages 1 and 2.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.collectives import Fetch, Identity, Store, Then, over_tp
from jzero.host_params import HOST, layer_bytes
from jzero.placement import MIN_PARAM_BYTES
from jzero.zero import Layout, Leaf, Path, ShardingError

Values = Mapping[Path, jax.Array]


def grads_on_host(
    layouts: Mapping[Path, Layout], leaves: Iterable[Leaf], at_least_bytes: int = MIN_PARAM_BYTES
) -> dict[Path, Layout]:
    """`layouts`, of which the gradients of large leaves are accumulated in host memory.

    Args:
        leaves: the trained ones of `layouts`.
        at_least_bytes: of one layer of a leaf, unsharded; 0 takes every leaf.

    Raises:
        ShardingError: a large leaf's gradient is summed over devices after accumulation, which takes all of its layers
            on the device; or no leaf is large enough.
    """
    sizes = {leaf.path: (leaf.name, layer_bytes(leaf)) for leaf in leaves}
    chosen = {path: name for path, (name, size) in sizes.items() if size >= at_least_bytes}
    if not chosen:
        raise ShardingError(
            f"offload.grads host: no trained parameter has {at_least_bytes:,} bytes in a layer, the largest has "
            f"{max((size for _, size in sizes.values()), default=0):,}, so all gradients would stay on the device; "
            f"leave offload.grads at none"
        )
    for path, name in chosen.items():
        if layouts[path].finish.moves:
            raise ShardingError(
                f"offload.grads host: the gradient of {name!r} ({sizes[path][1]:,} bytes in a layer) is summed over "
                f"devices after accumulation, all layers on the device; take stage 2 or 3 with zero.axes over all "
                f"data-parallel axes, or offload.min_param_bytes above that if the parameter must stay whole"
            )
    return {path: landing_on_host(to) if path in chosen else to for path, to in layouts.items()}


def landing_on_host(layout: Layout) -> Layout:
    """The same specs, with the gradient in host memory; what finishes it is done to pieces (`arrived`)."""
    use_backward = Then(layout.use_backward, Store())
    return replace(layout, grads_memory=HOST, use_backward=use_backward, finish=Identity())


def arrived(x: jax.Array, memory: str | None) -> jax.Array:
    """An accumulated gradient, or a piece of it, as a finished one: float32, in device memory.

    Args:
        memory: in which it was accumulated (`Layout.grads_memory`).
    """
    return (Fetch()(x) if memory else x).astype(jnp.float32)


# ---- layer by layer -------------------------------------------------------------------------------------------------


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
