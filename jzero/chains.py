"""The named optimizers, as chains of optax: direction, weight decay, learning rate.

What is a matrix is asked of the parameters *per layer*, as a layer reads them: stacking layers does not turn the scale
of a norm into a matrix, nor the matrices of a stack into a tensor of rank 3.  So a model whose layers are stacked and
the same model with a list of layers train alike, under every optimizer here.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jzero.recipes import EMBEDDING_AND_HEAD, RECIPES, Setting, settings_of
from jzero.schedules import by_learning_rate
from jzero.zero import path_name

_MUON_RMS = 0.2  # of an update; AdamW's are about as large (Liu et al. 2025, section 2.2)


def make_optimizer(
    name: str,
    schedule: float | optax.Schedule,
    per_layer: Any = None,
    *,
    plateau: optax.GradientTransformation | None = None,
    **settings: Setting | None,
) -> optax.GradientTransformationExtraArgs:
    """The named optimizer; its state is float32 where parameters are, and holds the learning rate it used.

    Weights decay decoupled from the gradient and times the learning rate, whatever the optimizer, and only `matrices`.

    Args:
        name: of `recipes.RECIPES`.
        schedule: number of earlier updates -> learning rate, or one for all.
        per_layer: the parameters as layers read them, as `jzero.setup` hands them to a `tx` that is a function; without
            it no parameter is stacked.
        plateau: lowers the learning rate further: `optax.contrib.reduce_on_plateau(…)`, which is given the loss.
        settings: by name, over the recipe's; None leaves the recipe's.

    Raises:
        ValueError: an unknown name, a setting that the optimizer does not take, or a pattern of `adamw_leaves`, other
            than the default ones, that matches no parameter.
    """
    if name not in RECIPES:
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(RECIPES)}")
    taken: dict[str, Any] = settings_of(name, settings)
    weight_decay = taken.pop("weight_decay")
    return optax.chain(
        _DIRECTIONS[name](per_layer, **taken),
        optax.add_decayed_weights(weight_decay, matrices if per_layer is None else matrices(per_layer)),
        by_learning_rate(schedule, plateau),
    )


def matrices(per_layer: Any) -> Any:
    """Which parameters are matrices, or of higher rank, in the layer that reads them: a tree of bool.

    Args:
        per_layer: tree of anything with a rank, layer dims left out.
    """
    return jax.tree.map(lambda x: x.ndim >= 2, per_layer)


def hidden_matrices(per_layer: Any, adamw_leaves: Sequence[str] = EMBEDDING_AND_HEAD) -> Any:
    """Which parameters Muon orthogonalises: matrices of rank 2 whose path matches no pattern; a tree of bool.

    Args:
        per_layer: tree of anything with a rank, layer dims left out.
        adamw_leaves: shell-style patterns over paths (``"*embed*"``) of what AdamW trains instead.

    Raises:
        ValueError: a pattern, other than the default ones, matches no parameter.
    """
    names = jax.tree_util.tree_map_with_path(lambda path, _: path_name(k.key for k in path), per_layer)
    left = set[str]()
    for pattern in adamw_leaves:
        found = [name for name in jax.tree.leaves(names) if fnmatch.fnmatchcase(name, pattern)]
        if not found and pattern not in EMBEDDING_AND_HEAD:
            some = ", ".join(jax.tree.leaves(names)[:8])
            raise ValueError(f"adamw_leaves: no parameter matches {pattern!r}; there are {some} …")
        left.update(found)
    return jax.tree.map(lambda x, name: x.ndim == 2 and name not in left, per_layer, names)


def in_each_layer(tx: optax.GradientTransformation, per_layer: Any) -> optax.GradientTransformation:
    """`tx` on each layer of a stack, and on each parameter, by itself.

    For transformations that ask something of a whole tensor, such as its root mean square or its largest dims, which
    must not mix layers.

    Args:
        per_layer: the parameters as layers read them.
    """

    def stacked(function: Callable[..., Any], layer_dims: int) -> Callable[..., Any]:
        for _ in range(layer_dims):
            function = jax.vmap(function)
        return function

    def init(params: Any) -> Any:
        return jax.tree.map(lambda one, x: stacked(tx.init, x.ndim - one.ndim)(x), per_layer, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        pairs = jax.tree.map(
            lambda one, u, s, x: stacked(tx.update, x.ndim - one.ndim)(u, s, x), per_layer, updates, state, params
        )
        return tuple(jax.tree.map(lambda _, pair, i=i: pair[i], per_layer, pairs) for i in (0, 1))  # pyright: ignore[reportReturnType]

    return optax.GradientTransformation(init, update)


def _adamw(per_layer: Any, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    del per_layer
    return optax.scale_by_adam(b1, b2, eps)


def _lion(per_layer: Any, b1: float, b2: float) -> optax.GradientTransformation:
    del per_layer
    return optax.scale_by_lion(b1, b2)


def _sgd(per_layer: Any, momentum: float, nesterov: bool) -> optax.GradientTransformation:  # noqa: FBT001 (by name alone)
    del per_layer
    return optax.trace(momentum, nesterov) if momentum else optax.identity()


def _adafactor(per_layer: Any, eps: float) -> optax.GradientTransformation:
    core = optax.chain(
        optax.scale_by_factored_rms(epsilon=eps), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
    )
    return core if per_layer is None else in_each_layer(core, per_layer)


def _muon(
    per_layer: Any,
    momentum: float,
    nesterov: bool,  # noqa: FBT001 (by name alone)
    b1: float,
    b2: float,
    eps: float,
    adamw_leaves: Sequence[str],
) -> optax.GradientTransformation:
    def labels(per_layer: Any) -> Any:
        is_hidden = hidden_matrices(per_layer, adamw_leaves)
        return jax.tree.map(lambda hidden: "muon" if hidden else "adamw", is_hidden)

    def last_two(updates: Any) -> Any:  # the dims in front of a matrix number layers
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    orthogonal = optax.contrib.scale_by_muon(
        beta=momentum, eps=eps, nesterov=nesterov, weight_dimension_numbers=last_two
    )
    sized = optax.stateless_with_tree_map(lambda u, _: _MUON_RMS * max(jnp.shape(u)[-2:]) ** 0.5 * u)
    transforms: Mapping[Any, Any] = {
        "muon": optax.chain(orthogonal, sized),
        "adamw": optax.scale_by_adam(b1, b2, eps),
    }
    return optax.partition(transforms, labels if per_layer is None else labels(per_layer))


_DIRECTIONS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
    "muon": _muon,
}
