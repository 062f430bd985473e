"""How collectives are scheduled and combined, as far as that is for a compiler's options to say."""

from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jzero.mesh import TP
from jzero.targets import known_options

# How many collectives may be under way at once.  XLA's own limit is one, and it takes the network to be slow: across
# hosts a layer's gathers then queue for the few matmuls that it lets them hide under, and most of them find none;
# within a host they queue with what tensor parallelism sends.  Else one is best.  Here and below:
# `examples/benchmarks/overlap.md`.
_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
_ACROSS_HOSTS = {_AT_ONCE: 4}
_BESIDE_TP = {_AT_ONCE: 2}
# Two turns of a loop in one body: what one gathers, the next reads where it lies.  Else each layer's parameters are
# copied once, into the loop's carry.  Where layers gather nothing it takes memory and gives no time.
_WHERE_LAYERS_GATHER = {"xla_gpu_enable_while_loop_double_buffering": True}
# How many copies out of host memory may be under way at once, which XLA counts as computations beside the main one.
# Its own limit is two, so of the parameters that a layer fetches all but the last two would be waited for.
_WHERE_LAYERS_FETCH = {"xla_gpu_experimental_parallel_async_compute_limit": 64}


@dataclass(frozen=True)
class Comm:
    """How collectives are scheduled and combined by XLA's GPU compiler; other backends have no such choice.

    Attributes:
        overlap: computation is moved between the start and the end of a collective (the latency-hiding scheduler).
        reduce_bucket_bytes: reductions that stand next to each other are combined up to this size, of what comes out of
            them: shards of a reduce-scatter, whole tensors of an all-reduce. None is XLA's own.
        gather_bucket_bytes: gathers, likewise; None is a layer's, or XLA's own where layers gather nothing.
    """

    overlap: bool = True
    reduce_bucket_bytes: int | None = None
    gather_bucket_bytes: int | None = None

    def compiler_options(
        self, mesh: Mesh, layer_bytes: int = 0, *, layers_fetch: bool = False
    ) -> dict[str, bool | int]:
        """What to compile a program for `mesh` with.

        Args:
            layer_bytes: that one layer gathers, as `gather_bucket_bytes` counts.
            layers_fetch: layers fetch parameters from host memory.

        Raises:
            ValueError: a size of buckets on a mesh without GPUs.
        """
        sizes = {
            "all_gather": self.gather_bucket_bytes,
            "reduce_scatter": self.reduce_bucket_bytes,
            "all_reduce": self.reduce_bucket_bytes,
        }
        device = mesh.devices.flat[0]
        if device.platform not in ("gpu", "cuda"):
            if any(size is not None for size in sizes.values()):
                raise ValueError(
                    f"comm.*_bucket_bytes: collectives are combined by XLA's GPU compiler, not on {device.platform}"
                )
            return {}
        sizes["all_gather"] = self.gather_bucket_bytes or layer_bytes or None
        buckets = {f"xla_gpu_{kind}_combine_threshold_bytes": n for kind, n in sizes.items() if n is not None}
        hosts = {device.process_index: device for device in mesh.devices.flat}
        at_once = _ACROSS_HOSTS if len(hosts) > 1 else _BESIDE_TP if mesh.shape.get(TP, 1) > 1 else {}
        wanted = at_once | (_WHERE_LAYERS_GATHER if layer_bytes else {})
        wanted |= _WHERE_LAYERS_FETCH if layers_fetch else {}
        # These names may go with a version of XLA; a process can compile for its own GPUs alone.
        known = known_options(wanted, hosts.get(jax.process_index(), device)) if self.overlap else {}
        return {"xla_gpu_enable_latency_hiding_scheduler": self.overlap, **buckets, **known}
