"""Which parameters rest in files, as their layouts say it."""

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.block_files import TierError
from jzero.collectives import Read, Then
from jzero.host_params import chosen, resting_on_host
from jzero.offload.param_reads import ParamReads
from jzero.zero import Layout, Leaf, Path, ShardingError, Zero


def read_from_files(
    layouts: Mapping[Path, Layout],
    leaves: Iterable[Leaf],
    trained: Collection[Path],
    zero: Zero,
    at_least_bytes: int,
    params: Mapping[Path, Any],
    mesh: Mesh,
) -> tuple[dict[Path, Layout], ParamReads]:
    """`layouts`, of which the large leaves rest in files and are read where a layer reads them; and these reads.

    Args:
        leaves: those of `layouts`, trained and frozen.
        trained: which of them are updated.
        zero: as the layouts were made with.
        at_least_bytes: of one layer of a leaf, unsharded; 0 takes every leaf.
        params: path -> shape and dtype.

    Raises:
        ShardingError: gathered parameters are to stay until the backward pass; no leaf is large enough; or one is
            updated in another layout than it rests in, so that all of it would have to be on the device.
    """
    large = {leaf.path: leaf for leaf in chosen("nvme", leaves, zero, at_least_bytes)}
    _check_updated_where_they_rest(layouts, {path: leaf for path, leaf in large.items() if path in trained})
    # A device that is not here has no memories, and programs for it no host that they could call.
    absent = not mesh.devices.flat[0].addressable_memories()
    moved = {path: resting_on_host(layouts[path]) if absent else layouts[path] for path in large}
    wholes = {
        path: jax.ShapeDtypeStruct(params[path].shape, params[path].dtype, sharding=to.at_rest(mesh))
        for path, to in moved.items()
    }
    reads = ParamReads(mesh, wholes, {path: leaf.layer_dims for path, leaf in large.items()}, called=not absent)
    if not absent:
        moved = {path: _reading(to, large[path], reads) for path, to in moved.items()}
    return {**layouts, **{path: replace(to, in_files=True) for path, to in moved.items()}}, reads


def _check_updated_where_they_rest(layouts: Mapping[Path, Layout], large: Mapping[Path, Leaf]) -> None:
    for path, leaf in large.items():
        if layouts[path].publish.moves:
            raise ShardingError(
                f"offload.params nvme: {leaf.name!r} {leaf.shape} is updated in shards and rests whole, which takes "
                f"all of it on the device; take stage 3 with zero.axes over all data-parallel axes"
            )


def _reading(layout: Layout, leaf: Leaf, reads: ParamReads) -> Layout:
    """The same specs, with a layer's shard read in front of what brings it into use."""

    # JAX's caches keep what it has traced, and with it this function: they would keep the files of a run that is gone.
    there = weakref.ref(reads)

    def read(ticket: Any, device: Any) -> np.ndarray:
        reads = there()
        if reads is None:
            raise TierError(f"{leaf.name}: the run whose files have it is gone; keep the run as long as its programs")
        return reads.layer(leaf.path, int(ticket), int(device))

    dtype, tp_spec = reads.wholes[leaf.path].dtype, P(*leaf.tp_spec[leaf.layer_dims :])
    move = Read(read, reads.layer_shape(leaf.path), str(dtype), tp_spec)
    return replace(layout, use_forward=Then(move, layout.use_forward))
