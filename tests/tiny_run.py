"""Flags of a run of the command line that takes seconds, on however many devices there are, and its texts."""

from pathlib import Path

import jax
import numpy as np

TINY = ["--model.width", "16", "--model.layers", "2", "--model.heads", "2", "--model.kv_heads", "2"]
TINY += ["--model.mlp_width", "32", "--data.seq_len", "16", "--data.eval_batches", "2"]


def batch_for_these_devices() -> str:
    return str(2 * jax.device_count())


def fox_text(directory: Path) -> Path:
    """A text that repeats itself: learnt at once."""
    path = directory / "corpus.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return path


def random_text(directory: Path) -> Path:
    """A text of random words: every sequence is another one."""
    path = directory / "corpus.txt"
    chosen = np.random.default_rng(0).choice(["zero", "shards", "state", "gather ", "scatter\n"], 6000)
    path.write_text(" ".join(chosen))
    return path
