"""Tokens per second, MFU and memory of one GPU training a decoder, over sizes and rematerialisation policies.

Two sizes: 1.5 B parameters, and as many layers of width 4,096 as the device holds.  bfloat16 parameters, adamw with
float32 master, m and v, sequences of 4,096 tokens, cuDNN attention, one microbatch of as many sequences as fit: each
program is compiled first, and run only if the memory that the compiler asks for is there.

MFU as in PaLM (Chowdhery et al. 2022, appendix B; `jzero.models.flops`): recomputation does not count, and causal
attention counts as if it were full.  The peak is that of `jzero.gpus.GPUS`.

    python examples/benchmarks/gpu_mfu.py [--minutes 8] [--json FILE]     on a machine with a GPU
    python examples/benchmarks/gpu_mfu.py --target h200                   compiles for a GPU that is not here
    python examples/benchmarks/gpu_mfu.py --tiny                          the same loop, tiny, on any device
"""

import argparse
import dataclasses
import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
_START = time.monotonic()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from jzero import compile_cache, gpus, hlo, targets
from jzero.models import flops
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss


class Size(NamedTuple):
    """A decoder, its sequences, and the dtype in which gradients are accumulated.

    Attributes:
        layers: None for as many as fit.
    """

    width: int
    layers: int | None
    heads: int
    mlp_width: int
    seq_len: int
    grads: str
    vocab: int = 32_000
    attention: Literal["xla", "cudnn"] = "cudnn"


SIZES = {
    "1.5B": Size(2048, 28, 16, 5632, 4096, "float32"),
    "largest": Size(4096, None, 32, 11_008, 4096, "bfloat16"),
    "tiny": Size(64, 2, 4, 128, 128, "float32", vocab=256, attention="xla"),
}
KEPT_FREE = 0.02  # of the memory limit: fragments, and what the compiler does not count
ROWS = (16, 12, 8, 6, 4, 3, 2, 1)
# cuBLAS alone, so that autotuning has few kernels to try; the first variant shows what that costs.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
VARIANTS = {
    "triton": {"xla_gpu_enable_triton_gemm": True},
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of the table."""

    name: str
    config: DecoderConfig
    seq_len: int
    grads: str
    options: tuple[tuple[str, Any], ...]

    @property
    def parameters(self) -> int:
        return flops.parameter_count(self.config)

    @property
    def state_bytes(self) -> int:
        """Parameters 2, master, m and v 12, and the gradients, which are whole at the end of the backward pass."""
        return (14 + jnp.dtype(self.grads).itemsize) * self.parameters


class OutOfTime(Exception):  # noqa: N818
    """The budget is spent."""


def main() -> None:
    args = arguments()
    if not args.target:  # a cached program for a GPU that is not here cannot be read back
        compile_cache.use(compile_cache.AUTO)
    device = targets.gpu_devices(args.target, 1)[0] if args.target else jax.devices()[0]
    limit, peak_flops = memory_limit(device, args), peak_flops_of(device, args)
    print(f"{device.device_kind}, jax {jax.__version__}: {limit / 1e9:.1f} GB, {peak_flops / 1e12:.0f} TFLOP/s")
    print(HEAD, flush=True)
    lines: list[dict[str, Any]] = []

    def add(s: Setting) -> None:
        lines.append(measured(s, device, limit, peak_flops, args))
        print(row(lines[-1]), flush=True)

    try:
        for s in settings(args, limit):
            add(s)
        best = max((line for line in lines if "mfu" in line), key=lambda line: line["mfu"], default=None)
        for s in variants(best, limit) if best and device.platform != "cpu" else ():
            add(s)
    except OutOfTime:
        print(f"stopped: --minutes {args.minutes:g} are over")
    print("\n" + "\n".join([HEAD, *map(row, lines)]))
    result = {"device": device.device_kind, "jax": jax.__version__, "limit_bytes": limit, "lines": lines}
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


# What is tried.


def settings(args: argparse.Namespace, limit: float) -> Iterator[Setting]:
    for size in ("tiny",) if args.tiny else ("1.5B", "largest"):
        for remat in ("full", "dots", "none"):
            yield setting(size, remat, limit)


def setting(name: str, remat: Any, limit: float) -> Setting:
    """The named size; where it leaves the layers open, as many as leave a tenth of the memory to activations."""
    size = SIZES[name]

    def of(layers: int) -> Setting:
        config = DecoderConfig(
            width=size.width, layers=layers, heads=size.heads, kv_heads=size.heads, mlp_width=size.mlp_width,
            vocab=size.vocab, tied=True, remat=remat, dtype="bfloat16", attention=size.attention,
        )  # fmt: skip
        return Setting(name, config, size.seq_len, size.grads, tuple(OPTIONS.items()))

    return of(size.layers or max((n for n in range(1, 129) if of(n).state_bytes <= 0.9 * limit), default=1))


def variants(best: dict[str, Any], limit: float) -> Iterator[Setting]:
    """The best setting under other compiler options, as far as this compiler knows them."""
    for name, options in VARIANTS.items():
        if not known(options):
            print(f"{name}: this compiler does not know {', '.join(options)}")
            continue
        same = setting(best["model"], best["remat"], limit)
        yield dataclasses.replace(same, name=f"{same.name} {name}", options=tuple({**OPTIONS, **options}.items()))


def known(options: dict[str, Any]) -> bool:
    """Unlike an unknown XLA flag, which ends the process, an unknown compiler option raises."""
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        return False
    return True


# Compiling and measuring.


def measured(s: Setting, device: Any, limit: float, peak_flops: float, args: argparse.Namespace) -> dict[str, Any]:
    """Compiles `s` for as many rows as fit, and runs it; what went wrong is part of the line."""
    line = {"model": s.name, "parameters": s.parameters, "layers": s.config.layers, "remat": s.config.remat}
    line |= {"grads": s.grads, "seq_len": s.seq_len, "options": dict(s.options)}
    one_row = compiled(s, 1, device, fast=True)[1]
    fits = (1 - KEPT_FREE) * limit
    per_row = max(one_row.peak_bytes - s.state_bytes, 1)
    at_most = 1 + (fits - one_row.peak_bytes) / per_row
    for rows in [n for n in ROWS if n <= max(at_most, 1)]:
        check_time(args)
        run, memory, program = compiled(s, rows, device, fast=bool(args.target))
        line |= {"rows": rows, "peak_bytes": memory.peak_bytes, "temp_bytes": memory.temp_bytes}
        if memory.peak_bytes > fits:
            line["error"] = "does not fit"
            continue
        line.pop("error", None)
        if args.target:
            return line
        try:
            return line | speed(s, run, program, rows, peak_flops, device, args)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            line["error"] = "out of memory"
        gc.collect()
    return line


def compiled(s: Setting, rows: int, device: Any, *, fast: bool) -> tuple[jzero.Run, hlo.Memory, Any]:
    """The run, its memory and its program for `rows` sequences; `fast` does not time kernels."""
    batch = {"tokens": jax.ShapeDtypeStruct((rows, s.seq_len + 1), jnp.int32)}
    run = jzero.setup(
        lambda: Decoder(s.config, rngs=nnx.Rngs(0)), next_token_loss, optax.adamw(3e-4, b2=0.95, weight_decay=0.1),
        jzero.make_mesh("dp=1", [device]), batch, stage=0, clip_norm=1.0,
        precision=jzero.Precision(params="bfloat16", grads=s.grads),
    )  # fmt: skip
    on_gpu = device.platform != "cpu"
    options = {**dict(s.options), **(targets.COMPILER_OPTIONS if fast else {})} if on_gpu else {}
    program = run.lower()["step"].compile(compiler_options=options)
    return run, hlo.memory(program), program


def speed(
    s: Setting, run: jzero.Run, program: Any, rows: int, peak_flops: float, device: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of a step with steps dispatched ahead of the device, so that the host does not count."""
    state = run.init()
    tokens = np.random.default_rng(0).integers(0, s.config.vocab, (rows, s.seq_len + 1)).astype(np.int32)
    batch = run.put({"tokens": tokens})
    once, metrics = 1.0, {}
    for _ in range(3):  # the first ones set up libraries and memory
        start = time.perf_counter()
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        once = time.perf_counter() - start
    check_time(args)
    steps = int(np.clip(args.seconds / once, 3, 50))
    start = time.perf_counter()
    for _ in range(steps):
        state, metrics = program(state, batch)
    loss = float(metrics["loss"])
    step_s = (time.perf_counter() - start) / steps
    tokens_per_s = rows * s.seq_len / step_s
    mfu = tokens_per_s * flops.flops_per_token(s.config, s.seq_len) / peak_flops
    timed = {"step_s": step_s, "steps": steps, "tokens_per_s": tokens_per_s, "mfu": mfu, "loss": loss}
    return {**timed, "device_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use")}


