"""A ZeRO stage is a choice of three PartitionSpecs per parameter.  This file is that choice, and nothing else asks.

For a weight `W[in, out]` whose `out` dim tensor parallelism took, and ZeRO over Z (the axes dp and node together):

    stage   parameters at rest   gradients accumulated   optimizer state (m, v, float32 master)
    0       W[in, out:tp]        W[in, out:tp]           W[in, out:tp]
    1       W[in, out:tp]        W[in, out:tp]           W[in:Z, out:tp]
    2       W[in, out:tp]        W[in:Z, out:tp]         W[in:Z, out:tp]
    3       W[in:Z, out:tp]      W[in:Z, out:tp]         W[in:Z, out:tp]

Every collective of a training step is the move between two of those specs: gradients from whole to their spec
(stage 2 and 3: reduce-scatter in the backward pass), from their spec to the optimizer state's (stage 1: reduce-scatter
once per step; stage 0: all-reduce), parameters from the optimizer state's spec to rest (stage 1 and 2: all-gather
once), from rest to use (stage 3: all-gather at each read).

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

import fnmatch
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import AllReduce, Cast, Gather, Identity, Scatter, Then, Transition
from jzero.mesh import DATA_AXES, DP, NODE, data_size

Path = tuple[Any, ...]


class ShardingError(ValueError):
    """Sharding that cannot be had: names the leaf, its shape and the axis, or the setting, and the remedy."""


@dataclass(frozen=True)
class Stage:
    """Which of the three live as shards."""

    params: bool
    grads: bool
    opt_state: bool


STAGES = {
    0: Stage(params=False, grads=False, opt_state=False),
    1: Stage(params=False, grads=False, opt_state=True),
    2: Stage(params=False, grads=True, opt_state=True),
    3: Stage(params=True, grads=True, opt_state=True),
}


def stage_row(stage: int) -> Stage:
    """The row of the table.

    Raises:
        ShardingError: there is no such stage.
    """
    if stage not in STAGES:
        raise ShardingError(f"stage {stage!r} is not one of {', '.join(map(str, STAGES))}")
    return STAGES[stage]


@dataclass(frozen=True)
class Zero:
    """What a run may say about sharding beyond its stage.

    Attributes:
        axes: the mesh axes that ZeRO shards over.  Both data-parallel axes by default; `("dp",)` on a mesh with nodes
            is hybrid sharding (HSDP, MiCS): shards within a node, replicas across.
        persist_below: leaves with fewer elements than this, counted per layer, stay whole.
        replicate: shell-style patterns over leaf paths (``"*/norm/scale"``); what matches stays whole.
        regather: False keeps gathered parameters to the end of the backward pass instead of gathering them again
            (FSDP's SHARD_GRAD_OP): in layers without rematerialisation and under the policies of `remat_policy`; a
            plain `nnx.remat` keeps nothing.
    """

    axes: tuple[str, ...] = DATA_AXES
    persist_below: int = 0
    replicate: tuple[str, ...] = ()
    regather: bool = True

    def __post_init__(self) -> None:
        for axis in self.axes:
            if axis not in DATA_AXES:
                raise ValueError(f"zero.axes {self.axes}: {axis!r} is no data-parallel axis; they are {DATA_AXES}")
        if not self.axes:
            raise ValueError(f"zero.axes is empty: name {DATA_AXES} or one of them; stage 0 shards nothing")
        if isinstance(self.replicate, str):
            raise TypeError(f"zero.replicate must be a tuple of patterns, got the string {self.replicate!r}")

    def ordered_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes in the order in which they divide a dim, without those of size 1.

        dp first: gathering over node and then over dp is then contiguous, without any reordering.
        """
        return tuple(axis for axis in (DP, NODE) if axis in self.axes and mesh.shape[axis] > 1)


@dataclass(frozen=True)
class Leaf:
    """What sharding needs to know of one parameter.

    Attributes:
        path: where it is in the model.
        shape: at rest, layer dims included.
        layer_dims: how many leading dims number layers (0 for a leaf that is not stacked).
        tp_spec: what tensor parallelism took, one entry per dim.
        bytes_per_element: at rest.
    """

    path: Path
    shape: tuple[int, ...]
    layer_dims: int
    tp_spec: P
    bytes_per_element: int

    @property
    def name(self) -> str:
        """The path in one string."""
        return path_name(self.path)


@dataclass(frozen=True)
class Whole:
    """A leaf that ZeRO leaves whole on every device of its axes, and why.

    Attributes:
        shape, nbytes: at rest, layer dims included, before tensor parallelism divides it.
    """

    path: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True)
