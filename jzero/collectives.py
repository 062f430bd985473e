"""The collectives of ZeRO, as values: what moves a tensor between two of a parameter's specs.

A collective here is a small frozen object that is called on the tensor of one device inside a region that is manual
over the data-parallel axes.  Being data, it can be stored beside a parameter, compared, hashed into a compiled
program's key, and replaced by another of the same shape of call (a quantised one, say).

Why they are written out instead of left to sharding constraints: XLA:CPU never turns a gradient that is constrained to
a shard into a reduce-scatter (it emits all-reduce and slice), so a proof on the compiled program would hold on one
backend only.  `psum_scatter` in a `shard_map` is a reduce-scatter everywhere.

Why each runs in a second, fully manual `shard_map` over the remaining axes: in a region that is manual over (node, dp)
only, XLA gathers a tp-sharded operand over tp before each data-parallel collective, and 16-bit reductions abort on
XLA:CPU.  Nested, every device moves its own tp slice and nothing else.

Message sizes (`message_bytes`, the full tensor of one device, that is divided by tp): a `Gather` of a leaf with n
elements per tp slice moves n x itemsize of the tensor's dtype, `Scatter` and `AllReduce` n x itemsize of `dtype`.  On
the wire one device sends (N-1)/N of that for a gather or a scatter and 2(N-1)/N for an all-reduce (ring algorithms).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero.mesh import TP


class Collective(Protocol):
    """Anything that takes one device's tensor to another layout."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """The tensor in its new layout."""
        ...


@dataclass(frozen=True)
class Identity:
    """No move at all."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """The same tensor."""
        return x


@dataclass(frozen=True)
class Cast:
    """No traffic; the tensor in `dtype`."""

    dtype: str

    def __call__(self, x: jax.Array) -> jax.Array:
        """The tensor in `dtype`."""
        return x.astype(self.dtype)


@dataclass(frozen=True)
class Gather:
    """All-gather of `dim` over `axes`, in the tensor's own dtype: a shard becomes whole.

    Attributes:
        dim: the dim that is sharded over `axes`.
        axes: mesh axes, the one that varies slowest along the dim first.
        tp_spec: what tensor parallelism has taken of the tensor.
    """

    dim: int
    axes: tuple[str, ...]
    tp_spec: P

    def __call__(self, x: jax.Array) -> jax.Array:
        """[.., n / N, ..] of one device -> [.., n, ..] of all."""
        return _over_tp(lambda s: lax.all_gather(s, self.axes, axis=self.dim, tiled=True), self.tp_spec)(x)


@dataclass(frozen=True)
class Scatter:
    """Reduce-scatter of `dim` over `axes` in `dtype`: every device's whole gradient becomes a shard of the sum."""

    dim: int
    axes: tuple[str, ...]
    tp_spec: P
    dtype: str

    def __call__(self, x: jax.Array) -> jax.Array:
        """[.., n, ..] -> [.., n / N, ..] of the sum over devices, in `dtype`."""

        def scatter(grad: jax.Array) -> jax.Array:
            return lax.psum_scatter(grad, self.axes, scatter_dimension=self.dim, tiled=True)

        return _over_tp(scatter, self.tp_spec)(x.astype(self.dtype))


@dataclass(frozen=True)
class AllReduce:
    """Sum over `axes` in `dtype`."""

    axes: tuple[str, ...]
    tp_spec: P
    dtype: str

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum over devices, of the same shape, in `dtype`."""
        return _over_tp(lambda s: lax.psum(s, self.axes), self.tp_spec)(x.astype(self.dtype))


@dataclass(frozen=True)
class Then:
    """One collective after another."""

    first: Collective
    second: Collective

    def __call__(self, x: jax.Array) -> jax.Array:
        """`second` of `first`."""
        return self.second(self.first(x))


def zeros(shape: tuple[int, ...], dtype: str, tp_spec: P) -> jax.Array:
    """Zeros that are born with their tp sharding, for accumulators inside the manual region.

    Args:
        shape: of the whole tp dim; `tp_spec` divides it.
    """
    tp = jax.sharding.get_abstract_mesh().shape[TP]
    local = tuple(
        n // tp if axis == TP else n for n, axis in zip(shape, tuple(tp_spec) + (None,) * len(shape), strict=False)
    )
    return jax.shard_map(
        lambda: jnp.zeros(local, dtype), axis_names={TP}, in_specs=(), out_specs=tp_spec, check_vma=False
    )()


def mean_over(x: jax.Array, axes: tuple[str, ...], tp_spec: P) -> jax.Array:
    """Average over `axes` of a floating tensor, computed and returned in its own dtype."""
    count = math.prod(lax.axis_size(axis) for axis in axes)
    return (AllReduce(axes, tp_spec, str(x.dtype))(x) / count).astype(x.dtype)


def _over_tp(f: Callable[[jax.Array], jax.Array], spec: P) -> Callable[[jax.Array], jax.Array]:
    return jax.shard_map(f, axis_names={TP}, in_specs=spec, out_specs=spec, check_vma=False)
