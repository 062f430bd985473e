"""Parameters that rest in host memory: a fetch in front of what brings them into use, and nothing else.

The train state holds such a parameter in its host's memory, a shard or whole as its stage says.  Where a layer reads
it, one layer's slice comes over to the device, and is gathered there if it is a shard:

    stage 0, 1, 2   use = fetch
    stage 3         use = gather after fetch

So a fetch happens wherever a gather does: in the loop over layers, as many layers ahead, in the backward pass again,
and never for a whole stack.  On the device there are the layers under way and no parameters at rest.  Gradients, their
sums and all that follows stay as they were, bit for bit, as what is computed with is the same.

DeepSpeed's `offload_param` exists at stage 3 only.  Here it is another first step of the same move, at any stage.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jzero.collectives import Fetch, Then
from jzero.placement import MIN_PARAM_BYTES
from jzero.zero import Layout, Leaf, Path, ShardingError, Zero

#: The memory that a device copies from without its host's help.
HOST = "pinned_host"


def on_host(
    layouts: Mapping[Path, Layout], leaves: Iterable[Leaf], zero: Zero, at_least_bytes: int = MIN_PARAM_BYTES
) -> dict[Path, Layout]:
    """`layouts`, of which the large leaves rest in host memory and are fetched where they are read.

    Args:
        leaves: those of `layouts`, trained and frozen.
        zero: as the layouts were made with.
        at_least_bytes: of one layer of a leaf, unsharded; 0 takes every leaf.

    Raises:
        ShardingError: gathered parameters are to stay until the backward pass, so all would be on the device at once;
            or no leaf is large enough.
    """
    paths = {leaf.path for leaf in chosen("host", leaves, zero, at_least_bytes)}
    return {path: resting_on_host(to) if path in paths else to for path, to in layouts.items()}


def chosen(place: str, leaves: Iterable[Leaf], zero: Zero, at_least_bytes: int) -> list[Leaf]:
    """The leaves that rest in a place outside of the device.

    Raises:
        ShardingError: as `on_host`.
    """
    if not zero.regather:
        raise ShardingError(
            f"offload.params {place} with zero.regather false: parameters would stay on the device from forward to "
            f"backward, all layers at once; take zero.regather true, or leave the parameters on the device"
        )
    return large(f"params {place}", leaves, at_least_bytes)


def large(wanted: str, leaves: Iterable[Leaf], at_least_bytes: int) -> list[Leaf]:
    """The leaves that are worth a copy.

    Args:
        wanted: of which setting, and its value.
        at_least_bytes: of one layer of a leaf, unsharded; 0 takes every leaf that has any.

    Raises:
        ShardingError: there are none.
    """
    sizes = [(leaf, layer_bytes(leaf)) for leaf in leaves]
    found = [leaf for leaf, size in sizes if size >= max(1, at_least_bytes)]
    if not found:
        raise ShardingError(
            f"offload.{wanted}: no parameter has {at_least_bytes:,} bytes in a layer, the largest has "
            f"{max((size for _, size in sizes), default=0):,}, so nothing would leave the device; take a lower "
            f"offload.min_param_bytes, or leave offload.{wanted.partition(' ')[0]} at none"
        )
    return found


def resting_on_host(layout: Layout) -> Layout:
    """The same specs, at rest in host memory."""
    return replace(layout, memory=HOST, use_forward=Then(Fetch(), layout.use_forward))


def layer_bytes(leaf: Leaf) -> int:
    """Bytes of one layer of a parameter, unsharded."""
    return math.prod(leaf.shape[leaf.layer_dims :]) * leaf.bytes_per_element
