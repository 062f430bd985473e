"""The update that the step calls: any optax transformation, float32 masters, an average of the weights.

The step runs the optimizer on global arrays, outside of the manual region, so every optax transformation is right at
every stage without knowing of shards.  It calls an `Optimizer`, the smallest interface that lets parameters be held in
another precision than the one in which they are updated.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Optimizer(NamedTuple):
    """How parameters change.

    Attributes:
        init: values as the model makes them -> optimizer state.
        update: (gradients, state, parameters at rest, loss) -> (parameters at rest, state).
        report: state -> scalars to log, by name.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]
    report: Callable[[Any], dict[str, jax.Array]]


class WithMaster(NamedTuple):
    """Optimizer state of parameters that rest in less than float32.

    Attributes:
        master: the parameters in float32; `optax.MaskedNode` where the leaf at rest is its own master.
        inner: the state of the optax transformation, which sees float32 alone.
    """

    master: Any
    inner: Any


def with_master(tx: optax.GradientTransformation, dtypes: Any) -> Optimizer:
    """`tx` as the step calls it, holding a float32 master of every leaf that rests in a narrower dtype.

    Args:
        tx: any optax transformation; those that ask for it get `value` (the loss) and `grad`.
        dtypes: tree of the dtypes at rest.  m, v and master are float32 whatever they are, and whatever the dtype in
            which the model makes its parameters.
    """
    tx = optax.with_extra_args_support(tx)
    narrow = jax.tree.map(lambda dtype: jnp.finfo(dtype).bits < 32, dtypes)

    def updated_in(values: Any) -> Any:
        return jax.tree.map(lambda dtype, x: x.astype(jnp.promote_types(dtype, jnp.float32)), dtypes, values)

    if not any(jax.tree.leaves(narrow)):
        return Optimizer(lambda values: tx.init(updated_in(values)), lambda *args: _apply(tx, *args), learning_rate_of)

    def init(values: Any) -> WithMaster:
        values = updated_in(values)
        return WithMaster(jax.tree.map(lambda n, x: x if n else optax.MaskedNode(), narrow, values), tx.init(values))

    def update(grads: Any, state: WithMaster, params: Any, loss: jax.Array) -> tuple[Any, WithMaster]:
        values = jax.tree.map(lambda n, p, m: m if n else p, narrow, params, state.master)
        values, inner = _apply(tx, grads, state.inner, values, loss)
        master = jax.tree.map(lambda n, x: x if n else optax.MaskedNode(), narrow, values)
        return jax.tree.map(lambda x, p: x.astype(p.dtype), values, params), WithMaster(master, inner)

    return Optimizer(init, update, learning_rate_of)


def _apply(
    tx: optax.GradientTransformationExtraArgs, grads: Any, state: Any, params: Any, loss: jax.Array
) -> tuple[Any, Any]:
    asked = inspect.signature(tx.update).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in asked.values())
    extra = {name: x for name, x in {"value": loss, "grad": grads}.items() if takes_all or name in asked}
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def learning_rate_of(opt_state: Any) -> dict[str, jax.Array]:
    """`lr`, where exactly one scalar of the state is called `learning_rate`; else nothing.

    Those of `jzero.make_optimizer` and of `optax.inject_hyperparams` have one: the rate of the last update.
    """
    found = [x for _, x in optax.tree.get_all_with_path(opt_state, "learning_rate") if jnp.shape(jnp.asarray(x)) == ()]
    return {"lr": jnp.asarray(found[0], jnp.float32)} if len(found) == 1 else {}


class Averaged(NamedTuple):
    """State of `averaged`.

    Attributes:
        updates: int32, how many the average is over.
        average: of the parameters, float32, in the layout of m and v.
        inner: the state of the transformation that trains them.
    """

    updates: jax.Array
    average: Any
    inner: Any


def averaged(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """`tx`, which trains as before, with an exponential moving average of the parameters in its state, in float32.

    average <- d * average + (1 - d) * parameters after the update, from the parameters as they were born, with
    d = min(decay, (1 + k) / (10 + k)) at update k, from 0: early averages do not hang on to where training began (the
    rule of TensorFlow's `ExponentialMovingAverage(num_updates=k)`).  `run.averaged(state)` brings the average to where
    the model reads it.

    Args:
        tx: the whole optimizer; what stands behind `averaged` in a chain would change updates that it has counted.
        decay: above 0, below 1; about 1 - 1 / (updates to remember).

    Raises:
        ValueError: a decay outside of that.
    """
    if not 0 < decay < 1:
        raise ValueError(f"decay={decay!r} of the average must be above 0 and below 1")
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Averaged:
        # A copy, not the array itself: a buffer that is donated twice is an error.
        average = jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32)), params)
        return Averaged(jnp.zeros((), jnp.int32), average, tx.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Averaged]:
        updates, inner = tx.update(updates, state.inner, params, **extra)
        k = state.updates.astype(jnp.float32)
        rest = 1 - jnp.minimum(decay, (1 + k) / (10 + k))
        average = jax.tree.map(
            lambda old, x: old + rest * (x.astype(old.dtype) - old), state.average, optax.apply_updates(params, updates)
        )
        return updates, Averaged(jnp.asarray(optax.safe_increment(state.updates)), average, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def keeps_average(opt_state: Any) -> bool:
    """Whether an optimizer state, abstract or not, holds averaged parameters."""
    return bool(_averages(opt_state))


def average_of(opt_state: Any) -> Any:
    """The averaged parameters that an optimizer state holds.

    Raises:
        ValueError: it holds none, or several.
    """
    found = _averages(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"the optimizer state holds {len(found) or 'no'} averages of the parameters: set it up with "
            f"tx=jzero.averaged(tx, decay), once"
        )
    return found[0]


def _averages(opt_state: Any) -> list[Any]:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Averaged))
    return [node.average for node in nodes if isinstance(node, Averaged)]
