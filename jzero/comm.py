"""How collectives are scheduled and combined, as far as that is for a compiler's options to say."""

from dataclasses import dataclass

from jax.sharding import Mesh


@dataclass(frozen=True)
class Comm:
    """How collectives are scheduled and combined by XLA's GPU compiler; other backends have no such choice.

    Attributes:
        overlap: computation is moved between the start and the end of a collective (the latency-hiding scheduler).
        reduce_bucket_bytes, gather_bucket_bytes: reductions, and gathers, that stand next to each other are combined up
            to this size; None is XLA's own.
    """

    overlap: bool = True
    reduce_bucket_bytes: int | None = None
    gather_bucket_bytes: int | None = None

    def compiler_options(self, mesh: Mesh) -> dict[str, bool | int]:
        """What to compile a program for `mesh` with.

        Raises:
            ValueError: a size of buckets on a mesh without GPUs.
        """
        sizes = {
            "all_gather": self.gather_bucket_bytes,
            "reduce_scatter": self.reduce_bucket_bytes,
            "all_reduce": self.reduce_bucket_bytes,
        }
        buckets = {f"xla_gpu_{kind}_combine_threshold_bytes": n for kind, n in sizes.items() if n is not None}
        platform = mesh.devices.flat[0].platform
        if platform not in ("gpu", "cuda"):
            if buckets:
                raise ValueError(
                    f"comm.*_bucket_bytes: collectives are combined by XLA's GPU compiler, not on {platform}"
                )
            return {}
        return {"xla_gpu_enable_latency_hiding_scheduler": self.overlap, **buckets}
