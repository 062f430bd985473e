"""ZeRO for JAX: any Flax NNX model, any optax optimizer, ZeRO stages as PartitionSpecs.

    run = jzero.setup(model_fn, loss_fn, tx, mesh, batch, stage=3)
    state = run.init()
    state, metrics = run.step(state, batch)
"""

from jzero.mesh import make_mesh
from jzero.reads import UnsupportedModel
from jzero.step import Precision, Run, Specs, TrainState, setup
from jzero.use import remat_policy
from jzero.zero import Whole, Zero

__all__ = [
    "Precision",
    "Run",
    "Specs",
    "TrainState",
    "UnsupportedModel",
    "Whole",
    "Zero",
    "make_mesh",
    "remat_policy",
    "setup",
]
