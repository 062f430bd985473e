"""What checkpoints cost: how long a save holds training up, and how fast it is written.

Blocking: windows of 20 steps, in turn with a save after every 10 of them and without any.  `blocked` is the time that
the two calls of `save` take, each begun when the state is computed, so that waiting for the step itself is not counted;
`longer` is by how much the window with saves takes longer in all, which includes what the writer's threads take from
training (on a machine whose devices are its processors, that is part of it).

Rate: a state of the same bytes is saved, and waited for, in turn with one file of the same bytes that is written from
one buffer and synced, in the same directory.

    python examples/benchmarks/checkpoint_cost.py [--directory DIRECTORY] [--width 256] [--rounds 5]
"""

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from jzero.distributed import start_cpu_devices
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

WINDOW, EVERY = 20, 10


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--directory", type=Path, help="where to write; the system's temporary directory")
    cli.add_argument("--width", type=int, default=256)
    cli.add_argument("--layers", type=int, default=4)
    cli.add_argument("--rows", type=int, default=16, help="sequences of 128 tokens in a step")
    cli.add_argument("--rounds", type=int, default=5)
    args = cli.parse_args()
    start_cpu_devices()
    run, batch = decoder_run(args.width, args.layers, args.rows)
    print(f"{run.parameters:,} parameters, {jax.device_count()} devices")
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        state = blocking(run, batch, directory, args.rounds)
        rate(state, directory, args.rounds)
        del state
        large, _ = decoder_run(2 * args.width, 2 * args.layers, args.rows)
        rate(large.init(), directory, args.rounds)
    finally:
        shutil.rmtree(directory)


def decoder_run(width: int, layers: int, rows: int) -> tuple[jzero.Run, dict[str, np.ndarray]]:
    sizes = DecoderConfig(width=width, layers=layers, heads=8, kv_heads=8, mlp_width=3 * width, vocab=256, tied=False)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (rows, 129)).astype(np.int32)}
    model = lambda: Decoder(sizes, rngs=nnx.Rngs(0))  # noqa: E731
    return jzero.setup(model, next_token_loss, optax.adamw(1e-3), "dp=-1", batch, stage=3), batch


def blocking(run: jzero.Run, batch: dict[str, np.ndarray], directory: Path, rounds: int) -> jzero.TrainState:
    """Prints what saves cost a window of steps; returns the state after all of them."""
    placed, numbers, held = run.put(batch), itertools.count(1), list[list[float]]()

    def window(state: jzero.TrainState, checkpoints: jzero.Checkpoints | None) -> tuple[jzero.TrainState, float]:
        begun = time.perf_counter()
        for step in range(1, WINDOW + 1):
            state, _ = run.step(state, placed)
            if checkpoints and step % EVERY == 0:
                jax.block_until_ready(state)
                with took(held[-1]):
                    checkpoints.save(next(numbers), state)
        jax.block_until_ready(state)
        return state, time.perf_counter() - begun

    state, plain, saving = run.init(), list[float](), list[float]()
    with jzero.Checkpoints(directory / "steps") as checkpoints:
        for number in range(rounds + 1):
            state, without = window(state, None)
            held.append([])
            state, with_saves = window(state, checkpoints)
            checkpoints.wait()
            if number:  # the first has compiled
                plain.append(without)
                saving.append(with_saves)
            else:
                held.clear()
    step = statistics.median(plain) / WINDOW
    blocked = statistics.median([sum(times) for times in held])
    longer = statistics.median([b - a for a, b in zip(plain, saving, strict=True)])
    print(
        f"a step takes {step * 1e3:.0f} ms; in {WINDOW} steps with {WINDOW // EVERY} saves, training is blocked for "
        f"{blocked * 1e3:.0f} ms = {blocked / step:.2f} steps, and the window takes {longer * 1e3:.0f} ms = "
        f"{longer / step:.2f} steps longer (medians of {rounds} rounds)"
    )
    return state


def rate(state: jzero.TrainState, directory: Path, rounds: int) -> None:
    """Prints how fast a state is written, beside one file of the same bytes."""
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state) if not is_key(x))
    contents = np.random.default_rng(0).integers(0, 256, state_bytes, np.uint8)
    saves, files, busy = list[float](), list[float](), list[float]()
    with jzero.Checkpoints(directory / str(state_bytes), keep=1) as checkpoints:
        for number in range(rounds + 1):
            begun = time.process_time()
            with took(saves):
                checkpoints.save(number, state)
                checkpoints.wait()
            busy.append(time.process_time() - begun)
            with took(files), (directory / "plain").open("wb") as file:
                file.write(contents.data)
                file.flush()
                os.fsync(file.fileno())
    save, plain = statistics.median(saves[1:]), statistics.median(files[1:])
    ratio = statistics.median([b / a for a, b in zip(saves[1:], files[1:], strict=True)])
    print(
        f"{state_bytes / 1e6:,.0f} MB written at {state_bytes / save / 1e6:,.0f} MB/s, "
        f"one plain file at {state_bytes / plain / 1e6:,.0f} MB/s: ratio {ratio:.2f}; "
        f"a save of {save:.2f} s keeps processors busy for {statistics.median(busy[1:]):.2f} s"
    )


def is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class took:  # noqa: N801 (reads as a word)
    """Appends how long the block took, in seconds."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._times.append(time.perf_counter() - self._begun)


if __name__ == "__main__":
    main()
