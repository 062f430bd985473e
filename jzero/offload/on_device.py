"""The update of a group on the devices of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.stream import Scalars
from jzero.pace import in_turn
from jzero.zero import Path


class UpdatedOnDevice:
    """As `stream.Updater` has it: all is there already, or comes with gradients and state."""

    def __init__(self, in_groups: InGroups, group: Sequence[Cut], program: Any) -> None:
        """Of one group.

        Args:
            program: `updates.update_program` of its kind.
        """
        self._program, self._paths = program, [cut.path for cut in group]
        self._starts = [cut.at for cut in group]
        self._counts = [len(in_groups.numbers(cut.path)) for cut in group]

    def bring(self, grads: Sequence[jax.Array], params: Mapping[Path, Any]) -> list[jax.Array]:  # noqa: ARG002 (there)
        """The gradients."""
        return list(grads)

    def update(
        self,
        brought: list[jax.Array],
        params: Mapping[Path, Any],
        state: Sequence[Any],
        scalars: Scalars,
    ) -> tuple[dict[Path, Any], list[Any], Scalars]:
        """One program; parameters and pieces are donated."""
        flat = iter(state)
        own = [[next(flat) for _ in range(count)] for count in self._counts]
        old = [params[path] for path in self._paths]
        given = (brought, old, own, scalars.shared, self._starts, scalars.loss, scalars.finite)
        new, own, shared, report = in_turn(self._program(*given))  # whole parameters may take collectives
        after = scalars._replace(shared=shared, report=report)
        return dict(zip(self._paths, new, strict=True)), jax.tree.leaves(own), after

    def settle(self, pieces: Sequence[jax.Array]) -> list[Any]:
        """They are there."""
        return list(pieces)
