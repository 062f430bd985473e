"""Rotary positions as functions of arrays: angles, how they stretch to longer contexts, and the turn itself.

Shapes as in `jzero.models.decoder`: B sequences (1 where all have the same positions), L tokens, H heads, K head_dim,
P = K / 2 pairs.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

RopeScaling = Literal["linear", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies of a model.

    Attributes:
        head_dim: K, even.
        theta: base of the wavelengths.
        scaling: None, "linear" or "llama3".
        factor: by how much the context grew, >= 1.
        low_freq_factor: of "llama3": waves longer than `original_positions / low_freq_factor` are stretched in full.
        high_freq_factor: of "llama3": waves shorter than `original_positions / high_freq_factor` are left alone.
        original_positions: of "llama3": the context that the model had before.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self) -> jax.Array:
        """Radians per position of each pair, float32[P]: theta ** (-2 i / K) (Su et al. 2021, equation 15), scaled."""
        plain_P = self.theta ** (-jnp.arange(0, self.head_dim, 2, dtype=jnp.float32) / self.head_dim)
        if self.scaling == "linear":  # Chen et al. 2023, equation 4
            return plain_P / self.factor
        return _llama3(self, plain_P) if self.scaling == "llama3" else plain_P


def _llama3(rope: Rope, plain_P: jax.Array) -> jax.Array:
    """Llama 3.1's rule: the share of the plain frequency grows linearly with the number of waves in the old context."""
    waves_P = rope.original_positions * plain_P / (2 * math.pi)
    share_P = (waves_P - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share_P = jnp.clip(share_P, 0.0, 1.0)
    return share_P * plain_P + (1.0 - share_P) * plain_P / rope.factor


def rotary_angles(positions_BxL: jax.Array, rope: Rope) -> jax.Array:
    """Angles float32[B, L, P]: position times frequency, in radians."""
    return positions_BxL.astype(jnp.float32)[:, :, None] * rope.frequencies()[None, None, :]


def rotate(x_BxLxHxK: jax.Array, angles_BxLxP: jax.Array) -> jax.Array:
    """Turns each head's pairs (i, i + K / 2) by their angle, in float32; dtype as given.

    The halves are paired, not neighbours as in the paper: the order in which Llama's published weights are stored.
    """
    cos, sin = jnp.cos(angles_BxLxP)[:, :, None, :], jnp.sin(angles_BxLxP)[:, :, None, :]
    first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxLxHxK.dtype)
