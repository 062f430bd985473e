"""One model trained with its optimizer state on the device, in host memory and in files: equal losses, other places.

Prints a row per placement: what one device holds between steps of optimizer state and parameters, what rests
elsewhere, the last loss and how far any loss is from the first row's, and the time of a step (median; the placements
take turns).  On CPU devices "host" and "device" are the same memory, so the times show
what the groups, the copies and the disk cost, and nothing of a link between host and device.

    python examples/offload.py [--dir DISK ...] [--steps 10] [--width 256] [--group_size 4194304]
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)  # has no effect on real accelerators

import numpy as np
import optax
from flax import nnx

import jzero
from jzero import compile_cache, data
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

SEQ_LEN = 64


@dataclass
class Placement:
    """One run, and what it showed."""

    name: str
    run: jzero.Run
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", action="append", help="for the files, one for each disk; none: a temporary one")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--group_size", type=int, default=2**22, help="bytes that are worked on together")
    args = parser.parse_args()
    compile_cache.use(compile_cache.AUTO)  # the next start compiles nothing
    with tempfile.TemporaryDirectory() as scratch:
        files = {"optimizer": "nvme", "dir": tuple(args.dir or [scratch])}
        placements = [
            Placement("at once, on the device", make_run(args, {})),
            Placement("in groups, on the device", make_run(args, {"optimizer": "device"})),
            Placement("host memory", make_run(args, {"optimizer": "host"})),
            Placement("host memory, parameters too", make_run(args, {"optimizer": "host", "params": "host"})),
            Placement("host memory, updated on the CPU", make_run(args, {"optimizer": "host", "update": "cpu"})),
            Placement("files", make_run(args, files)),
            Placement("files, parameters too", make_run(args, {**files, "params": "nvme"})),
        ]
        train(placements, args.steps)
        print(table(placements))


def make_run(args: argparse.Namespace, where: dict[str, Any]) -> jzero.Run:
    """A small decoder on all devices, at stage 3, with its optimizer state `where`."""
    model = DecoderConfig(width=args.width, layers=4, heads=4, kv_heads=4, mlp_width=3 * args.width, vocab=256)
    settings = {"group_size": args.group_size, "min_param_bytes": 0} | where
    return jzero.setup(
        lambda: Decoder(model, rngs=nnx.Rngs(0)),
        next_token_loss,
        optax.adamw(1e-3, weight_decay=0.1),
        None,
        data.shapes(16, SEQ_LEN, "none"),
        clip_norm=1.0,
        offload=jzero.Offload(**settings),
    )


def train(placements: list[Placement], steps: int) -> None:
    """The same steps for all, in turns."""
    rng = np.random.default_rng(0)
    batches = [{"tokens": rng.integers(0, 256, (16, SEQ_LEN + 1), dtype=np.int32)} for _ in range(steps)]
    states = [placement.run.init() for placement in placements]
    for batch in batches:
        for i, placement in enumerate(placements):
            start = time.perf_counter()
            states[i], metrics = placement.run.step(states[i], placement.run.put(batch))
            placement.losses.append(float(metrics["loss"]))
            jax.block_until_ready(states[i].params)
            placement.seconds.append(time.perf_counter() - start)


def table(placements: list[Placement]) -> str:
    """A row per placement; MB are 10^6 bytes of one device."""
    rows = [
        "| placement | device | host | files | last loss | largest difference | step |",
        "|---|---|---|---|---|---|---|",
    ]
    first = placements[0].losses
    for p in placements:
        tiers = p.run.tier_bytes().values()
        held = [sum(of.get(tier, 0) for of in tiers) / 1e6 for tier in ("device", "host", "nvme")]
        difference = max(abs(a - b) for a, b in zip(p.losses, first, strict=True))
        step = statistics.median(p.seconds[2:] or p.seconds)
        cells = [
            p.name,
            *(f"{n:.2f} MB" for n in held),
            f"{p.losses[-1]:.4f}",
            f"{difference:.1e}",
            f"{step * 1e3:.0f} ms",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
