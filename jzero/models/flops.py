"""How many parameters a decoder has, and how many floating point operations training it takes.

By hand from the sizes, so that a plan or a utilisation needs no model; tests hold the counts to the model's own.
"""

from jzero.models.decoder_config import DecoderConfig


def matmul_parameters(config: DecoderConfig) -> int:
    """Parameters that every token is multiplied with: kernels of linear layers, and the head, tied or not.

    Embedding lookups, learned positions, norms and biases take no matrix product and are left out.
    """
    return config.layers * _kernels_per_layer(config) + config.vocab * config.width


def parameter_count(config: DecoderConfig) -> int:
    """All parameters; a tied table counts once."""
    tables = config.vocab * (1 if config.tied else 2) + (config.learned_positions or 0)
    norm = config.width * (1 if config.norm == "rms" else 2)
    qk_norm = 2 * config.head_size if config.qk_norm else 0
    per_layer = _kernels_per_layer(config) + _biases_per_layer(config) + 2 * norm + qk_norm
    return tables * config.width + config.layers * per_layer + norm


def largest_module(config: DecoderConfig) -> int:
    """Parameters of the one module that itself holds most: a table or a linear layer, bias included.

    What DeepSpeed's estimators call the largest layer.
    """
    heads, kv_heads = config.heads * config.head_size, config.kv_heads * config.head_size
    attention, everywhere = config.biases != "none", config.biases == "all"
    linear = [
        (config.width + attention) * heads,
        (config.width + attention) * kv_heads,
        (heads + everywhere) * config.width,
        (config.width + everywhere) * config.mlp_width,
        (config.mlp_width + everywhere) * config.width,
    ]
    return max(*linear, max(config.vocab, config.learned_positions or 0) * config.width)


def flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Model FLOPs of one trained token, forward and backward, at rows of `seq_len` tokens.

    6 per matmul parameter (a multiplication and an addition, once forward and twice backward), and
    12 * layers * heads * head size * tokens attended to: Chowdhery et al. 2022 (PaLM), appendix B.  As there, causal
    attention is counted as if a token attended to the whole row, without the factor 1/2, so that a utilisation from
    this number compares with published ones; recomputation counts nothing.  A window counts as its own length.

    Args:
        config: sizes of the model.
        seq_len: tokens of a row.
    """
    attended = min(seq_len, config.window or seq_len)
    attention = 12 * config.layers * config.heads * config.head_size * attended
    return float(6 * matmul_parameters(config) + attention)


def _kernels_per_layer(config: DecoderConfig) -> int:
    attention = config.width * config.head_size * 2 * (config.heads + config.kv_heads)
    return attention + config.width * config.mlp_width * _mlp_kernels(config)


def _biases_per_layer(config: DecoderConfig) -> int:
    qkv = config.head_size * (config.heads + 2 * config.kv_heads) if config.biases != "none" else 0
    rest = 2 * config.width + config.mlp_width * (_mlp_kernels(config) - 1) if config.biases == "all" else 0
    return qkv + rest


def _mlp_kernels(config: DecoderConfig) -> int:
    return 3 if config.mlp == "swiglu" else 2
