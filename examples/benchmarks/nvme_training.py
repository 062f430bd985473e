"""A training step whose optimizer state is in files, against the best that its computing and its disk allow.

Four things take turns in one process: the step with its state in files; the same programs with all on the device, where
only computing is left; the gradients alone; and the plain disk (`nvme_rate.py`), which reads and writes the bytes of
the state at once, as the step must.  The update is the step less the gradients, in the same round.

The ideal is the longer of computing and disk.  A clip needs the norm of all gradients before the first is applied, so
that a step can do no better than gradients + the longer of update and disk: the second ideal.  Figures are medians over
rounds of what was taken in the same round.

    python examples/benchmarks/nvme_training.py [--dir DISK] [--width 1024] [--layers 10] [--tokens 128] [--rounds 5]
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 1)  # has no effect on real accelerators

import numpy as np
import optax
from flax import nnx
from nvme_rate import Plain

import jzero
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

ROWS = 2
Turn = Callable[[], Any]


class Steps:
    """One run and its state, which goes on from turn to turn."""

    def __init__(self, args: argparse.Namespace, placement: dict[str, Any]) -> None:
        config = DecoderConfig(
            args.width, args.layers, args.heads, args.heads, 3 * args.width, vocab=256, tied=True, dtype=args.dtype
        )
        tokens = np.random.default_rng(0).integers(0, 256, (ROWS, args.tokens // ROWS + 1), np.int32)
        offload = jzero.Offload(**placement, group_size=int(args.group_megabytes * 2**20))
        self.run = jzero.setup(
            lambda: Decoder(config, rngs=nnx.Rngs(0)), next_token_loss, optax.adamw(1e-4),
            jzero.make_mesh("dp=1", jax.devices()[:1]), {"tokens": tokens},
            stage=0, clip_norm=1.0, precision=jzero.Precision(params=args.dtype), offload=offload,
        )  # fmt: skip
        self.state, self._batch = self.run.init(), self.run.put({"tokens": tokens})
        self.losses: list[float] = []

    def step(self) -> None:
        """Until the state is at rest."""
        self.state, metrics = self.run.step(self.state, self._batch)
        jax.block_until_ready((self.state.params, jax.tree.leaves(self.state.opt_state), metrics))
        self.losses.append(float(metrics["loss"]))

    @functools.cached_property
    def _gradients(self) -> Any:
        return self.run.lower()["gradients"].compile()

    def gradients(self) -> None:
        """The first program of a step; the state goes on as it is."""
        jax.block_until_ready(self._gradients(dataclasses.replace(self.state, opt_state=()), self._batch, []))


def main() -> None:
    args = arguments()
    directories = [Path(tempfile.mkdtemp(dir=parent)) for parent in args.dir or [None]]
    try:
        with contextlib.ExitStack() as stack:
            files = Steps(args, {"optimizer": "nvme", "dir": tuple(map(str, directories))})
            stack.callback(files.run.close)
            device = Steps(args, {"optimizer": "device"})
            plain = stack.enter_context(contextlib.closing(Plain(directories, files.run.file_bytes)))
            compare(args, files, device, plain, directories)
    finally:
        for directory in directories:
            shutil.rmtree(directory)


def compare(args: argparse.Namespace, files: Steps, device: Steps, plain: Plain, directories: list[Path]) -> None:
    tell(args, files.run, directories)
    turns: dict[str, Turn] = {
        "files": files.step,
        "device": device.step,
        "gradients": device.gradients,
        "disk": lambda: plain.run("both"),
    }
    seconds = measured(turns, args.rounds)
    report(seconds, files.run.file_bytes / plain.nbytes, files.run.file_bytes)
    if files.losses != device.losses:
        raise SystemExit(f"the losses differ: {files.losses} in files, {device.losses} on the device")


def tell(args: argparse.Namespace, run: jzero.Run, directories: list[Path]) -> None:
    print(
        f"{platform.node()}, {platform.system()} {platform.release()}, {os.cpu_count()} processors, "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, load {os.getloadavg()[0]:.1f}, "
        f"{', '.join(str(directory.parent) for directory in directories)}\n"
        f"{run.parameters:,} parameters in {args.dtype}, adamw; {run.file_bytes / 1e9:.2f} GB of state in "
        f"groups of at most {args.group_megabytes:g} MiB; {args.tokens} tokens; {args.rounds} rounds"
    )


def measured(turns: dict[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn, in an order that changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = np.random.default_rng(0)
    for _ in range(rounds + 2):  # the first compiles, the second finds its memory
        for name in order.permutation(list(turns)):
            begun = time.perf_counter()
            turns[name]()
            seconds[name].append(time.perf_counter() - begun)
    return {name: taken[2:] for name, taken in seconds.items()}


def report(seconds: dict[str, list[float]], plain_share: float, nbytes: int) -> None:
    """Prints the table.

    Args:
        plain_share: bytes of the state by those that the plain disk was given.
        nbytes: of the state.
    """
    step, device, gradients = (np.array(seconds[name]) for name in ("files", "device", "gradients"))
    disk = np.array(seconds["disk"]) * plain_share
    update, in_files = device - gradients, step - gradients
    ideals = {
        "max(computing, disk)": np.maximum(device, disk),
        "gradients + max(update, disk)": gradients + np.maximum(update, disk),
    }
    rows = {
        "step, state in files": step,
        "computing: step, state on the device": device,
        "  gradients": gradients,
        "  update": update,
        "disk: the state read and written at once": disk,
        **{f"ideal: {name}": ideal for name, ideal in ideals.items()},
    }
    for name, taken in rows.items():
        print(f"{name:44}{statistics.median(taken):8.3f} s")
    for name, ideal in ideals.items():
        print(f"step to {name:36}{statistics.median(step / ideal):8.2f}")
    print(
        f"the update with files: {statistics.median(in_files):.3f} s, {statistics.median(nbytes / in_files) / 1e9:.2f} "
        f"GB/s read and as much written; the plain disk {statistics.median(nbytes / disk) / 1e9:.2f}; "
        f"ratio {statistics.median(disk / in_files):.2f}"
    )


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--dir", type=Path, action="append", help="one per disk; the system's temporary directory")
    cli.add_argument("--width", type=int, default=1024)
    cli.add_argument("--layers", type=int, default=10)
    cli.add_argument("--heads", type=int, default=16)
    cli.add_argument("--tokens", type=int, default=128, help=f"of a step, in {ROWS} sequences")
    cli.add_argument(
        "--dtype", default="float32", help="of parameters and computation; with bfloat16 the state has a master"
    )
    cli.add_argument("--group_megabytes", type=float, default=32)
    cli.add_argument("--rounds", type=int, default=5)
    return cli.parse_args()


if __name__ == "__main__":
    main()
