"""Optimizers: the update that the step calls, float32 masters, and the named optax chains.

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

from jzero.zero import Path

SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw",)


class Optimizer(NamedTuple):
    """How parameters change.

    Attributes:
        init: values as the model makes them -> optimizer state.
        update: (gradients, state, parameters at rest, loss) -> (parameters at rest, state).
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]


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
        return Optimizer(lambda values: tx.init(updated_in(values)), lambda *args: _apply(tx, *args))

    def init(values: Any) -> WithMaster:
        values = updated_in(values)
        return WithMaster(jax.tree.map(lambda n, x: x if n else optax.MaskedNode(), narrow, values), tx.init(values))

    def update(grads: Any, state: WithMaster, params: Any, loss: jax.Array) -> tuple[Any, WithMaster]:
        values = jax.tree.map(lambda n, p, m: m if n else p, narrow, params, state.master)
        values, inner = _apply(tx, grads, state.inner, values, loss)
        master = jax.tree.map(lambda n, x: x if n else optax.MaskedNode(), narrow, values)
        return jax.tree.map(lambda x, p: x.astype(p.dtype), values, params), WithMaster(master, inner)

    return Optimizer(init, update)


def _apply(
    tx: optax.GradientTransformationExtraArgs, grads: Any, state: Any, params: Any, loss: jax.Array
) -> tuple[Any, Any]:
    asked = inspect.signature(tx.update).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in asked.values())
    extra = {name: x for name, x in {"value": loss, "grad": grads}.items() if takes_all or name in asked}
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def make_schedule(kind: str, lr: float, warmup_steps: int, steps: int, min_lr_ratio: float = 0.1) -> optax.Schedule:
    """Linear warm-up to the peak `lr`, then decay to `lr * min_lr_ratio`; step k, from 0, uses `schedule(k)`.

    Warm-up: `lr * (k + 1) / warmup_steps`, so the first step already moves and the last of the warm-up is at the peak.
    Decay: from the peak at step `warmup_steps` to the minimum at step `steps`, one after the last; there it stays.
    A warm-up that takes all steps ends at the peak and stays there.

    Args:
        kind: of decay: "constant" (none), "linear", or "cosine" (Loshchilov and Hutter 2017, equation 5, one period).
        steps: optimizer steps of the whole run, warm-up included.

    Raises:
        ValueError: an unknown kind, or a warm-up that is negative or longer than the run.
    """
    if not 0 <= warmup_steps <= steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be between 0 and steps={steps}")
    decay_steps = steps - warmup_steps
    kinds = {
        "constant": lambda: optax.constant_schedule(lr),
        "linear": lambda: optax.linear_schedule(lr, lr * min_lr_ratio, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(lr, decay_steps, alpha=min_lr_ratio),
    }
    if kind not in kinds:
        raise ValueError(f"schedule {kind!r} is not one of {', '.join(SCHEDULES)}")
    decay = kinds[kind if decay_steps else "constant"]()
    if warmup_steps == 0:
        return decay
    warmup = optax.linear_schedule(lr / warmup_steps, lr, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [warmup_steps])


def make_optimizer(
    name: str,
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    layer_dims: Callable[[Path], int] = lambda _: 0,
) -> optax.GradientTransformation:
    """The named optax chain; weight decay on matrices alone.

    Args:
        layer_dims: how many leading dims of the leaf at a path number layers; stacking layers does not turn a norm's
            scale into a matrix.

    Raises:
        ValueError: an unknown name.
    """
    if name != "adamw":
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}")

    def is_matrix(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x.ndim - layer_dims(tuple(k.key for k in path)) >= 2, params
        )

    return optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=is_matrix)
