"""ZeRO for JAX: any Flax NNX model, any optax optimizer, ZeRO stages as PartitionSpecs.

run = jzero.setup(model_fn, loss_fn, tx, mesh, batch, stage=3)
state = run.init()
state, metrics = run.step(state, batch)
"""

from jzero import stop  # noqa: F401 (first: a command line may be interrupted while it imports the rest)

# isort: split

from jzero import hlo, targets
from jzero.assemble import setup
from jzero.block_files import TierError
from jzero.chains import make_optimizer
from jzero.checkpoint import Checkpoints, Restored
from jzero.comm import Comm
from jzero.mesh import make_mesh, process_rows
from jzero.optim import averaged
from jzero.placement import Offload
from jzero.precision import Precision
from jzero.reads import UnsupportedModelError
from jzero.run import Run
from jzero.schedules import make_schedule
from jzero.specs import Specs
from jzero.stack import scan_layers
from jzero.step import TrainState
from jzero.stored import CheckpointError, MismatchError
from jzero.use import remat_policy
from jzero.zero import Whole, Zero

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Comm",
    "MismatchError",
    "Offload",
    "Precision",
    "Restored",
    "Run",
    "Specs",
    "TierError",
    "TrainState",
    "UnsupportedModelError",
    "Whole",
    "Zero",
    "averaged",
    "hlo",
    "make_mesh",
    "make_optimizer",
    "make_schedule",
    "process_rows",
    "remat_policy",
    "scan_layers",
    "setup",
    "targets",
]
