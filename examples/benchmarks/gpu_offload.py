"""The largest decoder that one GPU trains with nothing, its optimizer, or its parameters too in host memory.

Decoders of width 4,096, bfloat16 parameters, adamw with float32 master, m and v, rematerialised in full.  Each size is
tried in a process of its own, which an out-of-memory ends alone, within a share of the time; the first guess is
arithmetic, and the search goes on from there (`largest_size.py`).  The slowdown is that
at a size which fits without offload.  The link's share is the bytes that a step must move at least, by arithmetic, over
its seconds and over what pinned copies reach in the same process, each direction alone.

    python examples/benchmarks/gpu_offload.py [--minutes 7.5] [--json FILE]      on a machine with one GPU
    python examples/benchmarks/gpu_offload.py --tiny                           runs anywhere; a CPU has no such link

`--micro_batches` is the accumulation, over which the traffic of the optimizer is spread.  Exit status: 1 where no try
of a placement succeeded.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from largest_size import Budget, in_process, largest

from jzero.host_memory import VARIABLE

_START = time.monotonic()
_REPORT_S = 2.0  # to end the last process and to print
_SEARCH = 3  # tries that a search has time for, as others take


class Size(NamedTuple):
    """A decoder and its sequences of one microbatch."""

    layers: int
    rows: int = 4
    width: int = 4096
    heads: int = 32
    mlp_width: int = 11_008
    vocab: int = 32_000
    seq_len: int = 2048

    @property
    def parameters(self) -> int:
        """Of the matrices."""
        layer = 4 * self.width**2 + 3 * self.width * self.mlp_width
        return self.layers * layer + 2 * self.vocab * self.width


TINY = Size(2, 2, 64, 4, 128, 256, 64)
OFFLOADS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer": {"optimizer": "host"},
    "optimizer, parameters": {"optimizer": "host", "params": "host"},
    "optimizer, updated on the CPU": {"optimizer": "host", "update": "cpu"},
}
# Bytes of a parameter on the device (parameters, gradients, state) and in host memory.
ON_DEVICE = {"nothing": 18, "optimizer": 6, "optimizer, parameters": 4, "optimizer, updated on the CPU": 6}
ON_HOST = {"nothing": 0, "optimizer": 12, "optimizer, parameters": 14, "optimizer, updated on the CPU": 12}
HEAD = "| offload | layers | parameters, B | s / step | tokens/s | of link, in | of link, out | slowdown |"


def main() -> int:
    args = arguments()
    if args.measure:
        layers, name = json.loads(args.measure)
        print(json.dumps(measured(sized(layers, args), name, args)))
        return 0
    names = [*OFFLOADS] if args.cpu_update else [*OFFLOADS][:3]
    lines = measurements(names, args)
    done = [line for line in lines if "error" not in line]
    machine = done[0]["device"] if done else "no device"
    print(f"\n{machine}, {args.micro_batches} microbatches of {sized(1, args).rows} x {sized(1, args).seq_len} tokens, "
          f"host memory up to {args.host_gb} GB; medians of {args.steps} steps\n")  # fmt: skip
    print("\n".join([HEAD, "|" + " --- |" * 8, *map(row, lines)]))
    if args.json:
        Path(args.json).write_text(json.dumps(lines, indent=1))
    return 0 if {line["offload"] for line in done} >= set(names) else 1


def measurements(names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The largest size without offload, that size with it, and the largest with it; each has its share of the time."""
    budget = Budget(_START + 60 * args.minutes - _REPORT_S)
    others, searches = names[1:], 0 if args.tiny else len(names) - 1
    parts = len(others) + _SEARCH * (1 + searches)  # in units of one try

    def search(name: str, share: float) -> dict[str, Any]:
        guess = TINY.layers if args.tiny else estimate(name, args)
        attempt = functools.partial(tried, name=name, args=args)
        found = largest(attempt, guess, budget.part(share), tries=1 if args.tiny else 4)
        return {"offload": name, "layers": guess} | found

    base = search(names[0], _SEARCH / parts)
    lines = [base]
    for k, name in enumerate(others if "error" not in base else ()):
        same = tried(base["layers"], budget.part(1 / (len(others) - k + _SEARCH * searches)).left_s, name, args)
        if "error" not in same:
            same["slowdown"] = same["seconds"] / base["seconds"]
        lines.append(same)
    return lines + [search(name, 1 / (searches - k)) for k, name in enumerate(others if searches else ())]


