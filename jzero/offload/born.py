"""A new train state whose optimizer state goes to rest as it is born, one parameter after the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.pieces import Pieces, cut_out
from jzero.offload.stream import Group
from jzero.optim import Optimizer
from jzero.step import TrainState


def new_state(
    optimizer: InGroups, groups: Sequence[Group], abstract: TrainState, born: Callable[[Optimizer], TrainState]
) -> TrainState:
    """A new train state; to be called in the optimizer's mesh.

    What the optimizer keeps for a parameter comes from that parameter as it is born, in float32, which is made again
    for it: at rest it may be rounded.

    Args:
        abstract: with shardings.
        born: makes a train state with the state of an optimizer; not jitted.
    """
    shardings, leaves = jax.tree.map(lambda x: x.sharding, abstract), jax.tree.leaves(abstract.opt_state)

    def with_leaves(numbers: Sequence[int]) -> tuple[Callable[[], TrainState], TrainState]:
        """Makes a state with some arrays of the optimizer state; and its shardings."""

        def chosen(values: Any) -> list[Any]:
            made = jax.tree.leaves(optimizer.optimizer.init(values))
            return [made[i] for i in numbers]

        kept = optimizer.optimizer._replace(init=chosen)
        return lambda: born(kept), replace(shardings, opt_state=[leaves[i].sharding for i in numbers])

    make, places = with_leaves(optimizer.numbers(None))
    state = jax.jit(make, out_shardings=places)()
    known: dict[int, Any] = {}
    parts: dict[int, list[tuple[Cut, Any]]] = {}
    for k, group in enumerate(groups):
        cuts = optimizer.cuts(group.cuts)
        if not known.keys() >= {i for i, _ in cuts}:
            known = {}  # before the next ones are made
            numbers = [i for i, _ in cuts]
            make, places = with_leaves(numbers)
            program = jax.jit(lambda make=make: make().opt_state, out_shardings=places.opt_state)
            known = dict(zip(numbers, program(), strict=True))
        pieces = group.updater.settle([_piece(known[i], cut) for i, cut in cuts])
        stored, left = group.tier.store(k, pieces)
        left()
        for (i, cut), part in zip(cuts, stored, strict=True):
            parts.setdefault(i, []).append((cut, part))
    rest: dict[int, Any] = dict(zip(optimizer.numbers(None), state.opt_state, strict=True))
    rest |= {i: Pieces(leaves[i], *zip(*found, strict=True)) for i, found in parts.items()}
    treedef = jax.tree.structure(abstract.opt_state)
    return replace(state, opt_state=treedef.unflatten([rest[i] for i in range(len(leaves))]))


def _piece(x: jax.Array, cut: Cut) -> jax.Array:
    if cut.whole:
        return x
    sharding: Any = x.sharding
    return cut_out(sharding.mesh, sharding.spec, cut.shape)(x, np.asarray(cut.start, np.int32))