HEAD = (
    f"{'model':<26}{'parameters':>11}{'layers':>7} {'remat':<6}{'rows':>5}{'step ms':>9}{'tokens/s':>10}{'MFU':>7}"
    f"{'peak GB':>9}{'temp GB':>9}"
)


def row(line: dict[str, Any]) -> str:
    named = f"{line['model']:<26}{line['parameters'] / 1e9:>10.2f}B{line['layers']:>7} {line['remat']:<6}"
    timed = " " * 26
    if "mfu" in line:
        timed = f"{1e3 * line['step_s']:>9.1f}{line['tokens_per_s']:>10,.0f}{line['mfu']:>7.1%}"
    held = "".join(f"{line.get(name, 0) / 1e9:>9.1f}" for name in ("peak_bytes", "temp_bytes"))
    return f"{named}{line.get('rows', 0):>5}{timed}{held}  {line.get('error', '')}"


# The device and the clock.


def memory_limit(device: Any, args: argparse.Namespace) -> float:
    if args.target:
        return float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * targets.parse(args.target).memory_bytes
    return float((device.memory_stats() or {}).get("bytes_limit", 4e9))


def peak_flops_of(device: Any, args: argparse.Namespace) -> float:
    peak = gpus.bf16_flops(device.device_kind)
    if peak is None and not args.tiny:
        names = ", ".join(g.name for g in gpus.GPUS.values())
        raise SystemExit(f"error: no peak is known of {device.device_kind!r}; known are {names}; --tiny runs anywhere")
    return peak or 1e12


def check_time(args: argparse.Namespace) -> None:
    if time.monotonic() - _START > 60 * args.minutes - args.reserve:
        raise OutOfTime


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--minutes", type=float, default=8, help="stops after this much time, compilation included")
    cli.add_argument("--reserve", type=float, default=45, help="seconds: nothing starts that might not end")
    cli.add_argument("--seconds", type=float, default=5, help="of timed steps per setting")
    cli.add_argument("--json", help="file for the result")
    which = cli.add_mutually_exclusive_group()
    which.add_argument("--target", choices=list(gpus.GPUS), help="compile for this GPU; nothing runs")
    which.add_argument("--tiny", action="store_true")
    return cli.parse_args()


if __name__ == "__main__":
    main()
