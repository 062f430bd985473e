"""The collectives of ZeRO, as values: what moves a tensor between two of a parameter's specs, or of its memories.

A collective here is a small frozen object that is called on the tensor of one device inside a region that is manual
over the data-parallel axes.  Being data, it can be stored beside a parameter, compared, hashed into a compiled
program's key, and replaced by another of the same shape of call (a quantised one, say).

Why they are written out instead of left to sharding constraints: XLA:CPU never turns a gradient that is constrained to
a shard into a reduce-scatter (it emits all-reduce and slice), so a proof on the compiled program would hold on one
backend only.  `psum_scatter` in a `shard_map` is a reduce-scatter everywhere.

Why each runs in a second, fully manual `shard_map` over the remaining axes: in a region that is manual over (node, dp)
only, XLA gathers a tp-sharded operand over tp before each data-parallel collective, and 16-bit reductions abort on
XLA:CPU.  Nested, every device moves its own tp slice and nothing else.

`message_bytes` counts full tensors, divided by tp.  On the wire one device sends (N-1)/N of that for a gather or a
scatter and 2(N-1)/N for an all-reduce (ring algorithms).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.mesh import DATA_AXES, TP


class Transition(Protocol):
    """Anything that takes one device's tensor from one layout to another."""

    @property
    def moves(self) -> bool:
        """Whether it takes traffic, over the network or between host and device: it is done ahead, and done again."""
        ...

    def message_bytes(self, elements: int, itemsize: int) -> int:
        """Bytes of the full tensor it sends over the network.

        Args:
            elements: of the tensor when it is whole, divided by tp.
            itemsize: bytes per element of the tensor it is given.
        """
        ...

    def __call__(self, x: jax.Array) -> jax.Array:
        """The tensor in its new layout."""
        ...


class _Stays:
    """What takes no traffic."""

    @property
    def moves(self) -> bool:
        """No."""
        return False

    def message_bytes(self, elements: int, itemsize: int) -> int:  # noqa: ARG002 (nothing, of whatever)
        """None."""
        return 0


class _Sends:
    """What takes traffic."""

    @property
    def moves(self) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True)
class Identity(_Stays):
    """No move at all."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """The same tensor."""
        return x


@dataclass(frozen=True)
class Cast(_Stays):
    """The tensor in `dtype`."""

    dtype: str

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..] -> [..] in `dtype`."""
        return x.astype(self.dtype)


@dataclass(frozen=True)
class Fetch(_Sends):
    """Host memory to device memory, of a tensor whose shape and sharding stay.

    Each device reads the memory of its own host, so no tensor is sent from one device to another.
    """

    def message_bytes(self, elements: int, itemsize: int) -> int:  # noqa: ARG002 (nothing, of whatever)
        """None."""
        return 0

    def __call__(self, x: jax.Array) -> jax.Array:
        """The same tensor in device memory."""
        return jax.device_put(x, jax.memory.Space.Device)


@dataclass(frozen=True)
class Store(_Sends):
    """Device memory to host memory, of a tensor whose shape and sharding stay."""

    def message_bytes(self, elements: int, itemsize: int) -> int:  # noqa: ARG002 (nothing, of whatever)
        """None."""
        return 0

    def __call__(self, x: jax.Array) -> jax.Array:
        """The same tensor in host memory."""
        return jax.device_put(x, jax.memory.Space.Host)


@dataclass(frozen=True)
class Read(_Sends):
    """Files to device memory: a ticket, which says which layer, becomes what the device holds of that layer.

    Attributes:
        read: (ticket, number of the device in the mesh, row by row) -> host array; runs on the host while the program
            waits.
        shape: of the layer on one device.
        dtype: of the layer.
        tp_spec: what tensor parallelism has taken of it.
    """

    read: Callable[[Any, Any], Any]
    shape: tuple[int, ...]
    dtype: str
    tp_spec: P

    def message_bytes(self, elements: int, itemsize: int) -> int:  # noqa: ARG002 (nothing, of whatever)
        """None."""
        return 0

    def __call__(self, x: jax.Array) -> jax.Array:
        """A ticket, [] int32 -> the layer."""

        def read(ticket: jax.Array) -> jax.Array:
            device = lax.axis_index((*DATA_AXES, TP))
            result = jax.ShapeDtypeStruct(self.shape, self.dtype)
            return jax.pure_callback(self.read, result, ticket, device, vmap_method="sequential")

        # All axes manual: JAX takes calls of the host in no other region.
        return jax.shard_map(read, axis_names={TP}, in_specs=P(), out_specs=self.tp_spec, check_vma=False)(x)


