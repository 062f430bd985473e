"""A new train state whose optimizer state goes to rest as it is born, group by group."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from jzero.driver import in_mesh
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.pieces import Pieces, cut_out
from jzero.offload.programs import Kind, kind_of
from jzero.offload.stream import Group
from jzero.optim import Optimizer
from jzero.step import TrainState


def new_state(
    optimizer: InGroups, groups: Sequence[Group], abstract: TrainState, born: Callable[[Optimizer], TrainState]
) -> TrainState:
    """A new train state.

    What the optimizer keeps for a parameter comes from that parameter as it is born, in float32, which is made again
    for each group that needs its values: at rest it may be rounded.  So beside the groups under way there is one such
    parameter, in its shards, and nothing of a size that grows with the model.

    Args:
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

    def pieces(cuts: Sequence[tuple[int, Cut]]) -> Any:
        """The jitted function (start of each piece) -> pieces."""
        places = [leaves[i].sharding for i, _ in cuts]

        def make(starts: Sequence[Any]) -> list[Any]:
            arrays = lax.with_sharding_constraint(with_leaves([i for i, _ in cuts]).opt_state, places)
            return [_piece(x, *of) for x, *of in zip(arrays, places, (cut for _, cut in cuts), starts, strict=True)]

        return in_mesh(optimizer.mesh, jax.jit(make, out_shardings=places))

    rest = optimizer.numbers(None)
    places = replace(shardings, opt_state=[leaves[i].sharding for i in rest])
    state = in_mesh(optimizer.mesh, jax.jit(lambda: with_leaves(rest), out_shardings=places))()
    programs: dict[Kind, Any] = {}
    parts: dict[int, list[tuple[Cut, Any]]] = {}
    for k, group in enumerate(groups):
        cuts, kind = optimizer.cuts(group.cuts), kind_of(group.cuts)
        if kind not in programs:
            programs[kind] = pieces(cuts)
        made = programs[kind]([np.asarray(cut.start, np.int32) for _, cut in cuts])
        stored, left = group.tier.store(k, group.updater.settle(made))
        del made
        left()
        for (i, cut), part in zip(cuts, stored, strict=True):
            parts.setdefault(i, []).append((cut, part))
    found: dict[int, Any] = dict(zip(rest, state.opt_state, strict=True))
    found |= {i: Pieces(leaves[i], *zip(*of, strict=True)) for i, of in parts.items()}
    treedef = jax.tree.structure(abstract.opt_state)
    return replace(state, opt_state=treedef.unflatten([found[i] for i in range(len(leaves))]))


def _piece(x: jax.Array, sharding: Any, cut: Cut, start: Any) -> jax.Array:
    return x if cut.whole else cut_out(sharding.mesh, sharding.spec, cut.shape)(x, start)
