"""Sizes, variants and numerics of the decoder, and which of them fit each other."""

from dataclasses import dataclass
from typing import Literal, get_args

from jzero.models.attention import Implementation
from jzero.models.positions import RopeScaling

Norm = Literal["rms", "layer"]
Mlp = Literal["swiglu", "gelu"]
Biases = Literal["none", "qkv", "all"]
Remat = Literal["none", "full", "dots"]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and numerics of a Decoder; checked when made.

    Args:
        width: size of the residual stream, D.
        layers: number of blocks, N.
        heads: query heads, H.
        kv_heads: key/value heads, G; must divide `heads`.
        mlp_width: hidden size of the MLP, F.
        vocab: number of token ids, V.
        head_dim: size of one head, K; None: `width / heads`.  Even where positions are rotary.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm, with scale and bias).
        norm_eps: added to the mean square in RMSNorm, to the variance in LayerNorm.
        qk_norm: RMSNorm of every query and key head before rotation (Qwen3), one scale of K for all heads of a layer.
        mlp: "swiglu" (gate, up, down) or "gelu" (up, down; the tanh form of GPT-2).
        biases: of linear layers: "none", "qkv" (Qwen2) or "all" but the head (GPT-2).
        learned_positions: rows of a table that is added to the embedding (GPT-2), the longest sequence there is; None:
            rotary positions.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: "linear" divides all rotary frequencies by `rope_factor`; "llama3" the low ones (Llama 3.1).
        rope_factor: by how much the context is longer than `rope_original_positions`, at least 1.
        rope_low_freq_factor: "llama3" divides waves longer than `rope_original_positions` / this.
        rope_high_freq_factor: "llama3" leaves waves shorter than `rope_original_positions` / this as they are.
        rope_original_positions: context before it was extended.
        window: a token attends to itself and the `window` - 1 tokens before it (Mistral); None: to all before it.
        tied: the output head is the embedding table.
        dropout: rate on the embedding and on both residual branches, in [0, 1).
        remat: what backward recomputes in each block: "none", "dots" (all but matrix products) or "full".
        scan: layers stacked along a leading dim and scanned; False keeps a list and a Python loop, with equal values.
        layers_ahead: how many layers ahead a scan gathers parameters, in a run that shards them; 0: none.
        dtype: of the computation, "float32" or "bfloat16"; norms, rotary angles, logits and losses are float32 anyway.
        param_dtype: of the parameters.
        attention: implementation of `jax.nn.dot_product_attention`: None lets JAX choose, "xla" or "cudnn".

    Raises:
        ValueError: a value is out of range, sizes do not fit each other, or a value would have no effect; the message
            begins with the field's name and names the other field.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocab: int = 256
    head_dim: int | None = None
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    mlp: Mlp = "swiglu"
    biases: Biases = "none"
    learned_positions: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_positions: int = 8192
    window: int | None = None
    tied: bool = False
    dropout: float = 0.0
    remat: Remat = "none"
    scan: bool = True
    layers_ahead: int = 1
    dtype: str = "float32"
    param_dtype: str = "float32"
    attention: Implementation | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_heads(self)
        _check_positions(self)
        if self.attention == "cudnn":
            _check_cudnn(self)

    @property
    def head_size(self) -> int:
        """Size of one head, K."""
        return self.head_dim or self.width // self.heads


_DTYPES = ("float32", "bfloat16")
# The words a field may hold.
_WORDS: dict[str, tuple[object, ...]] = {
    "norm": get_args(Norm),
    "mlp": get_args(Mlp),
    "biases": get_args(Biases),
    "rope_scaling": (None, *get_args(RopeScaling)),
    "remat": get_args(Remat),
    "dtype": _DTYPES,
    "param_dtype": _DTYPES,
    "attention": (None, *get_args(Implementation)),
}
_POSITIVE = ("width", "layers", "heads", "kv_heads", "mlp_width", "vocab", "norm_eps", "rope_theta")
_POSITIVE_OR_NONE = ("head_dim", "learned_positions", "window")
# What has no effect unless scaling is on, or is "llama3", with the defaults that a silent value must have.
_SCALED = {"rope_factor": 1.0}
_LLAMA3 = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_positions": 8192}


def _check_ranges(config: DecoderConfig) -> None:
    for name, allowed in _WORDS.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)!r}: must be one of {', '.join(map(repr, allowed))}")
    for name in (*_POSITIVE, *_POSITIVE_OR_NONE, *_LLAMA3):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value}: must be greater than 0")
    if config.layers_ahead < 0:
        raise ValueError(f"layers_ahead={config.layers_ahead}: must be at least 0")
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"dropout={config.dropout}: must be at least 0 and below 1")


def _check_heads(config: DecoderConfig) -> None:
    if config.head_dim is None and config.width % config.heads:
        raise ValueError(f"width={config.width} is not divisible by heads={config.heads}; give head_dim")
    if config.heads % config.kv_heads:
        raise ValueError(f"heads={config.heads} is not divisible by kv_heads={config.kv_heads}")
    if config.learned_positions is None and config.head_size % 2:
        raise ValueError(
            f"width={config.width} / heads={config.heads} gives heads of odd size {config.head_size}; "
            "rotary positions turn pairs, so the size must be even"
            if config.head_dim is None
            else f"head_dim={config.head_dim}: rotary positions turn pairs, so the size must be even"
        )


def _check_positions(config: DecoderConfig) -> None:
    if config.learned_positions is not None:
        for name, silent in {"rope_theta": 10_000.0, "rope_scaling": None}.items():
            if getattr(config, name) != silent:
                raise ValueError(
                    f"{name}={getattr(config, name)} has no effect: learned_positions={config.learned_positions} "
                    "takes the place of rotary positions"
                )
    for names, scaling in ((_SCALED, ("linear", "llama3")), (_LLAMA3, ("llama3",))):
        for name, silent in names.items():
            if config.rope_scaling not in scaling and getattr(config, name) != silent:
                raise ValueError(
                    f"{name}={getattr(config, name)} has no effect: rope_scaling is {config.rope_scaling or 'none'}, "
                    f"not {' or '.join(scaling)}"
                )
    if config.rope_factor < 1.0:
        raise ValueError(f"rope_factor={config.rope_factor}: must be at least 1")
    if config.rope_scaling == "llama3" and config.rope_low_freq_factor >= config.rope_high_freq_factor:
        raise ValueError(
            f"rope_low_freq_factor={config.rope_low_freq_factor} must be less than "
            f"rope_high_freq_factor={config.rope_high_freq_factor}"
        )


def _check_cudnn(config: DecoderConfig) -> None:
    if config.dtype != "bfloat16":
        raise ValueError(f"attention='cudnn' computes in 16 bits, not in dtype={config.dtype}")
    if config.head_size % 8 or config.head_size > 128:
        raise ValueError(f"attention='cudnn' takes heads of up to 128 that 8 divides, not head size {config.head_size}")
