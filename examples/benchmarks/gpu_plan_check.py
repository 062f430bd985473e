"""Predicted peak memory against measured, for one decoder that nearly fills a GPU: PASS within 5 %.

The decoder is chosen by the planner: as many layers of width 4,096 as leave a quarter of the memory to activations, and
as many sequences as fit then, compiled for a GPU of the same kind as if it were absent.  Then the step runs on the real
one, in processes of their own, since a device counts its peak from the start of its process: once with the flags of the
prediction, which do not autotune, and once autotuned.  bfloat16 parameters, adamw with float32 master, m and v,
rematerialisation in full, sequences of 2,048 tokens.

    python examples/benchmarks/gpu_plan_check.py [--minutes 6] [--json FILE]      on a machine with one GPU
    python examples/benchmarks/gpu_plan_check.py --target h100                    predicts for a GPU that is not here
    python examples/benchmarks/gpu_plan_check.py --tiny                           runs anywhere; CPUs count no memory

Exit status: 0, or 1 where a measured peak is more than 5 % off.  A GPU that is not in the table of `jzero.gpus` is
named by the nearest one with its own numbers, as `--target h100:memory_gb=94`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
os.environ.setdefault(FRACTION, "0.93")
_START = time.monotonic()
TOLERANCE = 0.05
FILL = 0.97  # of what the allocator may take: fragments stay free
STEPS = 3


class Size(NamedTuple):
    """A decoder and its batch."""

    layers: int
    rows: int
    width: int = 4096
    heads: int = 32
    mlp_width: int = 11_008
    vocab: int = 32_000
    seq_len: int = 2048


TINY = Size(2, 8, 64, 4, 128, 256, 64)


def main() -> int:
    args = arguments()
    if args.measure:
        print(json.dumps(measured(Size(*json.loads(args.measure)), autotune=args.autotune)))
        return 0
    here = device_here()
    target, limit = target_and_limit(here, args)
    size, predicted = (TINY, peak_of(TINY, target)) if args.tiny else largest(target, limit)
    print(f"{size.layers} layers of width {size.width}, {size.rows} sequences of {size.seq_len} tokens")
    print(f"predicted: {predicted / 1e9:8.3f} GB, compiled for {target or 'the CPU'}", flush=True)
    runs = []
    if args.tiny or here["platform"] != "cpu":
        runs = [run_and_compare(size, autotune, predicted, args) for autotune in (0, 1)]
    result = {"target": target, "device": here, "size": size._asdict(), "predicted_bytes": predicted, "runs": runs}
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    return 0 if all(run["passed"] for run in runs) else 1


# The prediction.  JAX is imported in functions: this process leaves the GPU to those that run on it.


def largest(target: str, limit: float) -> tuple[Size, int]:
    """The size that nearly fills `limit` bytes, and the peak that the planner predicts of it."""
    size = Size(layers_for(0.75 * limit), 1)
    return rows_for(size, FILL * limit, lambda size: peak_of(size, target))


def peak_of(size: Size, target: str) -> int:
    """What the planner says of `size`, compiled for `target`, which is absent; for the CPU where it is empty."""
    import jax

    import jzero.plan
    from jzero import targets

    jax.config.update("jax_platforms", "cpu")
    gpu = targets.parse(target) if target else None
    run = run_of(size, targets.gpu_devices(gpu, 1) if gpu else jax.devices()[:1])
    return jzero.plan.of(run, gpu).memory.peak_bytes


def layers_for(state_bytes: float) -> int:
    """As many layers as hold parameters, float32 gradients, master, m and v in so many bytes."""
    size = Size(1, 1)
    layer = 4 * size.width**2 + 3 * size.width * size.mlp_width
    return max(1, int((state_bytes / 18 - 2 * size.vocab * size.width) // layer))


def rows_for(size: Size, limit: float, peak: Callable[[Size], int]) -> tuple[Size, int]:
    """As many rows as `limit` allows; memory is close to linear in them."""
    one, two = (peak(size._replace(rows=rows)) for rows in (1, 2))
    rows = max(1, 1 + int((limit - one) // max(two - one, 1)))
    while True:
        found = peak(size._replace(rows=rows))
        if found <= limit or rows == 1:
            return size._replace(rows=rows), found
        rows -= 1


def run_of(size: Size, devices: Any) -> Any:
    """The run of a size on one device."""
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
    return jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)), next_token_loss, optax.adamw(3e-4, b2=0.95),
        jzero.make_mesh("dp=1", devices),
        {"tokens": jax.ShapeDtypeStruct((size.rows, size.seq_len + 1), jnp.int32)},
        stage=0, clip_norm=1.0, precision=jzero.Precision(params="bfloat16"),
    )  # fmt: skip


# The measurement.


def run_and_compare(size: Size, autotune: int, predicted: int, args: argparse.Namespace) -> dict[str, Any]:
    """A process of its own runs `size`, as far as time is left for it; without it nothing has passed."""
    left, name = 60 * args.minutes - (time.monotonic() - _START), "autotuned" if autotune else "same flags"
    command = [sys.executable, __file__, "--measure", json.dumps(size), *["--autotune"] * autotune]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1), check=True)
    except subprocess.TimeoutExpired:
        print(f"measured:  {name}: stopped, --minutes {args.minutes:g} are over: FAIL")
        return {"run": name, "error": "out of time", "passed": False}
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        print(f"measured:  {name}: {last}: FAIL")
        return {"run": name, "error": last, "passed": False}
    run = {"run": name, **json.loads(done.stdout.splitlines()[-1])}
    if run["measured_bytes"] is None:
        print(f"measured:  {name}: nothing, {STEPS} steps ran, but CPUs do not count their memory")
        return {**run, "passed": True}
    ratio = run["measured_bytes"] / predicted
    run |= {"ratio": ratio, "passed": args.tiny or abs(ratio - 1) <= TOLERANCE}
    print(
        f"measured:  {run['measured_bytes'] / 1e9:8.3f} GB, {name} ({run['compiled_bytes'] / 1e9:.3f} GB compiled "
        f"there): {ratio:.3f} of the prediction: {'PASS' if run['passed'] else 'FAIL'}",
        flush=True,
    )
    return run


def measured(size: Size, *, autotune: bool) -> dict[str, Any]:
    """Runs some steps here, and asks the device for its peak."""
    import jax
    import numpy as np

    from jzero import hlo, targets

    device = jax.devices()[0]
    run = run_of(size, [device])
    options = None if autotune or device.platform == "cpu" else targets.COMPILER_OPTIONS
    program = run.lower()["step"].compile(compiler_options=options)
    state = run.init()
    tokens = np.random.default_rng(0).integers(0, size.vocab, (size.rows, size.seq_len + 1), np.int32)
    batch = run.put({"tokens": tokens})
    metrics = {}
    for _ in range(STEPS):
        state, metrics = program(state, batch)
    return {
        "loss": float(metrics["loss"]),
        "compiled_bytes": hlo.memory(program).peak_bytes,
        "measured_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }


# The device.


def device_here() -> dict[str, Any]:
    """Kind, platform and memory limit of the first device, asked by a process that ends and leaves it free."""
    ask = (
        "import jax, json; d = jax.devices()[0]; "
        "print(json.dumps([d.device_kind, d.platform, (d.memory_stats() or {}).get('bytes_limit')]))"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return dict(zip(("kind", "platform", "limit_bytes"), json.loads(done.stdout.splitlines()[-1]), strict=True))


def target_and_limit(here: dict[str, Any], args: argparse.Namespace) -> tuple[str, float]:
    """The GPU to compile for, "" for the CPU, and the bytes that may be filled."""
    from jzero import gpus

    names = {gpu.name: name for name, gpu in gpus.GPUS.items()}
    target = args.target or names.get(here["kind"], "")
    if here["platform"] == "cpu" and args.tiny:
        return "", 0.0
    if here["platform"] == "cpu" and not args.target:
        raise SystemExit("error: no GPU here: --target NAME predicts for one, --tiny runs anywhere")
    if not target:
        raise SystemExit(
            f"error: {here['kind']!r} is not in the table ({', '.join(names)}): describe it, "
            "as in --target h100:memory_gb=94"
        )
    limit = here["limit_bytes"] or float(os.environ[FRACTION]) * gpus.parse(target).memory_bytes
    return target, limit


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--minutes", type=float, default=6, help="stops after this much time, compilation included")
    cli.add_argument("--target", help="compile for this GPU instead of the table's of the same name")
    cli.add_argument("--tiny", action="store_true", help="a small decoder, on any device")
    cli.add_argument("--json", help="file for the result")
    cli.add_argument("--measure", help=argparse.SUPPRESS)
    cli.add_argument("--autotune", action="store_true", help=argparse.SUPPRESS)
    return cli.parse_args()


if __name__ == "__main__":
    from jzero.gpus import TargetError

    try:
        sys.exit(main())
    except TargetError as error:
        sys.exit(f"error: {error}")
