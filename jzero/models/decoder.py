"""A Llama-style decoder in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

An ordinary NNX model: it knows its tensor-parallel layout, because that is part of how it computes, and nothing of
how its parameters rest between steps.  Every parameter is read once per call, by indexing its Variable.

Shapes stand in names, `x_BxLxD`; products are written together, `HK` is one dim of size heads * head_dim:

    B  sequences                    V  vocabulary               H  query heads
    L  tokens of a sequence         D  width (residual stream)  G  key/value heads, H = G * queries per group
    N  layers                       F  width of the MLP         K  head_dim = D / H

Tensor parallelism (Shoeybi et al. 2019, section 3): q, k, v, gate and up split their outputs over `tp` (whole heads),
o and down split their inputs, so that each half of a block ends in one all-reduce of x_BxLxD.  The embedding splits D,
not V: a lookup is then local, the gradient rows of tokens that a batch lacks are exactly zero, and any vocabulary
fits.  An untied head splits V where `tp` divides it, else D.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jzero.mesh import TP
from jzero.models.attention import Implementation, causal_attention, rotary_angles, rotate, tp_size, whole_over_tp
from jzero.use import remat_policy

_STACK = "layers"  # name of the attribute that holds the layers
_UNSTACKED = {nnx.PARTITION_NAME: None}  # the layer dim is never a sharded one
_INIT_STD = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and numerics of a Decoder; checked when made.

    Args:
        vocab: number of token ids, V.
        width: size of the residual stream, D; `width / heads` must be a whole, even number.
        layers: number of blocks, N.
        heads: query heads, H.
        kv_heads: key/value heads, G; must divide `heads`.
        mlp_width: hidden size of the SwiGLU MLP, F.
        rope_theta: base of the rotary wavelengths.
        norm_eps: added to the mean square in RMSNorm.
        tied: the output head is the embedding table.
        dropout: rate on the embedding and on both residual branches, in [0, 1).
        remat: what backward recomputes in each block: "none" or "full".
        scan: layers stacked along a leading dim and scanned; False keeps a list and a Python loop, with equal values.
        dtype: of the computation, "float32" or "bfloat16"; norms, rotary angles, logits and losses are float32 anyway.
        param_dtype: of the parameters.
        attention: implementation of `jax.nn.dot_product_attention`: None lets JAX choose, "xla" or "cudnn".

    Raises:
        ValueError: a value is out of range or sizes do not fit each other; the message names both.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocab: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True
    dropout: float = 0.0
    remat: str = "none"
    scan: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    attention: Implementation | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "kv_heads", "mlp_width", "rope_theta", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be greater than 0")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"width={self.width} / heads={self.heads} gives heads of odd size {self.head_dim}; "
                "rotary positions turn pairs, so the size must be even"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        _one_of("remat", self.remat, ("none", "full"))
        _one_of("dtype", self.dtype, ("float32", "bfloat16"))
        _one_of("param_dtype", self.param_dtype, ("float32", "bfloat16"))
        _one_of("attention", self.attention, (None, "xla", "cudnn"))

    @property
    def head_dim(self) -> int:
        """Size of one head, K."""
        return self.width // self.heads


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def _init(spec: tuple[str | None, ...], std: float = _INIT_STD) -> nnx.Initializer:
    # Not sharded eagerly: that would refuse a model made without a mesh.  The annotation is the model's; whoever
    # places the parameters reads it.
    return nnx.with_partitioning(nnx.initializers.normal(std), spec, eager_sharding=False)


def _linear(config: DecoderConfig, inputs: int, outputs: int, init: nnx.Initializer, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        kernel_init=init,
        rngs=rngs,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
    )


def _dropout(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)  # no rate, no random state


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last dim, in float32 (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, config: DecoderConfig) -> None:
        self.scale = nnx.Param(jnp.ones((config.width,), config.param_dtype))
        self.eps = config.norm_eps
        self.dtype = jnp.dtype(config.dtype)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """[B, L, D] in the dtype of the computation."""
        x = x_BxLxD.astype(jnp.float32)
        scale_D = self.scale[...].astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * scale_D[None, None, :]).astype(self.dtype)


class SelfAttention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        D, HK, GK = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        linear = partial(_linear, config, rngs=rngs)
        self.q = linear(D, HK, _init((None, TP)))
        self.k = linear(D, GK, _init((None, TP)))
        self.v = linear(D, GK, _init((None, TP)))
        self.o = linear(HK, D, _init((TP, None), _residual_std(config)))
        self.config = config

    def __call__(self, x_BxLxD: jax.Array, angles_LxP: jax.Array) -> jax.Array:
        """What each token takes from itself and the tokens before it, [B, L, D]."""
        heads = (*x_BxLxD.shape[:2], -1, self.config.head_dim)
        q_BxLxHxK = rotate(self.q(x_BxLxD).reshape(heads), angles_LxP)
        k_BxLxGxK = rotate(self.k(x_BxLxD).reshape(heads), angles_LxP)
        v_BxLxGxK = self.v(x_BxLxD).reshape(heads)
        mixed_BxLxHxK = causal_attention(q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, self.config.attention)
        return self.o(mixed_BxLxHxK.reshape(*x_BxLxD.shape[:2], -1))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, equation 6)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        linear = partial(_linear, config, rngs=rngs)
        self.gate = linear(config.width, config.mlp_width, _init((None, TP)))
        self.up = linear(config.width, config.mlp_width, _init((None, TP)))
        self.down = linear(config.mlp_width, config.width, _init((TP, None), _residual_std(config)))

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Each token by itself, [B, L, D]."""
        return self.down(jax.nn.silu(self.gate(x_BxLxD)) * self.up(x_BxLxD))


