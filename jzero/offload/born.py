"""A new train state whose optimizer state goes to rest as it is born, group by group."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from jzero.driver import in_mesh
from jzero.offload.files import Place, from_device
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.param_files import ParamFiles
from jzero.offload.pieces import Pieces, cut_out
from jzero.offload.stream import Group
from jzero.optim import Optimizer
from jzero.step import TrainState


def new_state(
    optimizer: InGroups,
    groups: Sequence[Group],
    files: ParamFiles,
    abstract: TrainState,
    born: Callable[[Optimizer], TrainState],
) -> TrainState:
    """A new train state.

    What the optimizer keeps for a parameter comes from that parameter as it is born, in float32, which is made again
    for each group that needs its values: at rest it may be rounded.  So beside the groups under way there is one such
    parameter, in its shards, and nothing of a size that grows with the model.

    Args:
        files: of parameters.
        abstract: with shardings.
        born: makes a train state with the state of an optimizer; not jitted.
    """
    shardings, leaves = jax.tree.map(lambda x: x.sharding, abstract), jax.tree.leaves(abstract.opt_state)

    def with_leaves(numbers: Sequence[int]) -> TrainState:
        """A state with some arrays of the optimizer state."""

        def chosen(values: Any) -> list[Any]:
            made = jax.tree.leaves(optimizer.optimizer.init(values))
            return [made[i] for i in numbers]

        return born(optimizer.optimizer._replace(init=chosen))

    programs: dict[Any, Any] = {}

    def pieces(cuts: Sequence[tuple[Any, Cut]], arrays_of: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Pieces of arrays, by a program for all pieces of the same shapes."""
        keys = [key for key, _ in cuts]
        kind = tuple((key, cut.shape) for key, cut in cuts)
        if kind not in programs:
            places = [given[key].sharding for key in keys]

            def make(starts: Sequence[Any]) -> list[Any]:
                arrays = lax.with_sharding_constraint(arrays_of(keys), places)
                return [_piece(x, *of) for x, *of in zip(arrays, places, (cut for _, cut in cuts), starts, strict=True)]

            programs[kind] = in_mesh(optimizer.mesh, jax.jit(make, out_shardings=places))
        return programs[kind]([np.asarray(cut.start, np.int32) for _, cut in cuts])

    rest = optimizer.numbers(None)
    places = files.without(replace(shardings, opt_state=[leaves[i].sharding for i in rest]))
    state = in_mesh(optimizer.mesh, jax.jit(lambda: files.without(with_leaves(rest)), out_shardings=places))()
    given: dict[Any, Any] = {**dict(enumerate(leaves)), **files.wholes}
    parts: dict[Any, list[tuple[Cut, Any]]] = {}
    for k, group in enumerate(groups):
        cuts = optimizer.cuts(group.cuts)
        made = pieces(cuts, lambda numbers: with_leaves(numbers).opt_state)
        stored, left = group.tier.store(k, group.updater.settle(made))
        del made
        left()
        for (i, cut), part in zip(cuts, stored, strict=True):
            parts.setdefault(i, []).append((cut, part))
    for k, in_files in files.cuts().items():
        for number, cut in enumerate(in_files):
            (made,) = pieces([(cut.path, cut)], lambda paths: files.chosen(with_leaves([]), paths))
            shards = from_device(Place(given[cut.path], cut, ()), made)
            parts.setdefault(cut.path, []).append((cut, files.fill(k, number, shards)))
    found: dict[Any, Any] = dict(zip(rest, state.opt_state, strict=True))
    found |= {key: Pieces(given[key], *zip(*of, strict=True)) for key, of in parts.items()}
    treedef = jax.tree.structure(abstract.opt_state)
    return files.within(replace(state, opt_state=treedef.unflatten([found[i] for i in range(len(leaves))])), found)


def _piece(x: jax.Array, sharding: Any, cut: Cut, start: Any) -> jax.Array:
    return x if cut.whole else cut_out(sharding.mesh, sharding.spec, cut.shape)(x, start)
