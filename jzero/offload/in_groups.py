"""An optimizer as groups see it: what of its state is of which parameter, and what may be cut."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.host_params import HOST
from jzero.offload.groups import Cut, Share, grouped
from jzero.offload.piece import Piece
from jzero.offload.separable import placewise
from jzero.offload.shapes_seen import Shape, looked_at
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
        by_shape: those that it would, did it not look at their shapes.
    """

    optimizer: Optimizer
    mesh: Mesh
    layouts: Mapping[Path, Layout]
    params: Mapping[Path, jax.ShapeDtypeStruct]
    opt_state: Any
    owners: tuple[Path | None, ...]
    placewise: frozenset[Path] = frozenset()
    by_shape: frozenset[Path] = frozenset()

    @staticmethod
    def of(
        optimizer: Optimizer, layouts: Mapping[Path, Layout], state: TrainState, group_bytes: int, *, on_cpu: bool
    ) -> "InGroups":
        """Looks at an update.

        Args:
            layouts: of the trained parameters.
            state: abstract, with shardings.
            group_bytes: as `groups` takes them.
            on_cpu: it is computed on the host, in blocks of any number of elements.

        Raises:
            SeparationError: an optimizer that cannot be run in groups.
        """
        owners = tuple(opt_state_owners(state.opt_state, layouts))
        params: dict[Path, Any] = flatten_dict(state.params)
        whole = InGroups(optimizer, state.step.sharding.mesh, layouts, params, state.opt_state, owners)
        traced = whole.traced({})
        by_element = placewise(traced.jaxpr, state.opt_state, state.params, owners)
        divided = replace(whole, placewise=by_element)
        shapes = divided.shapes(group_bytes, on_cpu=on_cpu)
        in_order = flatten_dict(jax.tree.map(lambda x: x, state.params))  # as the leaves of a tree are
        by_shape = looked_at(traced, whole.traced, [*in_order, *owners], shapes)
        return replace(divided, placewise=by_element - by_shape, by_shape=by_shape)

    def traced(self, shapes: Mapping[Path, Shape]) -> ClosedJaxpr:
        """(gradients, state, parameters, loss) -> (parameters, state): the update, traced with some parameters, and all
        that is kept for them, in other shapes."""
        shape_of = {path: shapes.get(path, x.shape) for path, x in self.params.items()}
        grads = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shape_of.items()}
        params = {path: jax.ShapeDtypeStruct(shape, self.params[path].dtype) for path, shape in shape_of.items()}
        leaves, treedef = jax.tree.flatten(self.opt_state)
        of_state = [
            jax.ShapeDtypeStruct(x.shape if owner is None else shapes.get(owner, x.shape), x.dtype)
            for owner, x in zip(self.owners, leaves, strict=True)
        ]
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.make_jaxpr(self.optimizer.update)(
            unflatten_dict(grads), treedef.unflatten(of_state), unflatten_dict(params), loss
        )

    def shapes(self, group_bytes: int, *, on_cpu: bool) -> dict[Path, list[Shape]]:
        """The shapes in which each parameter is updated that is taken element by element, if they are not its own."""
        found: dict[Path, list[Shape]] = {}
        for cut in (cut for group in self.groups(group_bytes) for cut in group if cut.path in self.placewise):
            size, rank = math.prod(cut.shape), len(cut.shape)
            # Blocks may have any number of elements up to that of the piece, for one 1.
            shapes = [block_shape(size, rank), block_shape(min(size, 1), rank)] if on_cpu else [cut.shape]
            own = found.setdefault(cut.path, [])
            own += [shape for shape in shapes if shape not in own]
        return {path: own for path, own in found.items() if own != [self.params[path].shape]}

    @functools.cached_property
    def _numbers(self) -> dict[Path | None, list[int]]:
        found: dict[Path | None, list[int]] = {path: [] for path in (None, *self.params)}
        for i, owner in enumerate(self.owners):
            found[owner].append(i)
        return found

    @functools.cached_property
    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.opt_state)

    def numbers(self, path: Path | None) -> Sequence[int]:
        """Which leaves of the optimizer state are of a parameter, or of none."""
        return self._numbers[path]

    def leaves(self, path: Path | None) -> list[Any]:
        """These leaves, abstract."""
        return [self._leaves[i] for i in self._numbers[path]]

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
        """The pieces that are worked on together, of at most so many bytes on one device.

        Those are of state, of float32 gradients, and of parameters that come from elsewhere.
        """
        shares = {
            path: Share(
                self.sharding(path).shard_shape(x.shape), self._worked_on(path), divisible=path in self.placewise
            )
            for path, x in self.params.items()
        }
        return grouped(shares, group_bytes)

    def _worked_on(self, path: Path) -> int:
        """Bytes of one device that come for the update of a parameter."""
        grads = shard_bytes(self.params[path], self.sharding(path), jnp.dtype(jnp.float32))
        comes = self.layouts[path].in_files or self.memory(path) == HOST
        return sum(map(shard_bytes, self.leaves(path)), grads) + (shard_bytes(self.param(path)) if comes else 0)

    def cuts(self, group: tuple[Cut, ...]) -> list[tuple[int, Cut]]:
        """(leaf of the optimizer state, piece of it) of all that is in a group."""
        return [(i, _cut_of(self._leaves[i], cut)) for cut in group for i in self.numbers(cut.path)]

    def nbytes(self, group: tuple[Cut, ...]) -> int:
        """Bytes of state in a group, on one device."""
        return sum(math.prod(cut.shape) * self._leaves[i].dtype.itemsize for i, cut in self.cuts(group))


def block_shape(size: int, rank: int) -> Shape:
    """Of elements that lie one after another, with the rank of the parameter that they are of."""
    return (1,) * (rank - 1) + (size,) if rank else ()


def _cut_of(leaf: Any, cut: Cut) -> Cut:
    """The piece of one array that goes with a parameter's piece: all of it, whatever its shape, with a whole one."""
    if not cut.whole:
        return cut
    return replace(cut, start=(0,) * len(leaf.shape), shape=leaf.sharding.shard_shape(leaf.shape))
