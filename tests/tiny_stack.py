"""A model of four parameters, which the proofs of offload share: each parameter has programs of its own to compile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tiny_decoder import VOCAB

from jzero.mesh import TP
from jzero.stack import UNSTACKED, scan_layers

WIDTH, INNER = 32, 64


def stack(layers: int = 2, layers_ahead: int = 0, remat: str = "none") -> Callable[[], nnx.Module]:
    """A model function: tokens to logits, through a stack of MLPs under a table that is read twice; tp=4 divides it."""
    return lambda: Stack(layers, {"layers_ahead": layers_ahead, "remat": remat}, rngs=nnx.Rngs(0))


class Layer(nnx.Module):
    """x + down(gelu(up(scale x)))."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.up = _matrix(rngs, (WIDTH, INNER), (None, TP))
        self.down = _matrix(rngs, (INNER, WIDTH), (TP, None))

    def __call__(self, x: jax.Array) -> jax.Array:
        normal = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu((normal * self.scale[...]) @ self.up[...]) @ self.down[...]


class Stack(nnx.Module):
    """Maps int32 tokens [B, L] to float32 logits [B, L, V]."""

    def __init__(self, layers: int, options: dict[str, Any], *, rngs: nnx.Rngs) -> None:
        self._options = options
        self.table = _matrix(rngs, (VOCAB, WIDTH), (None, TP))
        make = nnx.vmap(lambda key: Layer(nnx.Rngs(key)), transform_metadata=UNSTACKED)
        self.layers = make(jax.random.split(rngs.params(), layers))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.table[...]
        x = scan_layers(lambda layer, x: layer(x), self.layers, table[tokens], **self._options)
        return (x @ table.T).astype(jnp.float32)


def _matrix(rngs: nnx.Rngs, shape: tuple[int, int], spec: tuple[Any, Any]) -> nnx.Param:
    make = nnx.with_partitioning(nnx.initializers.normal(0.1), spec)
    return nnx.Param(make(rngs.params(), shape))
