"""Flags of a run of the command line that takes seconds, on however many devices there are."""

import jax

TINY = ["--model.width", "16", "--model.layers", "2", "--model.heads", "2", "--model.kv_heads", "2"]
TINY += ["--model.mlp_width", "32", "--data.seq_len", "16", "--data.eval_batches", "2"]


def batch_for_these_devices() -> str:
    return str(2 * jax.device_count())
