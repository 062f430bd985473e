"""The mesh-layout experiment: one decoder on four meshes of 8 devices, at each stage.

Printed for each cell, all of one device: time of a step, bytes of the model states (parameters, gradients, optimizer
state), the compiler's peak, and the traffic of a step over each axis (`message_bytes`: full tensors, read off the
compiled program).  Times are medians of interleaved steps on whatever devices there are; on fake CPU devices they
compare programs, not networks.

    python examples/mesh_layouts.py [--steps 5] [--micro-batches 2] [--width 128] [--layers 4]
"""

import argparse
import statistics
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)  # has no effect on real accelerators

import numpy as np
import optax
from flax import nnx

import jzero
from jzero import hlo
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

MESHES = ("dp=8", "dp=4,tp=2", "dp=2,tp=4", "node=2,dp=2,tp=2")


def main() -> None:
    args = arguments()
    config = DecoderConfig(
        width=args.width, layers=args.layers, heads=4, kv_heads=4, mlp_width=3 * args.width, vocab=256, tied=False
    )
    tokens = np.random.default_rng(0).integers(0, 256, (16 * args.micro_batches, 65)).astype(np.int32)
    heads = ("mesh", "stage", "step ms", "states MB", "peak MB", "traffic of a step by axis, MB")
    print("{:<18}{:>6}{:>9}{:>11}{:>9}  {}".format(*heads))
    for mesh in MESHES:
        runs = {stage: make(config, mesh, stage, args, tokens) for stage in range(4)}
        times = measure(runs, tokens, args.steps)
        for stage, run in runs.items():
            program = run.lower()["step"].compile()
            rest, peak = sum(run.at_rest_bytes().values()) + run.grads_bytes(), hlo.memory(program).peak_bytes
            traffic = hlo.traffic(hlo.collectives(program, run.mesh), by=("axes",))
            by_axis = ", ".join(
                f"{'+'.join(axes)} {size / 1e6:.2f}" for (axes,), size in sorted(traffic.items()) if size > 1e3
            )
            print(f"{mesh:<18}{stage:>6}{times[stage] * 1e3:>9.1f}{rest / 1e6:>11.2f}{peak / 1e6:>9.2f}  {by_axis}")


def make(config: DecoderConfig, mesh: str, stage: int, args: argparse.Namespace, tokens: np.ndarray) -> jzero.Run:
    return jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)), next_token_loss, optax.adamw(1e-3), mesh, {"tokens": tokens},
        stage=stage, micro_batches=args.micro_batches, clip_norm=1.0,
    )  # fmt: skip


def measure(runs: dict[int, jzero.Run], tokens: np.ndarray, steps: int) -> dict[int, float]:
    """Median seconds of a step; the stages take turns, so that a busy machine is busy for all of them."""
    states = {stage: run.init() for stage, run in runs.items()}
    seconds: dict[int, list[float]] = {stage: [] for stage in runs}
    for _ in range(steps + 1):  # the first compiles
        for stage, run in runs.items():
            start = time.perf_counter()
            states[stage], metrics = run.step(states[stage], {"tokens": tokens})
            jax.block_until_ready(metrics)
            seconds[stage].append(time.perf_counter() - start)
    return {stage: statistics.median(taken[1:]) for stage, taken in seconds.items()}


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--steps", type=int, default=5)
    cli.add_argument("--micro-batches", type=int, default=2)
    cli.add_argument("--width", type=int, default=128)
    cli.add_argument("--layers", type=int, default=4)
    return cli.parse_args()


if __name__ == "__main__":
    main()
