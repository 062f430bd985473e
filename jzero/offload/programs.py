"""The programs of a step whose optimizer runs in groups.

    gradients    (state without optimizer state, batch) -> gradients, parameters in the layout of the update, metrics
    update ...   (pieces of state, gradients, parameters) -> the same after the update: one program for each kind of
                 group, whatever the place of the piece
    publish      parameters in the layout of the update -> at rest, where that takes a collective

An update of pieces runs on each device by itself, on the part of its shard, since a piece is only made of what the
optimizer takes element by element.  What it takes as a whole is a group of whole parameters, on global arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import Fetch, Store
from jzero.gradients import Gradients
from jzero.host_params import HOST
from jzero.layerwise import norm
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.piece import Piece
from jzero.step import (
    Factors,
    Found,
    TrainState,
    advanced,
    in_update,
    judged,
    logged,
    published,
    summed,
    updated,
)
from jzero.zero import Path, path_name

Kind = tuple[tuple[Path, tuple[int, ...]], ...]  # (parameter, box of its shard), of each piece in a group


@dataclass(frozen=True)
class Update:
    """The update of one kind of group, to be jitted: pieces of parameters, of gradients and of optimizer state.

    Attributes:
        groups: the optimizer.
        kind: the parameters of the group, and the shape of the piece of each.
    """

    groups: InGroups
    kind: Kind

    def __call__(
        self, grads: list[Any], old: list[Any], state: list[list[Any]], shared: list[Any], loss: Any, finite: Any
    ) -> tuple[list[Any], list[list[Any]], list[Any], dict[str, Any]]:
        """(new pieces of parameters, of state, state that is of no parameter, scalars to log).

        What is not in the group is zero here; since nothing in the group comes of it, it is never made.
        """
        groups, paths = self.groups, [path for path, _ in self.kind]
        params = {path: jnp.zeros(x.shape, x.dtype) for path, x in groups.params.items()}
        grads_of = {path: jnp.zeros(x.shape, jnp.float32) for path, x in params.items()}
        params |= dict(zip(paths, old, strict=True))
        grads_of |= dict(zip(paths, grads, strict=True))
        leaves, treedef = jax.tree.flatten(groups.opt_state)
        given = dict(zip(groups.numbers(None), shared, strict=True))
        for path, own in zip(paths, state, strict=True):
            given |= dict(zip(groups.numbers(path), own, strict=True))
        opt_state = treedef.unflatten(
            [given[i] if i in given else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)]
        )
        found = Found(None, None, loss, finite, {}, Factors(loss, loss))
        new, opt_state, report = updated(
            groups.optimizer, found, unflatten_dict(grads_of), opt_state, unflatten_dict(params)
        )
        new, after = flatten_dict(new), jax.tree.leaves(opt_state)
        state = [[after[i] for i in groups.numbers(path)] for path in paths]
        return [new[path] for path in paths], state, [after[i] for i in groups.numbers(None)], report


def kind_of(cuts: Sequence[Cut]) -> Kind:
    """What two groups that share a program have in common."""
    return tuple((cut.path, cut.shape) for cut in cuts)


def update_program(groups: InGroups, kind: Kind, options: dict[str, Any] | None) -> Any:
    """The jitted update of one kind of group, on the devices of the run.

    (gradients, parameters, pieces of state, state of no parameter, starts, loss, finite) -> (parameters with the new
    pieces, new pieces of state, state of no parameter, scalars to log).  Parameters are whole arrays in the
    layout of the update, `starts` says where in each shard the pieces lie; of those that rest in files, and of
    gradients (`arriving.py`), there are the pieces alone.  Parameters and pieces of state are donated.
    """
    update, paths = Update(groups, kind), [path for path, _ in kind]
    # As the sharding says, not the layout: absent devices have no memory beside their own, and all is there.
    elsewhere = [groups.updating(path).memory_kind == HOST for path in paths]
    state_shardings = [[leaf.sharding for leaf in groups.leaves(path)] for path in paths]
    rest = NamedSharding(groups.mesh, P())
    places = ([groups.updating(path) for path in paths], state_shardings, rest, rest)

    def pieces(arrays: list[Any], starts: Any) -> list[Any]:
        shapes = [shape for _, shape in kind]
        return [lax.dynamic_slice(x, tuple(at), shape) for x, at, shape in zip(arrays, starts, shapes, strict=True)]

    # A parameter in files is here as its piece, which begins where it begins.
    alone = [groups.layouts[path].in_files for path in paths]

    def within(starts: list[Any]) -> list[Any]:
        return [jnp.zeros_like(at) if piece else at for at, piece in zip(starts, alone, strict=True)]

    def local(grads: Any, old: Any, state: Any, shared: Any, starts: Any, loss: Any, finite: Any) -> Any:
        starts = within(starts)
        of_old = [Fetch()(x) if away else x for x, away in zip(pieces(old, starts), elsewhere, strict=True)]
        new, state, shared, report = update(grads, of_old, state, shared, loss, finite)
        new = [Store()(x) if away else x for x, away in zip(new, elsewhere, strict=True)]
        old = [lax.dynamic_update_slice(x, part, tuple(at)) for x, part, at in zip(old, new, starts, strict=True)]
        return old, state, shared, report

    def whole(grads: Any, old: Any, state: Any, shared: Any, starts: Any, loss: Any, finite: Any) -> Any:  # noqa: ARG001
        old = [Fetch()(x) if away else x for x, away in zip(old, elsewhere, strict=True)]
        return update(grads, old, state, shared, loss, finite)

    if groups.placewise.issuperset(paths):
        specs = [groups.spec(path) for path in paths]
        state_specs = jax.tree.map(lambda sharding: sharding.spec, state_shardings)
        in_specs = (specs, specs, state_specs, P(), P(), P(), P())
        run = jax.shard_map(
            local, mesh=groups.mesh, in_specs=in_specs, out_specs=(specs, state_specs, P(), P()), check_vma=False
        )
    else:
        run = whole
    return jax.jit(run, out_shardings=places, donate_argnums=(1, 2), compiler_options=options)


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
    moving = [path for path, to in layouts.items() if to.publish.moves]
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
    paths = [path for path, to in gradients.trained_layouts.items() if to.publish.moves]
    after: dict[Path, Any] = flatten_dict(
        published(gradients, mesh, unflatten_dict(dict(zip(paths, shards, strict=True))))
    )
    return [after[path] for path in paths]


def update_arguments(groups: InGroups, group: tuple[Cut, ...]) -> tuple[Any, ...]:
    """Abstract arguments of `update_program`, for a group."""
    rest = NamedSharding(groups.mesh, P())
    leaves, flat = jax.tree.leaves(groups.opt_state), iter(groups.cuts(group))
    of_state = [[next(flat) for _ in groups.numbers(cut.path)] for cut in group]
    state = [[Piece(leaves[i], cut).abstract for i, cut in own] for own in of_state]
    pieces = [groups.piece(cut) for cut in group]
    grads = [jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.whole.sharding) for x in pieces]
    alone = [groups.layouts[cut.path].in_files for cut in group]
    old = [x.abstract if piece else groups.param(x.cut.path) for x, piece in zip(pieces, alone, strict=True)]
    starts = [jax.ShapeDtypeStruct((len(cut.start),), jnp.int32) for cut in group]
    loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=rest)
    finite = jax.ShapeDtypeStruct((), jnp.bool, sharding=rest)
    return grads, old, state, groups.leaves(None), starts, loss, finite


def gradients_program(
    groups: InGroups,
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
    rest = NamedSharding(groups.mesh, P())
    before = dataclasses.replace(state, opt_state=())
    given = jax.tree.map(lambda x: x.sharding, before)
    places: dict[str, Any] = {"loss": rest, "finite": rest, "metrics": rest, "factors": rest, "model_state": ()}
    accumulated = accumulated_gradients(groups, gradients)
    memory = gradients_memory(groups, gradients)
    # Absent devices name no memories: the program takes memory where it can be, and leaves it where it put it.
    absent = any(x.sharding.memory_kind is None for part in memory for x in part.values())
    hosted = groups.hosted if absent else ()
    found = Found(grads=[None if path in hosted else accumulated[path].sharding for path in groups.layouts], **places)
    at = [{path: x.sharding for path, x in part.items()} for part in memory]
    program = jax.jit(
        functools.partial(gradients_step, gradients, groups.mesh, clip_norm),
        in_shardings=(given, jax.tree.map(lambda x: x.sharding, batch), at),
        out_shardings=(
            dataclasses.replace(given, params=(), frozen=()),
            found,
            [groups.sharding(path) for path in groups.published],
            None if absent else at[1:],
        ),
        donate_argnums=() if absent else 2,
        keep_unused=True,
        compiler_options=options,
    )
    return program, (before, batch, memory)


def accumulated_gradients(groups: InGroups, gradients: Gradients) -> dict[Path, jax.ShapeDtypeStruct]:
    """The gradients that `gradients_step` finds, abstract."""
    return {path: groups.accumulated(path, gradients.slots[path].dtype) for path in groups.layouts}


def gradients_memory(groups: InGroups, gradients: Gradients) -> list[dict[Path, jax.ShapeDtypeStruct]]:
    """The host memory that `Gradients.into` takes, abstract; none where no gradient rests there."""
    found = accumulated_gradients(groups, gradients)
    one = {path: found[path] for path in groups.hosted}
    return [one] * gradients.memories if one else []


def publish_program(
    groups: InGroups, gradients: Gradients, options: dict[str, Any] | None
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted `publish_step` and its abstract arguments."""
    whole = [groups.params[path] for path in groups.published]
    shards = [groups.on_device(path) for path in groups.published]
    rest = [x.sharding for x in whole]
    program = jax.jit(
        functools.partial(publish_step, gradients, groups.mesh),
        in_shardings=([x.sharding for x in shards], rest),
        out_shardings=rest,
        donate_argnums=1,
        keep_unused=True,
        compiler_options=options,
    )
    return program, (shards, whole)


def name_of(kind: Kind) -> str:
    """A kind of group in words: its first parameter and the piece of that."""
    (path, shape), *more = kind
    return f"{path_name(path)} {'x'.join(map(str, shape))}" + (f" and {len(more)} more" if more else "")
