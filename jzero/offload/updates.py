"""The update of one kind of group, on the devices of the run: one program, whatever the place of the pieces.

An update of pieces runs on each device by itself, on the part of its shard, since a piece is only made of what the
optimizer takes element by element.  What it takes as a whole is a group of whole parameters, on global arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import Fetch, Store
from jzero.host_params import HOST
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.piece import Piece
from jzero.step import updated
from jzero.zero import Path, path_name

Kind = tuple[tuple[Path, tuple[int, ...]], ...]  # (parameter, box of its shard), of each piece in a group


@dataclass(frozen=True)
class Update:
    """The update of one kind of group, to be jitted: pieces of parameters, of gradients and of optimizer state.

    Attributes:
        in_groups: the optimizer.
        kind: the parameters of the group, and the shape of the piece of each.
    """

    in_groups: InGroups
    kind: Kind

    @property
    def paths(self) -> list[Path]:
        """The parameters of the group."""
        return [path for path, _ in self.kind]

    def __call__(
        self, grads: list[Any], old: list[Any], state: list[list[Any]], shared: list[Any], loss: Any, finite: Any
    ) -> tuple[list[Any], list[list[Any]], list[Any], dict[str, Any]]:
        """(new pieces of parameters, of state, state that is of no parameter, scalars to log).

        What is not in the group is zero here; since nothing in the group comes of it, it is never made.
        """
        in_groups, paths = self.in_groups, self.paths
        params = {path: jnp.zeros(x.shape, x.dtype) for path, x in in_groups.params.items()}
        grads_of = {path: jnp.zeros(x.shape, jnp.float32) for path, x in params.items()}
        params |= dict(zip(paths, old, strict=True))
        grads_of |= dict(zip(paths, grads, strict=True))
        leaves, treedef = jax.tree.flatten(in_groups.opt_state)
        given = dict(zip(in_groups.numbers(None), shared, strict=True))
        for path, own in zip(paths, state, strict=True):
            given |= dict(zip(in_groups.numbers(path), own, strict=True))
        opt_state = treedef.unflatten(
            [given[i] if i in given else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)]
        )
        new, opt_state, report = updated(
            in_groups.optimizer, loss, finite, unflatten_dict(grads_of), opt_state, unflatten_dict(params)
        )
        new, after = flatten_dict(new), jax.tree.leaves(opt_state)
        state = [[after[i] for i in in_groups.numbers(path)] for path in paths]
        return [new[path] for path in paths], state, [after[i] for i in in_groups.numbers(None)], report


def kind_of(cuts: Sequence[Cut]) -> Kind:
    """What two groups that share a program have in common."""
    return tuple((cut.path, cut.shape) for cut in cuts)


def name_of(kind: Kind) -> str:
    """A kind of group in words: its first parameter and the piece of that."""
    (path, shape), *more = kind
    return f"{path_name(path)} {'x'.join(map(str, shape))}" + (f" and {len(more)} more" if more else "")


def update_program(in_groups: InGroups, kind: Kind, options: dict[str, Any] | None) -> Any:
    """The jitted update of one kind of group.

    (gradients, parameters, pieces of state, state of no parameter, starts, loss, finite) -> (parameters with the new
    pieces, new pieces of state, state of no parameter, scalars to log).  Parameters are whole arrays in the
    layout of the update, `starts` says where in each shard the pieces lie; of those that rest in files, and of
    gradients (`arriving.py`), there are the pieces alone.  Parameters and pieces of state are donated.
    """
    update, rest = Update(in_groups, kind), NamedSharding(in_groups.mesh, P())
    run = _of_pieces(update) if in_groups.placewise.issuperset(update.paths) else _of_whole(update)
    places = ([in_groups.updating(path) for path in update.paths], _state_shardings(update), rest, rest)
    return jax.jit(run, out_shardings=places, donate_argnums=(1, 2), compiler_options=options)


def _of_pieces(update: Update) -> Any:
    """Each device by itself: cuts its pieces of the parameters out, and puts the new ones in."""
    in_groups, shapes = update.in_groups, [shape for _, shape in update.kind]
    # A parameter in files is here as its piece, which begins where it begins.
    alone = [in_groups.layouts[path].in_files for path in update.paths]

    def local(grads: Any, old: Any, state: Any, shared: Any, starts: Any, loss: Any, finite: Any) -> Any:
        starts = [jnp.zeros_like(at) if piece else at for at, piece in zip(starts, alone, strict=True)]
        pieces = [lax.dynamic_slice(x, tuple(at), shape) for x, at, shape in zip(old, starts, shapes, strict=True)]
        new, state, shared, report = update(grads, _fetched(update, pieces), state, shared, loss, finite)
        new = [Store()(x) if away else x for x, away in zip(new, _away(update), strict=True)]
        old = [lax.dynamic_update_slice(x, part, tuple(at)) for x, part, at in zip(old, new, starts, strict=True)]
        return old, state, shared, report

    specs = [in_groups.spec(path) for path in update.paths]
    state_specs = jax.tree.map(lambda sharding: sharding.spec, _state_shardings(update))
    in_specs, out_specs = (specs, specs, state_specs, P(), P(), P(), P()), (specs, state_specs, P(), P())
    return jax.shard_map(local, mesh=in_groups.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _of_whole(update: Update) -> Any:
    """On global arrays."""

    def whole(grads: Any, old: Any, state: Any, shared: Any, starts: Any, loss: Any, finite: Any) -> Any:  # noqa: ARG001
        return update(grads, _fetched(update, old), state, shared, loss, finite)

    return whole


def _fetched(update: Update, old: list[Any]) -> list[Any]:
    return [Fetch()(x) if away else x for x, away in zip(old, _away(update), strict=True)]


def _away(update: Update) -> list[bool]:
    """Of each parameter, whether it is updated in host memory."""
    # As the sharding says, not the layout: absent devices have no memory beside their own, and all is there.
    return [update.in_groups.updating(path).memory_kind == HOST for path in update.paths]


def _state_shardings(update: Update) -> list[list[NamedSharding]]:
    return [[leaf.sharding for leaf in update.in_groups.leaves(path)] for path in update.paths]


def update_arguments(in_groups: InGroups, group: tuple[Cut, ...]) -> tuple[Any, ...]:
    """Abstract arguments of `update_program`, for a group."""
    rest = NamedSharding(in_groups.mesh, P())
    leaves, flat = jax.tree.leaves(in_groups.opt_state), iter(in_groups.cuts(group))
    of_state = [[next(flat) for _ in in_groups.numbers(cut.path)] for cut in group]
    state = [[Piece(leaves[i], cut).abstract for i, cut in own] for own in of_state]
    of_grads = [in_groups.piece(cut) for cut in group]
    grads = [jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.whole.sharding) for x in of_grads]
    of_params = [Piece(in_groups.param(cut.path), cut) for cut in group]
    old = [x.abstract if in_groups.layouts[x.cut.path].in_files else x.whole for x in of_params]
    starts = [jax.ShapeDtypeStruct((len(cut.start),), jnp.int32) for cut in group]
    loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=rest)
    finite = jax.ShapeDtypeStruct((), jnp.bool, sharding=rest)
    return grads, old, state, in_groups.leaves(None), starts, loss, finite
