"""RMSNorm and LayerNorm over the last dim, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jzero.models.decoder_config import DecoderConfig


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last dim, in float32 (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        self.scale = nnx.Param(jnp.ones((size,), config.param_dtype))
        self.eps = config.norm_eps
        self.dtype = jnp.dtype(config.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] in the dtype of the computation."""
        dtype, scale = self.dtype, _float32(self.scale, x.ndim)
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * scale).astype(dtype)


class LayerNorm(nnx.Module):
    """Zero mean and unit variance over the last dim, then scale and bias, in float32 (Ba et al. 2016, equation 4)."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        self.scale = nnx.Param(jnp.ones((size,), config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((size,), config.param_dtype))
        self.eps = config.norm_eps
        self.dtype = jnp.dtype(config.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] in the dtype of the computation."""
        dtype, scale, bias = self.dtype, _float32(self.scale, x.ndim), _float32(self.bias, x.ndim)
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * scale + bias).astype(dtype)


def make_norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, of the kind that `config` names."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config, config.width)


def _float32(parameter: nnx.Param, rank: int) -> jax.Array:
    """A vector along the last of `rank` dims."""
    return jnp.expand_dims(parameter[...].astype(jnp.float32), tuple(range(rank - 1)))
