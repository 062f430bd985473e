"""What a run of the command line left: its metrics, and the arrays of its checkpoints as they lie there."""

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp


def losses(run_dir: Path) -> list[tuple]:
    """(step, loss, gradient norm, learning rate, tokens so far) of every line of training."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"], line["tokens"]) for line in trained]


def arrays(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Name -> array of a checkpoint."""
    path = run_dir / "checkpoints" / str(step) / "state"
    tree = ocp.PyTreeCheckpointHandler().metadata(path).tree
    args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
    return ocp.PyTreeCheckpointHandler().restore(path, args=ocp.args.PyTreeRestore(restore_args=args))


def names(directory: Path) -> list[str]:
    """What is in a directory, which may not be there."""
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []
