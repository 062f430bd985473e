"""The blocks of the decoder: attention and MLP with their linear layers.  Shapes as in `jzero.models.decoder`."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.mesh import TP
from jzero.models.attention import causal_attention, whole_over_tp
from jzero.models.decoder_config import DecoderConfig
from jzero.models.norms import RMSNorm, make_norm
from jzero.models.positions import rotate

Spec = tuple[str | None, ...]
_INIT_STD = 0.02
# Column-parallel layers split their outputs, row-parallel ones their inputs; a bias lies along the outputs.  That of a
# row-parallel layer is whole and added to the sum over `tp`, once.
_COLUMNS: Spec = (None, TP)
_ROWS: Spec = (TP, None)


def annotated(initializer: nnx.Initializer, spec: Spec) -> nnx.Initializer:
    """`initializer` that marks its parameter with the spec that tensor parallelism gives it.

    Not sharded eagerly: that would refuse a model made without a mesh.  The annotation is the model's; whoever places
    the parameters reads it.
    """
    return nnx.with_partitioning(initializer, spec, eager_sharding=False)


def normal(spec: Spec, std: float = _INIT_STD) -> nnx.Initializer:
    """Initial values of a matrix of spec `spec`."""
    return annotated(nnx.initializers.normal(std), spec)


def make_linear(
    config: DecoderConfig,
    inputs: int,
    outputs: int,
    spec: Spec,
    *,
    rngs: nnx.Rngs,
    std: float = _INIT_STD,
    bias: bool = False,
) -> nnx.Linear:
    """A linear layer with a kernel [inputs, outputs] of spec `spec`, in the dtypes of `config`."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        kernel_init=normal(spec, std),
        bias_init=annotated(nnx.initializers.zeros_init(), spec[1:]),
        rngs=rngs,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
    )


def make_dropout(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Dropout of the rate in `config`; without a rate it holds no random state."""
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


def _residual_std(config: DecoderConfig) -> float:
    """Both branches of every layer add to the stream: scaled so that its variance does not grow with depth."""
    return _INIT_STD / (2 * config.layers) ** 0.5


class SelfAttention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        D, HK, GK = config.width, config.heads * config.head_size, config.kv_heads * config.head_size
        columns = partial(make_linear, config, spec=_COLUMNS, rngs=rngs, bias=config.biases != "none")
        self.q, self.k, self.v = columns(D, HK), columns(D, GK), columns(D, GK)
        self.o = make_linear(config, HK, D, _ROWS, rngs=rngs, std=_residual_std(config), bias=config.biases == "all")
        self.q_norm = RMSNorm(config, config.head_size) if config.qk_norm else None
        self.k_norm = RMSNorm(config, config.head_size) if config.qk_norm else None
        self.config = config

    def __call__(self, x_BxLxD: jax.Array, angles_BxLxP: jax.Array | None, segments_BxL: jax.Array | None) -> jax.Array:
        """What each token takes from itself and the tokens before it, [B, L, D]."""
        heads = (*x_BxLxD.shape[:2], -1, self.config.head_size)
        q_BxLxHxK = self.q(x_BxLxD).reshape(heads)
        k_BxLxGxK = self.k(x_BxLxD).reshape(heads)
        v_BxLxGxK = self.v(x_BxLxD).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BxLxHxK, k_BxLxGxK = self.q_norm(q_BxLxHxK), self.k_norm(k_BxLxGxK)
        if angles_BxLxP is not None:
            q_BxLxHxK, k_BxLxGxK = rotate(q_BxLxHxK, angles_BxLxP), rotate(k_BxLxGxK, angles_BxLxP)
        mixed_BxLxHxK = causal_attention(
            q_BxLxHxK,
            k_BxLxGxK,
            v_BxLxGxK,
            segments_BxL,
            window=self.config.window,
            implementation=self.config.attention,
        )
        return self.o(mixed_BxLxHxK.reshape(*x_BxLxD.shape[:2], -1))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, equation 6)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        D, F, bias = config.width, config.mlp_width, config.biases == "all"
        self.gate = make_linear(config, D, F, _COLUMNS, rngs=rngs, bias=bias)
        self.up = make_linear(config, D, F, _COLUMNS, rngs=rngs, bias=bias)
        self.down = make_linear(config, F, D, _ROWS, rngs=rngs, std=_residual_std(config), bias=bias)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Each token by itself, [B, L, D]."""
        return self.down(jax.nn.silu(self.gate(x_BxLxD)) * self.up(x_BxLxD))


class GeluMlp(nnx.Module):
    """down(gelu(up(x))), with the tanh form of gelu (Hendrycks and Gimpel 2016, section 2), as in GPT-2."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        D, F, bias = config.width, config.mlp_width, config.biases == "all"
        self.up = make_linear(config, D, F, _COLUMNS, rngs=rngs, bias=bias)
        self.down = make_linear(config, F, D, _ROWS, rngs=rngs, std=_residual_std(config), bias=bias)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Each token by itself, [B, L, D]."""
        return self.down(jax.nn.gelu(self.up(x_BxLxD), approximate=True))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention = SelfAttention(config, rngs=rngs)
        self.mlp = (SwiGLU if config.mlp == "swiglu" else GeluMlp)(config, rngs=rngs)
        self.attention_dropout, self.mlp_dropout = make_dropout(config, rngs), make_dropout(config, rngs)

    def __call__(self, x_BxLxD: jax.Array, angles_BxLxP: jax.Array | None, segments_BxL: jax.Array | None) -> jax.Array:
        """The residual stream after this block, [B, L, D].

        Args:
            x_BxLxD: the residual stream.
            angles_BxLxP: of the rotary positions, B may be 1; None where positions are learned.
            segments_BxL: document of each token; None: a row is one document.
        """
        branch_BxLxD = self.attention(self.attention_norm(x_BxLxD), angles_BxLxP, segments_BxL)
        x_BxLxD = x_BxLxD + self.attention_dropout(whole_over_tp(branch_BxLxD))
        branch_BxLxD = self.mlp(self.mlp_norm(x_BxLxD))
        return x_BxLxD + self.mlp_dropout(whole_over_tp(branch_BxLxD))
