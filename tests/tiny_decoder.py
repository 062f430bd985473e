"""The small decoder and its batches, which the proofs of the core share."""

import math
from collections.abc import Callable

import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

import jzero
from jzero.models.decoder import Decoder, DecoderConfig

SEQ = 8
VOCAB = 96


def decoder(**changes) -> Callable[[], nnx.Module]:
    """A model function for a tiny decoder: 2 layers in a plain scan, width 32, nothing that tp=4 does not divide."""
    sizes = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 4, "mlp_width": 64, "vocab": VOCAB, "tied": False}
    config = DecoderConfig(**({"layers_ahead": 0} | sizes | changes))
    return lambda: Decoder(config, rngs=nnx.Rngs(0))


def batches(count: int, rows: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Random tokens with random 0/1 weights, so that devices and microbatches carry different total weights."""
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(0, VOCAB, (rows, SEQ + 1)).astype(np.int32),
            "weights": (rng.random((rows, SEQ)) < rng.random((rows, 1))).astype(np.float32),
        }
        for _ in range(count)
    ]


def layer_bytes(run: jzero.Run) -> int:
    """Parameters of one layer on one device, whole but for tensor parallelism."""
    shapes, specs = flatten_dict(run.abstract_state.params), flatten_dict(run.specs.params)
    tp = run.mesh.shape["tp"]
    sizes = [
        math.prod(x.shape[1:]) * x.dtype.itemsize // (tp if "tp" in specs[path] else 1)
        for path, x in shapes.items()
        if path[0] == "layers"
    ]
    return sum(sizes)