class Layout:
    """The three specs of one parameter, and the moves between them.

    Attributes:
        params, grads, opt_state: at rest on the (node, dp, tp) mesh.
        dim: the dim that ZeRO took, or None where the leaf stays whole.
        use_forward, use_backward: rest to use, gradient in use to the gradient spec; on one layer's tensor.
        finish: accumulated gradient to the optimizer state's spec, once per step.
        publish: updated parameter to rest, once per step.
        memory: the kind of memory that the parameter rests in; None is the device's own.
        grads_memory: the same of the gradient while it is accumulated.
        in_files: the parameter rests in files, and a program is given tickets for its layers (`collectives.Read`); or,
            where `memory` names one, the parameter there: a program of absent devices, which can call no host.
    """

    params: P
    grads: P
    opt_state: P
    dim: int | None
    use_forward: Transition
    use_backward: Transition
    finish: Transition
    publish: Transition
    memory: str | None = None
    grads_memory: str | None = None
    in_files: bool = False

    @property
    def moves(self) -> bool:
        """Whether reading the parameter, or the gradient of that, takes traffic."""
        return self.use_forward.moves or self.use_backward.moves

    def at_rest(self, mesh: Mesh) -> NamedSharding:
        """How the parameter lies between steps."""
        return NamedSharding(mesh, self.params, memory_kind=self.memory)

    @property
    def given(self) -> P:
        """The spec of what a program is given of the parameter."""
        return P() if self.in_files and self.memory is None else self.params


def path_name(path: Iterable[Hashable]) -> str:
    """``("blocks", 0, "kernel")`` as ``"blocks/0/kernel"``."""
    return "/".join(map(str, path))


def shard_dim(leaf: Leaf, shards: int) -> int | None:
    """The dim that ZeRO takes: the largest one that tp left, not a layer dim, that `shards` divides; None if none is.

    Of equally large dims the first is taken.  A dim that tp has taken is never shared: that permutes values.
    """
    free = [
        dim
        for dim in range(leaf.layer_dims, len(leaf.shape))
        if leaf.tp_spec[dim] is None and leaf.shape[dim] > 0 and leaf.shape[dim] % shards == 0
    ]
    return max(free, key=lambda dim: leaf.shape[dim], default=None)


def layout(
    leaf: Leaf, stage: int, zero: Zero, mesh: Mesh, reduce_dtype: str, grads_dtype: str
) -> tuple[Layout, Whole | None]:
    """The layout of one leaf at one stage, and a record if it had to stay whole where the stage shards.

    Args:
        reduce_dtype: in which gradients cross the network.
        grads_dtype: in which they are accumulated.
    """
    row, axes = stage_row(stage), zero.ordered_axes(mesh)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    wants = row.opt_state and shards > 1
    reason = _reason_to_stay_whole(leaf, zero, axes, shards) if wants else None
    dim = shard_dim(leaf, shards) if wants and reason is None else None
    whole = Whole(leaf.name, leaf.shape, math.prod(leaf.shape) * leaf.bytes_per_element, reason) if reason else None
    split = leaf.tp_spec if dim is None else _with_axes(leaf.tp_spec, dim, axes)
    specs = {name: split if sharded else leaf.tp_spec for name, sharded in vars(row).items()}
    moves = _moves(leaf, row, dim, axes, mesh, reduce_dtype, grads_dtype)
    return Layout(**specs, dim=dim, **moves), whole


