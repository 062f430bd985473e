"""Which parameters rest in files, as their layouts say it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import Read, Then
from jzero.host_params import chosen, resting_on_host
from jzero.offload.param_files import ParamFiles
from jzero.zero import Layout, Leaf, Path, ShardingError, Zero


def in_files(
    layouts: Mapping[Path, Layout],
    leaves: Iterable[Leaf],
    zero: Zero,
    at_least_bytes: int,
    params: Mapping[Path, Any],
    mesh: Mesh,
) -> tuple[dict[Path, Layout], ParamFiles]:
    """`layouts`, of which the large leaves rest in files and are read where a layer reads them; and those files.

    Args:
        leaves: those of `layouts`, trained and frozen.
        zero: as the layouts were made with.
        at_least_bytes: of one layer of a leaf, unsharded; 0 takes every leaf.
        params: path -> shape and dtype.

    Raises:
        ShardingError: gathered parameters are to stay until the backward pass; no leaf is large enough; or one is
            updated in another layout than it rests in, so that all of it would have to be on the device.
    """
    large = {leaf.path: leaf for leaf in chosen("nvme", leaves, zero, at_least_bytes)}
    for path, leaf in large.items():
        if layouts[path].publish.moves:
            raise ShardingError(
                f"offload.params nvme: {leaf.name!r} {leaf.shape} is updated in shards and rests whole, which takes "
                f"all of it on the device; take stage 3 with zero.axes over all data-parallel axes"
            )
    # A device that is not here has no memories, and programs for it no host that they could call.
    absent = not mesh.devices.flat[0].addressable_memories()
    files = ParamFiles(mesh, {path: leaf.layer_dims for path, leaf in large.items()}, called=not absent)
    if absent:
        moved = {path: replace(resting_on_host(layouts[path]), in_files=True) for path in large}
        return {**layouts, **moved}, files
    moved = {path: _resting(layouts[path], leaf, params[path], mesh, files) for path, leaf in large.items()}
    return {**layouts, **moved}, files


def _resting(layout: Layout, leaf: Leaf, x: Any, mesh: Mesh, files: ParamFiles) -> Layout:
    """The same specs, at rest in files."""
    shape = NamedSharding(mesh, layout.params).shard_shape(x.shape)[leaf.layer_dims :]

    def read(ticket: Any, device: Any) -> np.ndarray:
        return files.layer(leaf.path, int(ticket), int(device))

    move = Read(read, shape, str(x.dtype), P(*leaf.tp_spec[leaf.layer_dims :]))
    return replace(layout, in_files=True, use_forward=Then(move, layout.use_forward))