@dataclass(frozen=True)
class Gather(_Sends):
    """All-gather of `dim` over `axes`, in the tensor's own dtype: a shard becomes whole.

    Attributes:
        dim: the dim that is sharded over `axes`.
        axes: mesh axes, the one that varies slowest along the dim first.
        tp_spec: what tensor parallelism has taken of the tensor.
    """

    dim: int
    axes: tuple[str, ...]
    tp_spec: P

    def message_bytes(self, elements: int, itemsize: int) -> int:
        """elements x itemsize."""
        return elements * itemsize

    def __call__(self, x: jax.Array) -> jax.Array:
        """[.., n / N, ..] of one device -> [.., n, ..] of all."""
        return over_tp(lambda s: lax.all_gather(s, self.axes, axis=self.dim, tiled=True), self.tp_spec)(x)


@dataclass(frozen=True)
class Scatter(_Sends):
    """Reduce-scatter of `dim` over `axes` in `dtype`: every device's whole gradient becomes a shard of the sum."""

    dim: int
    axes: tuple[str, ...]
    tp_spec: P
    dtype: str

    def message_bytes(self, elements: int, itemsize: int) -> int:  # noqa: ARG002 (it is cast)
        """elements x the size of `dtype`."""
        return elements * jnp.dtype(self.dtype).itemsize

    def __call__(self, x: jax.Array) -> jax.Array:
        """[.., n, ..] -> [.., n / N, ..] of the sum over devices, in `dtype`."""

        def scatter(grad: jax.Array) -> jax.Array:
            return lax.psum_scatter(grad, self.axes, scatter_dimension=self.dim, tiled=True)

        return over_tp(scatter, self.tp_spec)(x.astype(self.dtype))


@dataclass(frozen=True)
class AllReduce(_Sends):
    """Sum over `axes` in `dtype`, of a tensor that is whole or one of `parts` shards."""

    axes: tuple[str, ...]
    tp_spec: P
    dtype: str
    parts: int = 1

    def message_bytes(self, elements: int, itemsize: int) -> int:  # noqa: ARG002 (it is cast)
        """elements / parts x the size of `dtype`."""
        return elements // self.parts * jnp.dtype(self.dtype).itemsize

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum over devices, of the same shape, in `dtype`."""
        return over_tp(lambda s: lax.psum(s, self.axes), self.tp_spec)(x.astype(self.dtype))


@dataclass(frozen=True)
class Then:
    """`second` after `first`."""

    first: Transition
    second: Transition

    @property
    def moves(self) -> bool:
        """Whether either does."""
        return self.first.moves or self.second.moves

    def message_bytes(self, elements: int, itemsize: int) -> int:
        """Of both."""
        return self.first.message_bytes(elements, itemsize) + self.second.message_bytes(elements, itemsize)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`second` of `first`."""
        return self.second(self.first(x))


def over_data(f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`f` in a region of `mesh` that is manual over the data-parallel axes; tp is the compiler's.

    What comes out is not checked to be equal on the devices that its spec says hold the same: JAX cannot see that a
    nested region's sums are.
    """
    return jax.shard_map(
        f, mesh=mesh, axis_names=set(DATA_AXES), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


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


def over_tp(f: Callable[..., jax.Array], spec: P) -> Callable[..., jax.Array]:
    """`f` of one device's slices over tp, in a region that is manual over the data-parallel axes already.

    Args:
        spec: what tensor parallelism has taken of each argument and of the result.
    """
    return jax.shard_map(f, axis_names={TP}, in_specs=spec, out_specs=spec, check_vma=False)