def _moves(
    leaf: Leaf, row: Stage, dim: int | None, axes: tuple[str, ...], mesh: Mesh, reduce_dtype: str, grads_dtype: str
) -> dict[str, Any]:
    """The moves between the three specs of a leaf, of which ZeRO took `dim`."""
    to_grads, to_sum = Cast(grads_dtype), Cast("float32")
    moves: dict[str, Any] = {
        "use_forward": Identity(), "use_backward": to_grads, "finish": to_sum, "publish": Identity()
    }  # fmt: skip
    replicas = tuple(a for a in DATA_AXES if mesh.shape[a] > 1 and (dim is None or a not in axes))
    if dim is not None:
        in_layer, layer_tp = dim - leaf.layer_dims, P(*leaf.tp_spec[leaf.layer_dims :])
        if row.params:
            moves["use_forward"] = Gather(in_layer, axes, layer_tp)
        elif row.opt_state:
            moves["publish"] = Gather(dim, axes, leaf.tp_spec)
        if row.grads:
            moves["use_backward"] = Then(Scatter(in_layer, axes, layer_tp, reduce_dtype), to_grads)
        else:
            moves["finish"] = Then(Scatter(dim, axes, leaf.tp_spec, reduce_dtype), to_sum)
    if replicas:
        parts = 1 if dim is None else math.prod(mesh.shape[axis] for axis in axes)
        all_reduce = AllReduce(replicas, leaf.tp_spec, reduce_dtype, parts)
        moves["finish"] = Then(moves["finish"], Then(all_reduce, to_sum))
    return moves


def layouts(
    leaves: Sequence[Leaf], stage: int, zero: Zero, mesh: Mesh, reduce_dtype: str, grads_dtype: str
) -> tuple[dict[Path, Layout], tuple[Whole, ...]]:
    """`layout` for every leaf.

    Raises:
        ShardingError: an unknown stage, axes of one device where there are more, or a `zero.replicate` pattern that no
            leaf matches.
    """
    if stage_row(stage).opt_state and not zero.ordered_axes(mesh) and data_size(mesh) > 1:
        sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in DATA_AXES)
        raise ShardingError(
            f"zero.axes {zero.axes} on a mesh of {sizes}: stage {stage} would shard over one device; "
            f"name an axis of more, or take stage 0"
        )
    for pattern in zero.replicate:
        if not any(fnmatch.fnmatchcase(leaf.name, pattern) for leaf in leaves):
            raise ShardingError(
                f"zero.replicate: no parameter matches {pattern!r}; the parameters are {_some(l.name for l in leaves)}"
            )
    pairs = {leaf.path: layout(leaf, stage, zero, mesh, reduce_dtype, grads_dtype) for leaf in leaves}
    return {path: pair[0] for path, pair in pairs.items()}, tuple(w for _, w in pairs.values() if w is not None)


def tp_spec(names: Sequence[Any], shape: tuple[int, ...], path: Path, mesh: Mesh) -> P:
    """A leaf's annotation as a spec of exactly one entry per dim, axes of size 1 left out.

    Args:
        names: one per leading dim: an axis name, a tuple of them, or None.

    Raises:
        ShardingError: an axis that is not of the mesh, a data-parallel axis (those are the stage's choice),
            more names than dims, an axis named twice, or a dim that it does not divide.  Names the leaf, its shape and
            the axis.
    """
    where = f"parameter {path_name(path)!r} of shape {shape}"
    if len(names) > len(shape):
        raise ShardingError(f"{where} is annotated with {len(names)} axes {tuple(names)}: one per dim at most")
    by_dim = [_named_axes(entry, where, mesh) for entry in names]
    by_dim += [[]] * (len(shape) - len(names))
    named = [axis for axes in by_dim for axis in axes]
    for axis in named:
        if named.count(axis) > 1:
            raise ShardingError(
                f"{where} is annotated with {tuple(names)}: {axis!r} is named twice, it can split one dim"
            )
    for dim, axes in enumerate(by_dim):
        if axes and shape[dim] % mesh.shape[axes[0]]:
            raise ShardingError(
                f"{where}: dim {dim} of size {shape[dim]} is not a multiple of {axes[0]}={mesh.shape[axes[0]]}"
            )
    # Beside the data-parallel axes a mesh has tp alone, so no dim has two.
    return P(*[axes[0] if axes else None for axes in by_dim])


def _named_axes(entry: Any, where: str, mesh: Mesh) -> list[str]:
    """Axes of one dim's annotation, those of size 1 left out."""
    axes = [axis for axis in (entry if isinstance(entry, tuple | list) else (entry,)) if axis is not None]
    for axis in axes:
        if axis in DATA_AXES:
            raise ShardingError(
                f"{where} is annotated with the data-parallel axis {axis!r}: the stage decides what is sharded "
                f"over {DATA_AXES}; annotate tensor parallelism ('tp') only"
            )
        if axis not in mesh.shape:
            raise ShardingError(
                f"{where} is annotated with {axis!r}, which is no axis of the mesh {mesh.axis_names}; "
                f"map logical names with Flax's logical_axis_rules or sharding_rules"
            )
    return [axis for axis in axes if mesh.shape[axis] > 1]


