"""Published models as rows of a table: sizes and variants, nothing of how they are trained.

The sizes are those of each model's `config.json` or paper.  Dropout is left at 0 (GPT-2 was trained with 0.1), and
vocabularies are those of the published embedding tables, padding included.  A test holds every row to the published
number of parameters.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jzero.models.decoder_config import DecoderConfig

# How a model is computed, not what it is: no preset says anything of it.
RUN_FIELDS = frozenset({"dropout", "remat", "scan", "layers_ahead", "dtype", "param_dtype", "attention"})


def _gpt2(width: int, layers: int, heads: int) -> DecoderConfig:
    # Radford et al. 2019, table 2.  Learned positions, LayerNorm, biases everywhere but in the head, which is tied.
    return DecoderConfig(
        width, layers, heads, heads, 4 * width, vocab=50_257,
        norm="layer", mlp="gelu", biases="all", learned_positions=1024, tied=True,
    )  # fmt: skip


def _llama(width: int, layers: int, heads: int, mlp_width: int, **more: Any) -> DecoderConfig:
    # Touvron et al. 2023a, table 2 (there 33 B and 65 B).  The widths of the MLP and the eps are those of the weights.
    return DecoderConfig(width, layers, heads, heads, mlp_width, vocab=32_000, **more)


def _llama2(width: int, layers: int, heads: int, kv_heads: int, mlp_width: int) -> DecoderConfig:
    # Touvron et al. 2023b, section 2.
    return DecoderConfig(width, layers, heads, kv_heads, mlp_width, vocab=32_000)


def _llama3(width: int, layers: int, heads: int, mlp_width: int, **more: Any) -> DecoderConfig:
    # Grattafiori et al. 2024, table 3.
    return DecoderConfig(width, layers, heads, 8, mlp_width, vocab=128_256, rope_theta=500_000.0, **more)


def _qwen25(width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, **more: Any) -> DecoderConfig:
    # Qwen Team 2024, table 1.
    return DecoderConfig(
        width, layers, heads, kv_heads, mlp_width, biases="qkv", rope_theta=1e6, norm_eps=1e-6, **more
    )  # fmt: skip


def _qwen3(width: int, layers: int, heads: int, mlp_width: int, **more: Any) -> DecoderConfig:
    # Qwen Team 2025, table 1.  Heads of 128 whatever the width.
    return DecoderConfig(
        width, layers, heads, 8, mlp_width, vocab=151_936,
        head_dim=128, qk_norm=True, rope_theta=1e6, norm_eps=1e-6, **more,
    )  # fmt: skip


# The stretch of Llama 3.1's context from 8,192 to 131,072 positions.
_LLAMA31: Mapping[str, Any] = {"rope_scaling": "llama3", "rope_factor": 8.0}

PRESETS: Mapping[str, DecoderConfig] = {
    "tiny": DecoderConfig(128, 2, 4, 4, 384),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "smollm-135m": DecoderConfig(576, 30, 9, 3, 1536, vocab=49_152, tied=True),
    "tinyllama-1.1b": DecoderConfig(2048, 22, 32, 4, 5632, vocab=32_000),
    "llama-30b": _llama(6656, 60, 52, 17_920, norm_eps=1e-6),
    "llama-65b": _llama(8192, 80, 64, 22_016),
    "llama-2-7b": _llama2(4096, 32, 32, 32, 11_008),
    "llama-2-13b": _llama2(5120, 40, 40, 40, 13_824),
    "llama-2-70b": _llama2(8192, 80, 64, 8, 28_672),
    "llama-3-8b": _llama3(4096, 32, 32, 14_336),
    "llama-3-70b": _llama3(8192, 80, 64, 28_672),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336, **_LLAMA31),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672, **_LLAMA31),
    "mistral-7b": DecoderConfig(4096, 32, 32, 8, 14_336, vocab=32_000, window=4096),
    "qwen2.5-0.5b": _qwen25(896, 24, 14, 2, 4864, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen25(3584, 28, 28, 4, 18_944, vocab=152_064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
}


def preset_fields(name: str) -> dict[str, Any]:
    """What the preset `name` says, by field of DecoderConfig; fields of how a model is computed are left out.

    Raises:
        KeyError: there is no such preset.
    """
    return {field: value for field, value in asdict(PRESETS[name]).items() if field not in RUN_FIELDS}
