"""A new train state whose optimizer state goes to rest as it is born, group by group."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from jzero.driver import in_mesh
from jzero.offload.files import from_device
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.param_files import ParamFiles
from jzero.offload.piece import Piece
from jzero.offload.pieces import Pieces
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

    def made(pieces: Sequence[tuple[Any, Piece]], arrays_of: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Pieces of arrays, by a program for all pieces of the same shapes."""
        kind = tuple((key, piece.cut.shape) for key, piece in pieces)
        if kind not in programs:
            places = [piece.whole.sharding for _, piece in pieces]

            def make(starts: Sequence[Any]) -> list[Any]:
                arrays = lax.with_sharding_constraint(arrays_of([key for key, _ in pieces]), places)
                each = zip(pieces, arrays, starts, strict=True)
                return [piece.cut_from(x, start) for (_, piece), x, start in each]

            programs[kind] = in_mesh(optimizer.mesh, jax.jit(make, out_shardings=places))
        return programs[kind]([piece.cut.at for _, piece in pieces])

    rest = optimizer.numbers(None)
    places = files.without(replace(shardings, opt_state=[leaves[i].sharding for i in rest]))
    state = in_mesh(optimizer.mesh, jax.jit(lambda: files.without(with_leaves(rest)), out_shardings=places))()
    given: dict[Any, Any] = {**dict(enumerate(leaves)), **files.wholes}
    parts: dict[Any, list[tuple[Cut, Any]]] = {}
    for k, group in enumerate(groups):
        pieces = [(i, Piece(leaves[i], cut)) for i, cut in optimizer.cuts(group.cuts)]
        arrays = made(pieces, lambda numbers: with_leaves(numbers).opt_state)
        stored, left = group.tier.store(k, group.updater.settle(arrays))
        del arrays
        left()
        for (i, piece), part in zip(pieces, stored, strict=True):
            parts.setdefault(i, []).append((piece.cut, part))
    for k, in_files in files.cuts().items():
        for number, cut in enumerate(in_files):
            piece = Piece(given[cut.path], cut)
            (array,) = made([(cut.path, piece)], lambda paths: files.chosen(with_leaves([]), paths))
            shards = from_device(piece, array)
            parts.setdefault(cut.path, []).append((cut, files.fill(k, number, shards)))
    found: dict[Any, Any] = dict(zip(rest, state.opt_state, strict=True))
    found |= {key: Pieces(given[key], *zip(*of, strict=True)) for key, of in parts.items()}
    treedef = jax.tree.structure(abstract.opt_state)
    return files.within(replace(state, opt_state=treedef.unflatten([found[i] for i in range(len(leaves))])), found)