def data_part(spec: P) -> P:
    """What of a spec is sharded over the data-parallel axes, which are manual in a step; the rest is the compiler's."""

    def part(entry: Any) -> Any:
        axes = entry if isinstance(entry, tuple) else (entry,)
        return entry if set(axes) <= set(DATA_AXES) else None

    return P(*map(part, spec))


def opt_state_specs(abstract_opt_state: Any, params: Mapping[Path, tuple[tuple[int, ...], P]]) -> Any:
    """The spec of every leaf of an optimizer state, for any optax transformation.

    A leaf belongs to the parameter whose path stands in its own, as in `.mu['norm']['scale'][0]`.  Of the same
    shape: that parameter's spec.  Reduced by dims (Adafactor's rows and columns): the spec without them.  With dims in
    front (L-BFGS's memory): the spec behind them.  Else replicated, as are counters.

    Args:
        abstract_opt_state: tree of ShapeDtypeStruct.
        params: path -> (shape, spec in the optimizer state).

    Returns:
        A tree of PartitionSpec of the same structure.
    """

    leaves, treedef = jax.tree.flatten(abstract_opt_state)
    owners = opt_state_owners(abstract_opt_state, params)
    specs = [
        P() if path is None else _matching_spec(leaf.shape, *params[path])
        for leaf, path in zip(leaves, owners, strict=True)
    ]
    return jax.tree.unflatten(treedef, specs)


def opt_state_owners(opt_state: Any, params: Collection[Path]) -> list[Path | None]:
    """The parameter that each leaf of an optimizer state is of, in the order of its leaves; None where it is of none.

    It is the parameter whose path stands in the leaf's own: the longest, then the last one.
    """

    def owner(key_path: tuple[Any, ...]) -> Path | None:
        keys = tuple(_key(k) for k in key_path)
        inside = [keys[start:end] for end in range(len(keys), 0, -1) for start in range(end)]
        return max((part for part in inside if part in params), key=len, default=None)

    return [owner(path) for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)]


def shard_bytes(x: Any, sharding: Any = None, dtype: Any = None) -> int:
    """Bytes that one device holds of an array, abstract or not.

    Args:
        sharding, dtype: other than its own.
    """
    return math.prod((sharding or x.sharding).shard_shape(x.shape)) * (dtype or x.dtype).itemsize


def _reason_to_stay_whole(leaf: Leaf, zero: Zero, axes: tuple[str, ...], shards: int) -> str | None:
    for pattern in zero.replicate:
        if fnmatch.fnmatchcase(leaf.name, pattern):
            return f"zero.replicate {pattern!r}"
    if math.prod(leaf.shape[leaf.layer_dims :]) < zero.persist_below:
        return f"fewer than zero.persist_below={zero.persist_below} elements"
    if shard_dim(leaf, shards) is None:
        sizes = leaf.shape[leaf.layer_dims :]
        taken = " that tp left" if any(leaf.tp_spec) else ""
        return f"no dim of {sizes}{taken} is a multiple of {'x'.join(axes)}={shards}"
    return None


def _with_axes(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    entry = axes[0] if len(axes) == 1 else axes
    return P(*[entry if d == dim else e for d, e in enumerate(spec)])


def _matching_spec(shape: tuple[int, ...], param_shape: tuple[int, ...], spec: P) -> P:
    if shape == param_shape:
        return spec
    extra = len(shape) - len(param_shape)
    if extra > 0 and shape[extra:] == param_shape:
        return P(*[None] * extra, *spec)
    kept = _subsequence(shape, param_shape)
    return P() if kept is None or not shape else P(*[spec[d] for d in kept])


def _subsequence(shape: tuple[int, ...], of: tuple[int, ...]) -> list[int] | None:
    """Dims of `of` that spell `shape` in order, or None."""
    dims: list[int] = []
    start = 0
    for size in shape:
        try:
            start = of.index(size, start) + 1
        except ValueError:
            return None
        dims.append(start - 1)
    return dims


def _key(entry: Any) -> Hashable:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
