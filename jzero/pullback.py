"""One layer of a stack, run so that it can be differentiated later, by somebody else.

`jax.vjp` gives a pullback: a function that is a pytree of arrays, those that a rematerialisation policy kept.  To hand
it from a forward loop to a backward loop, its arrays are saved, layer by layer, but for those that are the layer's own
arguments: these are at hand in the backward loop, or are brought into use again, as gathered weights are, whatever the
policy says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.use import AtRest, Move
from jzero.zero import Path

ByKey = Mapping[Any, Any]  # arrays by path; what all layers share, by position


@dataclass(frozen=True)
class Layer:
    """One layer as a function of arrays.

    Attributes:
        run: (weights in use, other arrays of the layer, x, what all layers share) -> (x, other arrays after it).
        moves: how each weight comes into use, and its gradient to rest.
        policy: what of `run` is kept for its backward pass.
    """

    run: Callable[[ByKey, ByKey, Any, ByKey], tuple[Any, dict[Path, Any]]]
    moves: Mapping[Path, Move]
    policy: Callable[..., Any]

    @property
    def gathered(self) -> frozenset[Path]:
        """The weights whose way into use takes traffic."""
        return frozenset(path for path, move in self.moves.items() if move.forward.moves)

    @property
    def local(self) -> frozenset[Path]:
        """The other weights."""
        return frozenset(self.moves) - self.gathered

    def bring(self, paths: frozenset[Path], rest: Mapping[Path, AtRest], i: Any) -> dict[Path, jax.Array]:
        """Weights of layer i, from rest into use; through their slots, as a loss may have gradients in it.

        Args:
            rest: of all layers, [depth, ...].
        """
        return {path: self.moves[path](at(rest[path], i)) for path in rest if path in paths}


def at(tree: Any, i: Any) -> Any:
    """Layer i of stacked arrays, [depth, ...] -> [...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


class Wanted(NamedTuple):
    """What of a layer's arguments gradients are wanted of."""

    weights: frozenset[Path]
    others: frozenset[Path]
    shared: frozenset[int]


@dataclass(frozen=True)
class Pullback:
    """How the pullback of a layer is put together again.

    Attributes:
        tree: of the pullback.
        sources: of each of its arrays: None for one that was saved, else (number of the argument, key) of what it is.
    """

    tree: Any
    sources: tuple[tuple[int, Any] | None, ...]

    @property
    def weights(self) -> frozenset[Path]:
        """The weights that it needs and that were not saved."""
        return frozenset(source[1] for source in self.sources if source is not None and source[0] == 0)

    def __call__(self, saved: Sequence[jax.Array], *arguments: ByKey) -> Callable[[Any], Any]:
        """Cotangents of (x, floating others after it) -> those of what was wanted.

        Args:
            arguments: weights, others, shared.
        """
        rest = iter(saved)
        leaves = [next(rest) if source is None else arguments[source[0]][source[1]] for source in self.sources]
        return jax.tree.unflatten(self.tree, leaves)


def run_and_pull(
    layer: Layer, wanted: Wanted, weights: ByKey, others: ByKey, x: Any, shared: ByKey, *, in_loop: bool
) -> tuple[Any, dict[Path, Any], list[jax.Array], Pullback]:
    """One layer, and what its way back takes: (x, others after it, arrays to save, pullback)."""

    def run(some_weights: ByKey, some_others: ByKey, x: Any, some_shared: ByKey) -> Any:
        x, after = layer.run({**weights, **some_weights}, {**others, **some_others}, x, {**shared, **some_shared})
        floating = {path: array for path, array in after.items() if is_floating(array)}
        return (x, floating), after

    # Between loops, forward and backward share nothing.  Beside them they could, and would keep more than asked for.
    run = jax.checkpoint(run, policy=layer.policy, prevent_cse=not in_loop)
    of_weights, of_others, of_shared = map(chosen, (weights, others, shared), wanted)
    (x, _), pull, after = jax.vjp(run, of_weights, of_others, x, of_shared, has_aux=True)
    leaves, tree = jax.tree.flatten(pull)
    again = {path: weight for path, weight in weights.items() if not layer.moves[path].keep}
    places = {
        id(array): (number, key)
        for number, arguments in enumerate((again, others, shared))
        for key, array in arguments.items()
    }
    sources = tuple(places.get(id(leaf)) for leaf in leaves)
    saved = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
    return x, after, saved, Pullback(tree, sources)


def is_floating(x: Any) -> bool:
    """Whether there are gradients of an array."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def chosen(values: ByKey, keys: frozenset[Any]) -> dict[Any, Any]:
    """Those of `values` that stand under `keys`."""
    return {key: value for key, value in values.items() if key in keys}
