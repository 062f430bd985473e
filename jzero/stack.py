"""Stacked layers, run one after the other: `scan_layers`, which any model may call.

It takes an NNX module apart into arrays for `prefetch.py`, where the neighbour layer's parameters and gradients are
under way while a layer computes, and falls back to `nnx.scan` outside of a run.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.prefetch import prefetched
from jzero.pullback import ByKey, Layer, at
from jzero.reads import UnsupportedModelError
from jzero.use import AtRest, Move, at_rest, holding, remat_policy, value_of
from jzero.zero import Path, path_name

Carry = TypeVar("Carry")

UNSTACKED = {nnx.PARTITION_NAME: None}  # the layer dim is never a sharded one


def scan_layers(
    block: Callable[..., Carry],
    layers: nnx.Module,
    x: Carry,
    *broadcast: Any,
    layers_ahead: int = 1,
    remat: str = "none",
) -> Carry:
    """`x` through a stack of layers: `x = block(layer, x, *broadcast)` for one after the other.

    In a ZeRO run the neighbour layer's parameters and gradients are under way while a layer computes.  Everywhere else,
    and with `layers_ahead=0`, it is `nnx.scan` over `nnx.remat`, with the same values.

    Args:
        block: one layer's computation.
        layers: a module whose arrays all have a leading layer dim, as `nnx.vmap` makes it.  What a layer changes beside
            its parameters (random counters, statistics) changes in place.
        x: tree of floating arrays, of the same shapes after every layer.
        broadcast: arrays, or trees of them, that every layer is given.
        layers_ahead: how many layers ahead parameters are gathered; each costs one layer of memory.
        remat: what a layer keeps for its backward pass, as for `remat_policy`.

    Raises:
        ValueError: a negative `layers_ahead`, another word for `remat`, arrays that disagree on the number of layers.
        TypeError: an array of `x` that is not floating.
        UnsupportedModelError: a layer that adds state to itself.
    """
    if layers_ahead < 0:
        raise ValueError(f"layers_ahead={layers_ahead}: must be at least 0")
    policy = remat_policy(remat)
    _check_carry(x)
    graphdef, state = nnx.split(layers)
    leaves = dict(nnx.to_flat_state(state))
    moves, depth = _moves(leaves), _depth(leaves)
    given_leaves, tree = jax.tree.flatten(broadcast)
    shared = {i: leaf for i, leaf in enumerate(given_leaves) if isinstance(leaf, jax.Array)}

    def run(weights: ByKey, others: ByKey, x: Carry, shared: ByKey) -> tuple[Carry, dict[Path, Any]]:
        layer = _merged(graphdef, leaves, {**weights, **others})
        x = block(layer, x, *jax.tree.unflatten(tree, [shared.get(i, leaf) for i, leaf in enumerate(given_leaves)]))
        return x, _after(layer, leaves, others)

    ahead = min(layers_ahead, depth - 1)
    if not ahead or not moves:
        return _plain_scan(block, layers, x, broadcast, policy)
    rest = {path: value_of(leaves[path]) for path in moves}
    others = {path: _array(leaf) for path, leaf in leaves.items() if at_rest(leaf) is None}
    run, closed_over = _closed(Layer(run, moves, policy), rest, others, x, shared)
    x, after = prefetched(Layer(run, moves, policy), depth, ahead)(rest, others, x, shared | closed_over)
    nnx.update(layers, nnx.from_flat_state([(path, holding(leaves[path], new)) for path, new in after.items()]))
    return x


def _plain_scan(
    block: Callable[..., Carry], layers: nnx.Module, x: Carry, broadcast: tuple[Any, ...], policy: Any
) -> Carry:
    # Inside a scan nothing can be shared between forward and backward bodies, so the barrier against it is idle.
    run = nnx.remat(block, policy=policy, prevent_cse=False)
    axes = (0, nnx.Carry, *(None for _ in broadcast))
    return nnx.scan(run, in_axes=axes, out_axes=nnx.Carry, transform_metadata=UNSTACKED)(layers, x, *broadcast)


def _closed(
    layer: Layer, rest: Mapping[Path, AtRest], others: ByKey, x: Any, shared: ByKey
) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """`layer.run` with the differentiated arrays that the block closes over among its shared ones, and these arrays."""

    def arguments() -> tuple[Any, ...]:
        return layer.bring(frozenset(layer.moves), rest, 0), at(others, 0), x, shared

    converted, arrays = jax.closure_convert(layer.run, *jax.eval_shape(arguments))
    closed_over = {f"closed over {i}": array for i, array in enumerate(arrays)}

    def closed(weights: ByKey, others: ByKey, x: Any, shared: ByKey) -> Any:
        given = {key: array for key, array in shared.items() if key not in closed_over}
        return converted(weights, others, x, given, *(shared[key] for key in closed_over))

    return (closed, closed_over) if closed_over else (layer.run, {})


def _moves(leaves: ByKey) -> dict[Path, Move]:
    """The moves of the parameters that come into use layer by layer.

    There are none where a model is only looked at, nor for a stack of stacks, whose parameters the inner one reads.
    A parameter that no layer reads stays at rest.
    """
    found = {path: move for path, leaf in leaves.items() if (move := at_rest(leaf)) is not None}
    moves = {path: move for path, move in found.items() if isinstance(move, Move) and move.layer_dims <= 1}
    if len(moves) < len(found):
        return {}
    return {path: move for path, move in moves.items() if move.layer_dims}


def _merged(graphdef: Any, leaves: ByKey, values: ByKey) -> nnx.Module:
    """One layer; what has no value is not read."""
    parts = {path: _of_layer(leaf, values[path]) if path in values else leaf for path, leaf in leaves.items()}
    return nnx.merge(graphdef, nnx.from_flat_state(parts.items()))


def _of_layer(leaf: Any, value: Any) -> Any:
    """A leaf of the stack with one layer's value, and without the layer dim in its annotation."""
    leaf = holding(leaf, value)
    if isinstance(leaf, nnx.Variable) and leaf.get_metadata("out_sharding", None):
        leaf.set_metadata(out_sharding=tuple(leaf.get_metadata("out_sharding"))[1:])
    return leaf


def _after(layer: nnx.Module, leaves: ByKey, others: ByKey) -> dict[Path, Any]:
    """What a layer holds beside parameters when it has run."""
    after = dict(nnx.to_flat_state(nnx.state(layer)))
    if added := after.keys() - leaves.keys():
        raise UnsupportedModelError(
            f"a layer adds {path_name(min(added, key=str))!r} to itself while it runs: give it a place in the layer "
            f"from the start, hand it on through the layer's output, or take layers_ahead=0"
        )
    return {path: _array(after[path]) for path in others}


def _array(leaf: Any) -> Any:
    """The array that a leaf holds; of a parameter at rest its value."""
    raw = value_of(leaf)
    return raw.value if isinstance(raw, AtRest) else raw


def _depth(leaves: ByKey) -> int:
    shapes = {path: jnp.shape(_array(leaf)) for path, leaf in leaves.items()}
    if not shapes:
        raise ValueError("layers hold no array, so their number is unknown")
    first, wanted = next(iter(shapes.items()))
    for path, shape in shapes.items():
        if not shape or shape[:1] != wanted[:1]:
            raise ValueError(
                f"{path_name(path)!r} of shape {shape} and {path_name(first)!r} of shape {wanted} do not have the same "
                f"number of layers as first dim: stack layers with nnx.vmap"
            )
    return wanted[0]


def _check_carry(x: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"x{jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}: what goes from layer to layer must be "
                f"floating; what is the same for all of them can be broadcast"
            )
