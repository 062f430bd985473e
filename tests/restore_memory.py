"""Measures the memory of saving and restoring: `python restore_memory.py DIRECTORY` prints JSON.

Wants MALLOC_MMAP_THRESHOLD_, so that what the process has freed is the system's again.
"""

import gc
import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import jzero
from jzero import reader

WIDTH = 2048


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(WIDTH, 512, use_bias=False, rngs=rngs) for _ in range(8)])

    def __call__(self, x):
        x = self.down(self.up(x))
        return sum(head(x).astype(np.float32).sum() for head in self.heads)


def setup(mesh, stage, dtype):
    batch = {"x": np.zeros((8, WIDTH), dtype)}
    precision = jzero.Precision(params=dtype)
    tx = optax.adam(1e-3)
    loss = lambda model, batch: (model(batch["x"]), np.float32(8))  # noqa: E731
    return jzero.setup(lambda: Model(nnx.Rngs(0)), loss, tx, mesh, batch, stage=stage, precision=precision)


def kilobytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def added(work):
    """(bytes of the state that work returned, bytes that the process grew by at most, meanwhile)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    state = work()
    peak = kilobytes("VmHWM") - before
    return sum(sum(shard.data.nbytes for shard in x.addressable_shards) for x in jax.tree.leaves(state)), peak * 1024


def added_by_saving(run, directory):
    state = jax.block_until_ready(run.init())

    def save():
        with jzero.Checkpoints(directory) as checkpoints:
            checkpoints.save(1, state)
        return state

    return added(save)


def main(directory):
    reader._IN_PASSING_BYTES = 2**26  # by default it is more than all of this
    run = setup("dp=8", 3, "float32")
    result = {"save": added_by_saving(run, directory)}
    for name, target in {
        "same": run,
        "mesh": setup("dp=4,tp=2", 3, "float32"),
        "precision": setup("dp=8", 3, "bfloat16"),
    }.items():

        def restore(target=target):
            state = jzero.Checkpoints(directory).restore(target.abstract_state).state
            return jax.block_until_ready(state)

        added(restore)  # compiles
        result[name] = added(restore)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
