"""Attention as a function of arrays, and where the tensor-parallel axis stands while it runs.

Shapes as in `jzero.models.decoder`: B sequences, L tokens, H query heads, G key/value heads, K head_dim.
"""

from functools import partial
from typing import Literal

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jzero.mesh import TP

Implementation = Literal["xla", "cudnn"]


def tp_size() -> int:
    """Size of the tensor-parallel axis that the compiler still has to place here; 0 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    placed = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)).get(TP)
    return mesh.shape[TP] if placed == AxisType.Auto else 0


def whole_over_tp(x_BxLxD: jax.Array) -> jax.Array:
    """The same values, whole on every tensor-parallel device; the other axes are left as they are.

    Without the hint the compiler may leave the residual stream split along D after a lookup or a reduction, and then
    gathers it in places that differ from program to program.
    """
    if tp_size() < 2:
        return x_BxLxD
    return lax.with_sharding_constraint(x_BxLxD, P(P.UNCONSTRAINED, P.UNCONSTRAINED, None))


def causal_attention(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxK: jax.Array,
    segments_BxL: jax.Array | None = None,
    *,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Softmax attention of each token to itself and the tokens before it, as [B, L, H, K].

    Under a mesh with a tensor-parallel axis each device computes its own heads in a region manual over that axis:
    cuDNN attention does not compile where any axis is left to the compiler.

    Args:
        q_BxLxHxK: queries.
        k_BxLxGxK: keys; G divides H.
        v_BxLxGxK: values.
        segments_BxL: documents of a packed row, int32: a token attends to tokens of its own segment alone.  Costs a
            mask bool[B, 1, L, L]; cuDNN takes it as a bias in 16 bits and computes that bias's gradient too (JAX's
            public interface does not offer cuDNN's packed layout), so 4 bytes x B x L x L of memory in passing.
        window: number of tokens attended to, the token itself included; None: all before it.  cuDNN skips what lies
            outside, XLA masks it.
        implementation: of `jax.nn.dot_product_attention`.

    Raises:
        ValueError: the tensor-parallel axis does not divide the query or the key/value heads.
    """
    attend = partial(_attend, window=window, implementation=implementation)
    if not (tp := tp_size()):
        return attend(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, segments_BxL)
    heads, kv_heads = q_BxLxHxK.shape[2], k_BxLxGxK.shape[2]
    if heads % tp or kv_heads % tp:
        raise ValueError(f"{TP}={tp} must divide both heads={heads} and kv_heads={kv_heads}; choose a smaller {TP}")
    by_head = P(None, None, TP, None)
    return jax.shard_map(
        attend, axis_names={TP}, in_specs=(by_head, by_head, by_head, P()), out_specs=by_head, check_vma=False
    )(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, segments_BxL)


def _attend(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxK: jax.Array,
    segments_BxL: jax.Array | None,
    *,
    window: int | None,
    implementation: Implementation | None,
) -> jax.Array:
    mask = None if segments_BxL is None else segments_BxL[:, None, :, None] == segments_BxL[:, None, None, :]
    return jax.nn.dot_product_attention(
        q_BxLxHxK,
        k_BxLxGxK,
        v_BxLxGxK,
        mask=mask,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),  # tokens before and after the token itself
        implementation=implementation,
    )
