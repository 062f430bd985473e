"""The programs of a step whose optimizer runs in groups; those of one kind of group serve all that are alike.

    gradients         (state without optimizer state, batch) -> gradients, parameters in the update's layout, metrics
    gradients of ...  gradients -> those of a group's pieces (`arriving.py`)
    update ...        (pieces of state, gradients, parameters) -> the same after the update (`updates.py`)
    publish           parameters in the layout of the update -> at rest, where that takes a collective

`gradients` and `publish` are here.
"""

import dataclasses
import functools
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.gradients import Gradients
from jzero.layerwise import norm
from jzero.offload.in_groups import InGroups
from jzero.step import (
    Found,
    TrainState,
    advanced,
    in_update,
    judged,
    logged,
    published,
    summed,
)
from jzero.zero import Path


def gradients_step(
    gradients: Gradients, mesh: Mesh, clip_norm: float, state: TrainState, batch: Any, memory: list[Any]
) -> tuple[TrainState, Found, list[jax.Array], list[Any]]:
    """All of a step that comes before the update.

    Args:
        state: without optimizer state.
        memory: as `Gradients.into` takes it.

    Returns:
        The state after the step, but for parameters and optimizer state; what the batch says of the parameters, its
        gradients as a list, as they were accumulated; of the parameters that are published, the part that is updated
        here; and what of `memory` is free again.
    """
    layouts = gradients.trained_layouts
    given = (state.params, state.frozen, state.model_state, batch)
    grads, sums, model_state, free = summed(gradients, mesh, memory, *given)
    # Layer by layer, be they on the host or not, so that both give the same norm, bit for bit.
    length = norm(grads, layouts, gradients.layers, mesh, sums["weight"])
    found = judged(sums, length, clip_norm, state.model_state, model_state)
    moving = gradients.published
    params: dict[Path, Any] = flatten_dict(state.params)
    shards = unflatten_dict({path: params[path] for path in moving})
    old: dict[Path, Any] = flatten_dict(in_update(gradients, mesh, shards))
    after = advanced(dataclasses.replace(state, params=(), frozen=()), found)
    kept = dataclasses.replace(
        found, grads=[grads[path] for path in layouts], model_state=(), metrics=logged(found, after, {})
    )
    return after, kept, [old[path] for path in moving], free


def publish_step(gradients: Gradients, mesh: Mesh, shards: list[Any], whole: list[Any]) -> list[jax.Array]:  # noqa: ARG001 (whose memory is used again)
    """Parameters that were updated in shards, at rest; in the memory of what they were before."""
    paths = gradients.published
    after: dict[Path, Any] = flatten_dict(
        published(gradients, mesh, unflatten_dict(dict(zip(paths, shards, strict=True))))
    )
    return [after[path] for path in paths]


def gradients_program(
    in_groups: InGroups,
    gradients: Gradients,
    clip_norm: float,
    state: TrainState,
    batch: Any,
    options: dict[str, Any] | None,
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted `gradients_step` and its abstract arguments; `memory` is donated.

    Args:
        state, batch: abstract, with shardings, as programs are given them.
        options: of the compiler.
    """
    rest = NamedSharding(in_groups.mesh, P())
    before = dataclasses.replace(state, opt_state=())
    given = jax.tree.map(lambda x: x.sharding, before)
    places: dict[str, Any] = {"loss": rest, "finite": rest, "metrics": rest, "factors": rest, "model_state": ()}
    accumulated = accumulated_gradients(in_groups, gradients)
    memory = gradients_memory(in_groups, gradients)
    # Absent devices name no memories: the program takes memory where it can be, and leaves it where it put it.
    absent = any(x.sharding.memory_kind is None for part in memory for x in part.values())
    hosted = in_groups.hosted if absent else ()
    grads = [None if path in hosted else accumulated[path].sharding for path in in_groups.layouts]
    found = Found(grads=grads, **places)
    at = [{path: x.sharding for path, x in part.items()} for part in memory]
    program = jax.jit(
        functools.partial(gradients_step, gradients, in_groups.mesh, clip_norm),
        in_shardings=(given, jax.tree.map(lambda x: x.sharding, batch), at),
        out_shardings=(
            dataclasses.replace(given, params=(), frozen=()),
            found,
            [in_groups.sharding(path) for path in in_groups.published],
            None if absent else at[1:],
        ),
        donate_argnums=() if absent else 2,
        keep_unused=True,
        compiler_options=options,
    )
    return program, (before, batch, memory)


def accumulated_gradients(in_groups: InGroups, gradients: Gradients) -> dict[Path, jax.ShapeDtypeStruct]:
    """The gradients that `gradients_step` finds, abstract."""
    return {path: in_groups.accumulated(path, gradients.slots[path].dtype) for path in in_groups.layouts}


def gradients_memory(in_groups: InGroups, gradients: Gradients) -> list[dict[Path, jax.ShapeDtypeStruct]]:
    """The host memory that `Gradients.into` takes, abstract; none where no gradient rests there."""
    found = accumulated_gradients(in_groups, gradients)
    one = {path: found[path] for path in in_groups.hosted}
    return [one] * gradients.memories if one else []


def publish_program(
    in_groups: InGroups, gradients: Gradients, options: dict[str, Any] | None
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted `publish_step` and its abstract arguments."""
    whole = [in_groups.params[path] for path in in_groups.published]
    shards = [in_groups.on_device(path) for path in in_groups.published]
    rest = [x.sharding for x in whole]
    program = jax.jit(
        functools.partial(publish_step, gradients, in_groups.mesh),
        in_shardings=([x.sharding for x in shards], rest),
        out_shardings=rest,
        donate_argnums=1,
        keep_unused=True,
        compiler_options=options,
    )
    return program, (shards, whole)
