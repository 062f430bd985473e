"""An optimizer as groups see it: what of its state is of which parameter, and what may be cut."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.offload.groups import Cut, Share, grouped
from jzero.offload.piece import Piece
from jzero.offload.separable import placewise
from jzero.optim import Optimizer
from jzero.step import TrainState
from jzero.zero import Layout, Path, opt_state_owners, shard_bytes


@dataclass(frozen=True)
class InGroups:
    """An optimizer as groups see it.

    Attributes:
        optimizer: of all parameters.
        mesh: of the run.
        layouts: of the trained parameters.
        params: path -> shape and dtype at rest.
        opt_state: abstract, with shardings.
        owners: of each leaf of the optimizer state, the parameter that it is of, or None.
        placewise: the parameters that the optimizer takes element by element.
    """

    optimizer: Optimizer
    mesh: Mesh
    layouts: Mapping[Path, Layout]
    params: Mapping[Path, jax.ShapeDtypeStruct]
    opt_state: Any
    owners: tuple[Path | None, ...]
    placewise: frozenset[Path]

    @staticmethod
    def of(optimizer: Optimizer, layouts: Mapping[Path, Layout], state: TrainState) -> "InGroups":
        """Looks at an update.

        Args:
            layouts: of the trained parameters.
            state: abstract, with shardings.

        Raises:
            SeparationError: an optimizer that cannot be run in groups.
        """
        owners = tuple(opt_state_owners(state.opt_state, layouts))
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), state.params)
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        on_device = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
        by_element = placewise(optimizer.update, grads, state.opt_state, on_device, loss, owners)
        params: dict[Path, Any] = flatten_dict(state.params)
        return InGroups(optimizer, state.step.sharding.mesh, layouts, params, state.opt_state, owners, by_element)

    def numbers(self, path: Path | None) -> list[int]:
        """Which leaves of the optimizer state are of a parameter, or of none."""
        return [i for i, owner in enumerate(self.owners) if owner == path]

    def leaves(self, path: Path | None) -> list[Any]:
        """These leaves, abstract."""
        found = jax.tree.leaves(self.opt_state)
        return [found[i] for i in self.numbers(path)]

    def spec(self, path: Path) -> P:
        """Of a parameter while it is updated."""
        return self.layouts[path].opt_state

    def memory(self, path: Path) -> str | None:
        """The memory in which a parameter is updated: where it rests, unless it has another layout there."""
        to = self.layouts[path]
        return None if to.publish.moves else to.memory

    def sharding(self, path: Path) -> NamedSharding:
        """Of a parameter's gradient in the update."""
        return NamedSharding(self.mesh, self.spec(path))

    def accumulated(self, path: Path, dtype: Any) -> jax.ShapeDtypeStruct:
        """The gradient of a parameter before the update, where it is accumulated.

        Args:
            dtype: in which it is accumulated; on the device it is finished as float32.
        """
        memory = self.layouts[path].grads_memory
        sharding = NamedSharding(self.mesh, self.spec(path), memory_kind=memory)
        return jax.ShapeDtypeStruct(self.params[path].shape, dtype if memory else jnp.float32, sharding=sharding)

    @property
    def hosted(self) -> list[Path]:
        """The parameters whose gradients are accumulated on the host."""
        return [path for path, to in self.layouts.items() if to.grads_memory]

    def updating(self, path: Path) -> NamedSharding:
        """Of a parameter while it is updated, piece by piece."""
        return NamedSharding(self.mesh, self.spec(path), memory_kind=self.memory(path))

    def param(self, path: Path) -> jax.ShapeDtypeStruct:
        """A parameter, abstract, while it is updated."""
        x = self.params[path]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.updating(path))

    def on_device(self, path: Path) -> jax.ShapeDtypeStruct:
        """The same on the device, wherever it is updated."""
        x = self.params[path]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(path))

    def piece(self, cut: Cut) -> Piece:
        """Of a parameter, on the device."""
        return Piece(self.on_device(cut.path), cut)

    @property
    def published(self) -> list[Path]:
        """The parameters that are updated in another layout than they rest in."""
        return [path for path, to in self.layouts.items() if to.publish.moves]

    def groups(self, group_bytes: int) -> list[tuple[Cut, ...]]:
        """The pieces that are worked on together, of at most so many bytes of state on one device."""
        shares = {
            path: Share(
                self.sharding(path).shard_shape(x.shape),
                sum(map(shard_bytes, self.leaves(path))),
                divisible=path in self.placewise,
            )
            for path, x in self.params.items()
        }
        return grouped(shares, group_bytes)

    def cuts(self, group: tuple[Cut, ...]) -> list[tuple[int, Cut]]:
        """(leaf of the optimizer state, piece of it) of all that is in a group."""
        leaves = jax.tree.leaves(self.opt_state)
        return [(i, _cut_of(leaves[i], cut)) for cut in group for i in self.numbers(cut.path)]

    def nbytes(self, group: tuple[Cut, ...]) -> int:
        """Bytes of state in a group, on one device."""
        leaves = jax.tree.leaves(self.opt_state)
        return sum(math.prod(cut.shape) * leaves[i].dtype.itemsize for i, cut in self.cuts(group))


def _cut_of(leaf: Any, cut: Cut) -> Cut:
    """The piece of one array that goes with a parameter's piece: all of it, whatever its shape, with a whole one."""
    if not cut.whole:
        return cut
    return replace(cut, start=(0,) * len(leaf.shape), shape=leaf.sharding.shard_shape(leaf.shape))
