"""Optimizers: the update that the step calls, float32 masters, and the named optax chains.

The step runs the optimizer on global arrays, outside of the manual region, so every optax transformation is right at
every stage without knowing of shards.  It calls an `Optimizer`, the smallest interface that lets parameters be held in
another precision than the one in which they are updated.
"""

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
        init: values in the precision they are updated in -> optimizer state.
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


def optimizer(tx: optax.GradientTransformation, dtypes: Any) -> Optimizer:
    """`tx` as the step calls it, holding a float32 master of every leaf that rests in a narrower dtype.

    Args:
        tx: any optax transformation; those that ask for it get `value` (the loss) and `grad`.
        dtypes: tree of the dtypes at rest.  m, v and master are float32 whatever they are.
    """
    tx = optax.with_extra_args_support(tx)
    narrow = jax.tree.map(lambda dtype: jnp.finfo(dtype).bits < 32, dtypes)
    if not any(jax.tree.leaves(narrow)):
        return Optimizer(tx.init, lambda *args: _apply(tx, *args))

    def init(values: Any) -> WithMaster:
        values = jax.tree.map(lambda n, x: x.astype(jnp.float32) if n else x, narrow, values)
        return WithMaster(jax.tree.map(lambda n, x: x if n else optax.MaskedNode(), narrow, values), tx.init(values))

    def update(grads: Any, state: WithMaster, params: Any, loss: jax.Array) -> tuple[Any, WithMaster]:
        values = jax.tree.map(lambda n, p, m: m if n else p, narrow, params, state.master)
        values, inner = _apply(tx, grads, state.inner, values, loss)
        master = jax.tree.map(lambda n, x: x if n else optax.MaskedNode(), narrow, values)
        return jax.tree.map(lambda x, p: x.astype(p.dtype), values, params), WithMaster(master, inner)

    return Optimizer(init, update)


def _apply(tx: optax.GradientTransformationExtraArgs, grads: Any, state: Any, params: Any, loss: jax.Array) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params, value=loss, grad=grads)
    return optax.apply_updates(params, updates), state


def make_schedule(kind: str, lr: float, warmup_steps: int, steps: int, min_lr_ratio: float = 0.1) -> optax.Schedule:
    """Learning rate over optimizer steps: linear warm-up from 0 to `lr`, then `kind` down to `lr * min_lr_ratio`.

    Step k uses `schedule(k)`, k from 0; past `steps` the last value holds.

    Raises:
        ValueError: an unknown kind.
    """
    rest = max(steps - warmup_steps, 1)
    kinds = {
        "constant": lambda: optax.constant_schedule(lr),
        "linear": lambda: optax.linear_schedule(lr, lr * min_lr_ratio, rest),
        "cosine": lambda: optax.cosine_decay_schedule(lr, rest, alpha=min_lr_ratio),
    }
    if kind not in kinds:
        raise ValueError(f"schedule {kind!r} is not one of {', '.join(SCHEDULES)}")
    if warmup_steps == 0:
        return kinds[kind]()
    warmup = optax.linear_schedule(lr / warmup_steps, lr, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, kinds[kind]()], [warmup_steps])


def make_optimizer(
    name: str,
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    layer_dims: Callable[[Path], int] = lambda path: 0,
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
