"""The course of the learning rate, and the transformation that applies it and says what it was."""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.recipes import ScheduleName


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
    kinds: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(lr),
        "linear": lambda: optax.linear_schedule(lr, lr * min_lr_ratio, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(lr, decay_steps, alpha=min_lr_ratio),
    }
    if kind not in kinds:
        raise ValueError(f"schedule {kind!r} is not one of {', '.join(get_args(ScheduleName))}")
    decay = kinds[kind if decay_steps else "constant"]()
    if warmup_steps == 0:
        return decay
    warmup = optax.linear_schedule(lr / warmup_steps, lr, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [warmup_steps])


class LearningRate(NamedTuple):
    """State of `by_learning_rate`.

    Attributes:
        updates: int32, how many there were.
        learning_rate: float32, of the last of them; of the first one before that.
        plateau: of the transformation that lowers it.
    """

    updates: jax.Array
    learning_rate: jax.Array
    plateau: Any


def by_learning_rate(
    schedule: float | optax.Schedule, plateau: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    """Takes updates times the learning rate off the parameters, and keeps that rate in its state.

    Args:
        schedule: number of earlier updates -> learning rate, or one for all.
        plateau: lowers it further, from the losses it sees: `optax.contrib.reduce_on_plateau(…)`.
    """
    factor = optax.with_extra_args_support(plateau or optax.identity())
    one = np.float32(1)  # what `factor` scales instead of the updates, so that the scale is known

    def rate(count: jax.Array) -> jax.Array:
        return jnp.asarray(schedule(count) if callable(schedule) else schedule, jnp.float32)

    def init(params: Any) -> LearningRate:
        del params
        count = jnp.zeros((), jnp.int32)
        return LearningRate(count, rate(count), factor.init(one))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LearningRate]:
        del params
        scale, plateau = factor.update(one, state.plateau, **extra)
        lr = rate(state.updates) * jnp.asarray(scale)
        updates = jax.tree.map(lambda u: -lr.astype(u.dtype) * u, updates)
        return updates, LearningRate(jnp.asarray(optax.safe_increment(state.updates)), lr, plateau)

    return optax.GradientTransformationExtraArgs(init, update)
