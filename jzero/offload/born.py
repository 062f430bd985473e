"""A new train state whose optimizer state goes to rest as it is born, group by group."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from jzero.driver import in_mesh
from jzero.offload.files import from_device
from jzero.offload.in_groups import InGroups
from jzero.offload.lanes import Lane, Member, gathered
from jzero.offload.state_params import params_of, with_params, without_params
from jzero.offload.stream import Group
from jzero.optim import Optimizer
from jzero.pace import in_turn
from jzero.step import TrainState
from jzero.zero import Path


def new_state(
    in_groups: InGroups,
    groups: Sequence[Group],
    of_params: Sequence[Lane],
    abstract: TrainState,
    born: Callable[[Optimizer], TrainState],
) -> TrainState:
    """A new train state.

    What the optimizer keeps for a parameter comes from that parameter as it is born, in float32, which is made again
    for each group that needs its values: at rest it may be rounded.  So beside the groups under way there is one such
    parameter, in its shards, and nothing of a size that grows with the model.

    Args:
        of_params: lanes of the parameters in files, of those that no group updates too.
        abstract: with shardings.
        born: makes a train state with the state of an optimizer; not jitted.

    Raises:
        TierError: what is to rest in files cannot be written.
    """
    newborn, leaves = _Newborn(in_groups, born), jax.tree.leaves(abstract.opt_state)
    shared = in_groups.numbers(None)
    state = newborn.without(shared, {key for lane in of_params for key in lane.keys}, abstract)
    rest = gathered([*newborn.at_rest(groups), *newborn.in_files(of_params)])
    made: dict[Any, Any] = dict(enumerate(leaves)) | rest | dict(zip(shared, state.opt_state, strict=True))
    opt_state = jax.tree.unflatten(jax.tree.structure(abstract.opt_state), [made[i] for i, _ in enumerate(leaves)])
    return with_params(replace(state, opt_state=opt_state), rest)


@dataclass(frozen=True)
class _Newborn:
    """Makes parts of a train state, each from the seed.

    Attributes:
        born: as `new_state` has it.
        programs: made so far, one for all pieces of the same shapes.
    """

    in_groups: InGroups
    born: Callable[[Optimizer], TrainState]
    programs: dict[Any, Any] = field(default_factory=dict)

    def without(self, shared: Sequence[int], paths: Iterable[Path], abstract: TrainState) -> TrainState:
        """A state without these parameters, and with some arrays of the optimizer's alone."""
        leaves = jax.tree.leaves(abstract.opt_state)
        target = replace(without_params(abstract, paths), opt_state=[leaves[i] for i in shared])
        make = jax.jit(
            lambda: without_params(self._state(shared), paths), out_shardings=jax.tree.map(lambda x: x.sharding, target)
        )
        return in_mesh(self.in_groups.mesh, make)()

    def at_rest(self, groups: Sequence[Group]) -> Iterator[tuple[Lane, list[Any]]]:
        """The optimizer's state, group by group."""
        for group in groups:
            parts, left = group.state.store(group.updater.settle(self._pieces(group.state.members, self._opt_state)))
            left()
            yield group.state, parts

    def in_files(self, lanes: Sequence[Lane]) -> Iterator[tuple[Lane, list[Any]]]:
        """Parameters, piece by piece."""
        for lane in lanes:
            parts = []
            for member, fill in zip(lane.members, lane.fills, strict=True):
                (array,) = self._pieces([member], self._params)
                parts.append(fill(from_device(member.piece, array)))
            yield lane, parts

    def _pieces(self, members: Sequence[Member], arrays_of: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Pieces, on the device.

        Args:
            arrays_of: keys -> these arrays, whole; not jitted.
        """
        kind = tuple((member.key, member.piece.cut.shape) for member in members)
        if kind not in self.programs:
            pieces, keys = [member.piece for member in members], [member.key for member in members]
            places = [piece.whole.sharding for piece in pieces]

            def make(starts: Sequence[Any]) -> list[Any]:
                arrays = lax.with_sharding_constraint(arrays_of(keys), places)
                return [piece.cut_from(x, start) for piece, x, start in zip(pieces, arrays, starts, strict=True)]

            self.programs[kind] = in_mesh(self.in_groups.mesh, jax.jit(make, out_shardings=places))
        return in_turn(self.programs[kind]([member.piece.cut.at for member in members]))

    def _opt_state(self, numbers: list[Any]) -> list[Any]:
        return self._state(numbers).opt_state

    def _params(self, paths: list[Any]) -> list[Any]:
        made = params_of(self._state([]))
        return [made[path] for path in paths]

    def _state(self, numbers: Sequence[int]) -> TrainState:
        """A state with some arrays of the optimizer's."""
        optimizer = self.in_groups.optimizer

        def chosen(values: Any) -> list[Any]:
            made = jax.tree.leaves(optimizer.init(values))
            return [made[i] for i in numbers]

        return self.born(optimizer._replace(init=chosen))