def _residual_std(config: DecoderConfig) -> float:
    """Both branches of every layer add to the stream: scaled so that its variance does not grow with depth."""
    return _INIT_STD / (2 * config.layers) ** 0.5


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.mlp_norm = RMSNorm(config), RMSNorm(config)
        self.attention, self.mlp = SelfAttention(config, rngs=rngs), SwiGLU(config, rngs=rngs)
        self.attention_dropout, self.mlp_dropout = _dropout(config, rngs), _dropout(config, rngs)

    def __call__(self, x_BxLxD: jax.Array, angles_LxP: jax.Array) -> jax.Array:
        """The residual stream after this block, [B, L, D]."""
        branch_BxLxD = self.attention(self.attention_norm(x_BxLxD), angles_LxP)
        x_BxLxD = x_BxLxD + self.attention_dropout(whole_over_tp(branch_BxLxD))
        branch_BxLxD = self.mlp(self.mlp_norm(x_BxLxD))
        return x_BxLxD + self.mlp_dropout(whole_over_tp(branch_BxLxD))


class Decoder(nnx.Module):
    """Maps int32 tokens [B, L] to float32 logits [B, L, V] of the next token.

    Layer i draws its initial values and its dropout masks from the i-th of N keys split from the streams of `rngs`,
    stacked or not: `scan=True` and `scan=False` compute the same function.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        rngs = _own_streams(config, rngs)
        self.embedding = nnx.Embed(
            config.vocab,
            config.width,
            embedding_init=_init((None, TP)),
            rngs=rngs,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
        )
        self.embedding_dropout = _dropout(config, rngs)
        self.layers = _make_layers(config, rngs)
        self.norm = RMSNorm(config)
        if not config.tied:
            spec = (None, TP) if config.vocab % max(tp_size(), 1) == 0 else (TP, None)
            self.head = _linear(config, config.width, config.vocab, _init(spec), rngs)

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """Logits float32[B, L, V]; those at position l depend on tokens 0 to l alone."""
        table_VxD = self.embedding.embedding[...]  # one read, also where the head is tied to it
        x_BxLxD = table_VxD[tokens_BxL].astype(self.config.dtype)
        x_BxLxD = self.embedding_dropout(whole_over_tp(x_BxLxD))
        angles_LxP = rotary_angles(tokens_BxL.shape[1], self.config.head_dim, self.config.rope_theta)
        x_BxLxD = self.norm(whole_over_tp(self._through_layers(x_BxLxD, angles_LxP)))
        logits_BxLxV = (
            jnp.einsum("bld,vd->blv", x_BxLxD, table_VxD.astype(x_BxLxD.dtype))
            if self.config.tied
            else self.head(x_BxLxD)
        )
        return logits_BxLxV.astype(jnp.float32)

    def _through_layers(self, x_BxLxD: jax.Array, angles_LxP: jax.Array) -> jax.Array:
        # Inside a scan nothing can be shared between forward and backward bodies, so the barrier against it is idle.
        run = nnx.remat(
            lambda block, x, angles: block(x, angles),
            policy=remat_policy(self.config.remat),
            prevent_cse=not self.config.scan,
        )
        if self.config.scan:
            scanned = nnx.scan(run, in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry, transform_metadata=_UNSTACKED)
            return scanned(self.layers, x_BxLxD, angles_LxP)
        for block in self.layers:
            x_BxLxD = run(block, x_BxLxD, angles_LxP)
        return x_BxLxD


def _own_streams(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Rngs:
    # Rngs(0) has one stream for all names: with dropout drawing from it, initial values would depend on the rate.
    streams = ["params", "dropout"] if config.dropout else ["params"]
    return nnx.Rngs(**{stream: rngs[stream]() for stream in streams})


def _make_layers(config: DecoderConfig, rngs: nnx.Rngs) -> Any:
    keys = {stream: jax.random.split(rngs[stream](), config.layers) for stream in rngs}

    def make(keys: dict[str, jax.Array]) -> Block:
        return Block(config, rngs=nnx.Rngs(**keys))

    if config.scan:
        return nnx.vmap(make, transform_metadata=_UNSTACKED)(keys)
    return nnx.List([make({stream: key[i] for stream, key in keys.items()}) for i in range(config.layers)])


def layer_dims(path: tuple[Any, ...]) -> int:
    """Number of leading layer dims of the Decoder's leaf at `path`: 1 in a stack of layers, else 0.

    Args:
        path: as `nnx.to_flat_state` gives it; a layer of a list has its position, an int, as second element.
    """
    return int(len(path) > 1 and path[0] == _STACK and not isinstance(path[1], int))


def next_token_loss(model: Decoder, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sum of the weighted cross-entropies in nats, and the sum of the weights; both float32 scalars.

    Args:
        model: maps tokens [B, L] to logits [B, L, V].
        batch: "tokens" int32[B, L + 1]; optionally "weights" float[B, L], one per *predicted* token, 1 where left out.

    Raises:
        ValueError: the weights' shape is not that of the predicted tokens.
    """
    inputs_BxL, targets_BxL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    weights_BxL = batch["weights"].astype(jnp.float32) if "weights" in batch else jnp.ones(targets_BxL.shape)
    if weights_BxL.shape != targets_BxL.shape:
        raise ValueError(f"weights have shape {weights_BxL.shape}, but {targets_BxL.shape} tokens are predicted")
    logits_BxLxV = model(inputs_BxL)
    # A comparison instead of an indexed read: it stays local where V is split over tp.
    ids_V = jnp.arange(logits_BxLxV.shape[-1], dtype=targets_BxL.dtype)
    is_target_BxLxV = targets_BxL[..., None] == ids_V[None, None, :]
    target_BxL = jnp.sum(jnp.where(is_target_BxLxV, logits_BxLxV, 0.0), axis=-1)
    loss_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1) - target_BxL
    return jnp.sum(loss_BxL * weights_BxL), jnp.sum(weights_BxL)