def estimate(name: str, args: argparse.Namespace) -> int:
    """Layers for which a tenth of the device stays for activations, and what rests in host memory has room."""
    room = 0.9 * args.device_gb * 1e9 / ON_DEVICE[name]
    if ON_HOST[name]:
        room = min(room, 0.9 * args.host_gb * 1e9 / ON_HOST[name])
    none, one = Size(0).parameters, Size(1).parameters
    return max(1, int((room - none) // (one - none)))


def tried(layers: int, seconds: float, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A process of its own trains, within the time that it may take."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", json.dumps([layers, name])]
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93", **os.environ, VARIABLE: str(int(args.host_gb * 1e9) // 2**30)}
    line = {"offload": name, "layers": layers} | in_process(command, env, seconds)
    print(f"{name}, {layers} layers: {line.get('error') or format(line['seconds'], '.3f') + ' s'}", flush=True)
    return line


def measured(size: Size, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains here."""
    import jax
    import numpy as np

    run = run_of(size, name, args)
    state, seconds = run.init(), list[float]()
    metrics: dict[str, Any] = {}
    shape = (size.rows * args.micro_batches, size.seq_len + 1)
    batch = run.put({"tokens": np.random.default_rng(0).integers(0, size.vocab, shape, np.int32)})
    for _ in range(args.steps + 2):  # the first compiles
        begun = time.perf_counter()
        state, metrics = run.step(state, batch)
        jax.block_until_ready((state.params, metrics))
        seconds.append(time.perf_counter() - begun)
    del state
    step, (rate_in, rate_out), (bytes_in, bytes_out) = (
        statistics.median(seconds[2:]), link(2**24 if args.tiny else 2**29), moved(run)
    )  # fmt: skip
    tokens = shape[0] * size.seq_len
    return {
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}", "parameters": size.parameters,
        "seconds": step, "tokens_per_second": tokens / step, "loss": float(metrics["loss"]),
        "bytes_in": bytes_in, "bytes_out": bytes_out, "rate_in": rate_in, "rate_out": rate_out,
        "share_in": bytes_in / step / rate_in, "share_out": bytes_out / step / rate_out,
    }  # fmt: skip


def moved(run: Any) -> tuple[int, int]:
    """Bytes that a step brings to the device and takes from it, as the planner counts them."""
    from jzero.plan.offloading import offloading_of

    found = offloading_of(run, 1)
    classes = found.moved if found else ()
    return sum(each.up_bytes for each in classes), sum(each.down_bytes for each in classes)


def link(nbytes: int) -> tuple[float, float]:
    """Bytes per second from pinned host memory to the device, and back."""
    import jax
    import jax.numpy as jnp

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host")
    here = jax.block_until_ready(jax.device_put(jnp.zeros(nbytes // 4, jnp.float32), device))
    there = jax.block_until_ready(jax.device_put(here, host))

    def rate(x: Any, to: Any) -> float:
        seconds = []
        for _ in range(4):
            begun = time.perf_counter()
            jax.block_until_ready(jax.device_put(x, to, may_alias=False))
            seconds.append(time.perf_counter() - begun)
        return nbytes / statistics.median(seconds[1:])

    return rate(there, device), rate(here, host)


def run_of(size: Size, name: str, args: argparse.Namespace) -> Any:
    """The run on one device."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jzero
    from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

    config = DecoderConfig(
        size.width, size.layers, size.heads, size.heads, size.mlp_width, size.vocab,
        remat="full", dtype="bfloat16", attention="xla",
    )  # fmt: skip
    small: dict[str, Any] = {"min_param_bytes": 0} if args.tiny else {}
    tokens = jax.ShapeDtypeStruct((size.rows * args.micro_batches, size.seq_len + 1), jnp.int32)
    return jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)), next_token_loss, optax.adamw(3e-4, b2=0.95),
        jzero.make_mesh("dp=1", jax.devices()[:1]), {"tokens": tokens},
        stage=0, micro_batches=args.micro_batches, clip_norm=1.0,
        precision=jzero.Precision(params="bfloat16"), offload=jzero.Offload(**OFFLOADS[name] | small),
    )  # fmt: skip


def sized(layers: int, args: argparse.Namespace) -> Size:
    return (TINY if args.tiny else Size(1))._replace(layers=layers)


def row(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"| {line['offload']} | {line['layers']} | {line['error']} | | | | | |"
    slowdown = f"{line['slowdown']:.2f}" if "slowdown" in line else ""
    return (
        f"| {line['offload']} | {line['layers']} | {line['parameters'] / 1e9:.2f} | {line['seconds']:.3f} | "
        f"{line['tokens_per_second']:.0f} | {line['share_in']:.2f} | {line['share_out']:.2f} | {slowdown} |"
    )


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--minutes", type=float, default=7.5, help="stops after this much time, compilation included")
    cli.add_argument("--micro_batches", type=int, default=4, help="accumulation")
    cli.add_argument("--steps", type=int, default=3, help="timed steps of each try")
    cli.add_argument("--device_gb", type=float, default=130, help="of the device, for the first guess")
    cli.add_argument("--host_gb", type=int, default=100, help="of pinned host memory, at most")
    cli.add_argument("--cpu_update", action="store_true", help="also with the update on the CPU")
    cli.add_argument("--tiny", action="store_true", help="a small decoder, on any device")
    cli.add_argument("--json", help="file for the result")
    cli.add_argument("--measure", help=argparse.SUPPRESS)
    return cli.parse_args()


if __name__ == "__main__":
    sys.exit(main())
