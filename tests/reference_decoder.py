"""GPT-2, Llama, Mistral and Qwen in plain numpy and float64, written from the papers, one sequence at a time.

Nothing is shared with the package but the names of parameters and of the settings.
"""

import math
from typing import Any

import numpy as np


def logits(c: Any, params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """[L, V] of one document, from parameters by "layers/0/attention/q/kernel" and the like."""
    x = params["embedding/embedding"][tokens]
    if c.learned_positions:
        x = x + params["positions/embedding"][: len(tokens)]
    for i in range(c.layers):
        layer = {key.removeprefix(f"layers/{i}/"): value for key, value in params.items()}
        x = x + attention(c, layer, norm(c, layer, "attention_norm", x))
        x = x + mlp(c, layer, norm(c, layer, "mlp_norm", x))
    x = norm(c, params, "norm", x)
    return x @ (params["embedding/embedding"].T if c.tied else params["head/kernel"])


def norm(c: Any, params: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    if c.norm == "rms" or name.endswith(("q_norm", "k_norm")):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * params[f"{name}/scale"]
    centred = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + c.norm_eps)
    return centred * params[f"{name}/scale"] + params[f"{name}/bias"]


def linear(layer: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ layer[f"{name}/kernel"] + layer.get(f"{name}/bias", 0.0)


def mlp(c: Any, layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    up = linear(layer, "mlp/up", x)
    if c.mlp == "gelu":  # "gelu_new", as GPT-2's code has it
        return linear(layer, "mlp/down", up * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))))
    gate = linear(layer, "mlp/gate", x)
    return linear(layer, "mlp/down", gate / (1 + np.exp(-gate)) * up)


def attention(c: Any, layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    length, size = len(x), c.head_dim or c.width // c.heads
    q, k, v = (linear(layer, f"attention/{name}", x).reshape(length, -1, size) for name in "qkv")
    if c.qk_norm:
        q, k = norm(c, layer, "attention/q_norm", q), norm(c, layer, "attention/k_norm", k)
    if not c.learned_positions:
        q, k = rotate(c, q), rotate(c, k)
    out = np.zeros((length, c.heads, size))
    for h in range(c.heads):
        group = h // (c.heads // c.kv_heads)
        for t in range(length):
            seen = slice(max(0, t + 1 - (c.window or length)), t + 1)
            scores = k[seen, group] @ q[t, h] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[seen, group]
    return linear(layer, "attention/o", out.reshape(length, -1))


def rotate(c: Any, x: np.ndarray) -> np.ndarray:
    """[L, heads, K]; each pair is a complex number, turned by multiplication."""
    half = x.shape[-1] // 2
    radians = np.array([stretched(c, c.rope_theta ** (-i / half)) for i in range(half)])
    turns = np.exp(1j * np.arange(len(x))[:, None, None] * radians)
    turned = (x[..., :half] + 1j * x[..., half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def stretched(c: Any, frequency: float) -> float:
    """Case by case, as Meta's `apply_scaling` has it."""
    if c.rope_scaling is None:
        return frequency
    if c.rope_scaling == "linear":
        return frequency / c.rope_factor
    wavelength = 2 * math.pi / frequency
    if wavelength < c.rope_original_positions / c.rope_high_freq_factor:
        return frequency
    if wavelength > c.rope_original_positions / c.rope_low_freq_factor:
        return frequency / c.rope_factor
    smooth = c.rope_original_positions / wavelength - c.rope_low_freq_factor
    smooth /= c.rope_high_freq_factor - c.rope_low_freq_factor
    return (1 - smooth) * frequency / c.rope_factor + smooth * frequency
