"""Attention and rotary positions as functions of arrays, and where the tensor-parallel axis stands while they run.

Shapes as in `jzero.models.decoder`: B sequences, L tokens, H query heads, G key/value heads, K head_dim, P = K / 2.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
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


def rotary_angles(length: int, head_dim: int, theta: float) -> jax.Array:
    """Angles float32[L, K / 2] of position l and pair i: l * theta ** (-2 i / K) (Su et al. 2021, equation 15)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]


def rotate(x_BxLxHxK: jax.Array, angles_LxP: jax.Array) -> jax.Array:
    """Turns each head's pairs (i, i + K / 2) by their angle, in float32; dtype as given.

    The halves are paired, not neighbours as in the paper: the order in which Llama's published weights are stored.
    """
    cos, sin = jnp.cos(angles_LxP)[None, :, None, :], jnp.sin(angles_LxP)[None, :, None, :]
    first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxLxHxK.dtype)


def causal_attention(
    q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array, implementation: Implementation | None = None
) -> jax.Array:
    """Softmax attention of each token to itself and the tokens before it, as [B, L, H, K].

    Under a mesh with a tensor-parallel axis each device computes its own heads in a region manual over that axis:
    cuDNN attention does not compile where any axis is left to the compiler.

    Raises:
        ValueError: the tensor-parallel axis does not divide the query or the key/value heads.
    """
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    if not (tp := tp_size()):
        return attend(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK)
    heads, kv_heads = q_BxLxHxK.shape[2], k_BxLxGxK.shape[2]
    if heads % tp or kv_heads % tp:
        raise ValueError(f"{TP}={tp} must divide both heads={heads} and kv_heads={kv_heads}; choose a smaller {TP}")
    by_head = P(None, None, TP, None)
    return jax.shard_map(attend, axis_names={TP}, in_specs=(by_head,) * 3, out_specs=by_head, check_vma=False)(
        q_BxLxHxK, k_BxLxGxK, v_BxLxGxK
    )
