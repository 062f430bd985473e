"""Gradients that rest in host memory: each layer's goes there as the backward pass makes it, and comes back in pieces.

What takes a gradient to where it is accumulated ends with a store, so the loop over layers that makes gradients also
brings them away, one layer's at a time; the slots that they land in, and the sums over microbatches, are host memory
that the program is handed and hands back.  Whatever follows reads them as they were written, layer by layer
(`layerwise.py`) or, in the update, piece by piece: fetch the piece, divide by the weight, clip.  So at most two layers'
gradients are on the device, whatever the model's size, and the arithmetic is that of gradients on the device, element
for element.  (But for the order of additions of a table's on one device: where neither a store nor a collective stands
between, XLA makes the sum over microbatches and the scatter of rows into it one.)

A sum over devices that is formed after accumulation (stages 0 and 1, hybrid sharding) needs whole stacks on the
device, and is refused.  ZeRO-Offload (Ren et al. 2021, section 4) keeps gradients on the host at stages 1 and 2.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jzero.collectives import Identity, Store, Then
from jzero.host_params import HOST, large, layer_bytes
from jzero.placement import MIN_PARAM_BYTES
from jzero.zero import Layout, Leaf, Path, ShardingError


def grads_on_host(
    layouts: Mapping[Path, Layout], leaves: Iterable[Leaf], at_least_bytes: int = MIN_PARAM_BYTES
) -> dict[Path, Layout]:
    """`layouts`, of which the gradients of large leaves are accumulated in host memory.

    Args:
        leaves: the trained ones of `layouts`.
        at_least_bytes: of one layer of a leaf, unsharded; 0 takes every leaf.

    Raises:
        ShardingError: a large leaf's gradient is summed over devices after accumulation, which takes all of its layers
            on the device; or no leaf is large enough.
    """
    chosen = {leaf.path: leaf for leaf in large("grads host", leaves, at_least_bytes)}
    late = [leaf for path, leaf in chosen.items() if layouts[path].finish.moves]
    if late:
        largest = max(late, key=layer_bytes)
        raise ShardingError(
            f"offload.grads host: the gradient of {largest.name!r} ({layer_bytes(largest):,} bytes in a layer, of "
            f"{len(late)} such the largest) is summed over devices after accumulation, all layers on the device; take "
            f"stage 2 or 3 with zero.axes over all data-parallel axes, or offload.min_param_bytes above that if it "
            f"must stay whole"
        )
    return {path: landing_on_host(to) if path in chosen else to for path, to in layouts.items()}


def landing_on_host(layout: Layout) -> Layout:
    """The same specs, with the gradient in host memory; what finishes it is done to pieces (`layerwise.arrived`)."""
    use_backward = Then(layout.use_backward, Store())
    return replace(layout, grads_memory=HOST, use_backward=use_backward, finish=Identity())
