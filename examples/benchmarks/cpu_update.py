"""AdamW on the CPU backend, in blocks and plain, against the memory of the machine and torch's fused AdamW.

All take turns in one process, two at a time, of which the second is timed: after a program that gives memory back and
takes other, the next one is slower by half, whatever it is.  Figures are medians over rounds.  Bytes are the ideal
ones: gradient, m, v and master read, m, v, master and parameters written, 30 per element with 16-bit parameters, 28
without a master.  The copy counts 8 per element, read and written.  Without torch its row is left out.  Every variant
but the plain one holds one chunk per core.

    python examples/benchmarks/cpu_update.py [--elements 16777216] [--rounds 7]
"""

import argparse
import importlib
import itertools
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp
import numpy as np
import optax

from jzero.in_blocks import at_once, in_blocks

TX: Any = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))
BF16, BITS = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint16)
Turn = tuple[Callable[[], Any], float]  # what a round runs, and the bytes that it should move
CORES = os.cpu_count() or 1


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--elements", type=int, default=2**24)
    cli.add_argument("--rounds", type=int, default=7)
    args = cli.parse_args()
    n = args.elements // CORES * CORES
    print(f"{n:,} elements; {machine()}, {CORES} cores, jax {jax.__version__}, load {os.getloadavg()[0]:.1f}")
    turns: dict[str, Turn] = {
        "copy": (copy(n), 8.0 * n),
        "scaling loop (XLA)": (scaling(n), 8.0 * n),
        "plain jit, bf16": (jax_update(n, 1, BF16, blocks=False), 30.0 * n),
        "in blocks, bf16": (jax_update(n, CORES, BF16, blocks=True), 30.0 * n),
        "in blocks, bf16 as bits": (jax_update(n, CORES, BITS, blocks=True), 30.0 * n),
        "plain jit, float32": (jax_update(n, 1, None, blocks=False), 28.0 * n),
        "in blocks, float32": (jax_update(n, CORES, None, blocks=True), 28.0 * n),
    }
    if find_spec("torch"):
        turns["torch fused, float32"] = (torch_fused(n), 28.0 * n)
    report(n, turns, args.rounds)


def report(n: int, turns: dict[str, Turn], rounds: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds + 2):  # the first compiles, the second finds its memory
        for name, (turn, _) in turns.items():
            turn()
            start = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: float(np.median(taken[2:])) for name, taken in seconds.items()}
    stream = turns["copy"][1] / medians["copy"]
    print(f"{'':26}{'ms':>9}{'GB/s':>8}{'to copy':>9}{'M elements/s':>14}")
    for name, (_, moved) in turns.items():
        rate = moved / medians[name]
        figures = f"{1e3 * medians[name]:9.2f}{rate / 1e9:8.1f}{rate / stream:9.2f}{n / medians[name] / 1e6:14.0f}"
        print(f"{name:26}{figures}")


def adamw(arrays: Any, read: Any, scalars: Any) -> tuple[Any, Any]:
    inner = (optax.ScaleByAdamState(scalars["count"], arrays["m"], arrays["v"]), optax.EmptyState())
    updates, (adam, _) = TX.update(read * scalars["clip"], inner, arrays["master"])
    new = {"m": adam.mu, "v": adam.nu, "master": arrays["master"] - scalars["lr"] * updates}
    new = {name: jnp.where(scalars["finite"], x, arrays[name]) for name, x in new.items()}
    if "param" in arrays:
        param = new["master"].astype(jnp.bfloat16)
        as_bits = arrays["param"].dtype == BITS
        new["param"] = jax.lax.bitcast_convert_type(param, BITS) if as_bits else param
    return new, scalars | {"count": adam.count}


def jax_update(n: int, chunks: int, param: Any, *, blocks: bool) -> Callable[[], None]:
    """AdamW in as many chunks; `param`: dtype of the parameters beside the master, None for none."""
    rng = np.random.default_rng(0)
    device = jax.devices("cpu")[0]

    def chunk() -> tuple[Any, Any]:
        shape = (n // chunks,)
        arrays = {name: jnp.zeros(shape) for name in ("m", "v")} | {"master": jnp.ones(shape)}
        if param is not None:
            arrays["param"] = jnp.ones(shape, param)
        return jax.device_put((arrays, rng.standard_normal(shape, np.float32)), device)

    state = [chunk() for _ in range(chunks)]
    scalars = {"count": jnp.int32(0), "lr": jnp.float32(1e-3), "clip": jnp.float32(0.5), "finite": jnp.bool_(True)}
    program = jax.jit(in_blocks(adamw) if blocks else adamw, donate_argnums=0, keep_unused=True)

    def turn() -> None:
        results = at_once(program, [(arrays, grad, scalars) for arrays, grad in state])
        state[:] = [(new, grad) for (new, _), (_, grad) in zip(results, state, strict=True)]

    return turn


def scaling(n: int) -> Callable[[], None]:
    program, x = jax.jit(lambda x: x * 1.0001, donate_argnums=0), [jnp.ones(n)]

    def turn() -> None:
        x[0] = jax.block_until_ready(program(x[0]))

    return turn


def copy(n: int) -> Callable[[], None]:
    source, target, pool = np.ones(n, np.float32), np.zeros(n, np.float32), ThreadPoolExecutor(CORES)
    edges = [n * i // CORES for i in range(CORES + 1)]
    parts = list(itertools.starmap(slice, itertools.pairwise(edges)))

    def turn() -> None:
        list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

    return turn


def torch_fused(n: int) -> Callable[[], None]:
    torch: Any = importlib.import_module("torch")
    param = torch.nn.Parameter(torch.ones(n))
    param.grad = torch.randn(n)
    return torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1, fused=True).step


def machine() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
