"""A training whose optimizer state is larger than the memory that the process may have; prints the last loss.

python state_beyond_memory.py LIMIT_BYTES nvme|device DIRECTORY
"""

import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero

# 24 sums of gradients for each parameter, all of it one array: 1.6 GB of state for 67 MB of parameters.
WIDTH, LAYERS, MOMENTA = 1024, 16, 24


class Layers(nnx.Module):
    def __init__(self):
        normal = nnx.initializers.normal(0.02)
        self.kernels = nnx.Param(normal(nnx.Rngs(0).params(), (LAYERS, WIDTH, WIDTH)))

    def __call__(self, x):
        return jax.lax.scan(lambda x, kernel: (x + jnp.tanh(x @ kernel), None), x, self.kernels[...])[0]


def loss_fn(model, batch):
    return jnp.sum(jnp.square(model(batch["x"]))), jnp.float32(batch["x"].shape[0])


def main() -> None:
    limit, where, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    files = {"dir": (directory,)} if where == "nvme" else {}
    tx = optax.chain(*[optax.trace(0.1) for _ in range(MOMENTA)], optax.sgd(1e-6))
    batch = {"x": np.ones((4, WIDTH), np.float32)}
    offload = jzero.Offload(optimizer=where, group_size=2**25, **files)
    run = jzero.setup(Layers, loss_fn, tx, "dp=1", batch, offload=offload)
    assert sum(run.tier_bytes()["opt_state"].values()) > limit
    state = run.init()
    for _ in range(2):
        state, metrics = run.step(state, batch)
    print(f"loss {float(metrics['loss'])}")


main()
