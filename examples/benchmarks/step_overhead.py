"""Step time of jzero against the same training step written by hand in plain JAX and optax.

The hand-written step has what jzero's has: the global norm of the gradient, a clip, and no change where the gradient
is not finite; its state is donated and its batch placed beforehand.  On one device it is a bare `jax.jit`; on 8 it is
`jit` + NamedSharding, once as data parallelism (parameters whole, batch split) and once as FSDP (the state sharded, the
residual stream held to the layout of the batch; the compiler chooses the collectives).  Each is built twice: the ratio
of the two is the noise.

The programs of a table take turns in one process, in an order that changes from round to round, so a busy machine is
busy for all of them.  A ratio is the median over rounds of the ratio within the round; its interval is the central 95 %
of bootstrapped medians.  Fake CPU devices compare programs, not networks.

    python examples/benchmarks/step_overhead.py [--rounds 40] [--micro-batches 1] [--remat none] [--tokens-per-1000 64]
"""

import argparse
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax

jax.config.update("jax_num_cpu_devices", 8)  # has no effect on real accelerators

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.mesh import DATA_AXES
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

CLIP_NORM = 1.0
SEQ = 128
Program = tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Any]  # step, state, batch


def main() -> None:
    args = arguments()
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(lambda: nnx.split(model(args))[1])))
    devices_x_parts = 8 * args.micro_batches
    rows = math.ceil(parameters * args.tokens_per_1000 / 1000 / SEQ / devices_x_parts) * devices_x_parts
    tokens = np.random.default_rng(0).integers(0, 256, (rows, SEQ + 1)).astype(np.int32)
    print(f"{parameters:,} parameters, {args.layers} layers, float32, remat {args.remat}; {rows * SEQ:,} tokens a step")
    print(
        f"in {args.micro_batches} microbatches; jax {jax.__version__}, {jax.default_backend()}, {os.cpu_count()} cores"
    )

    mesh = jzero.make_mesh("dp=1", jax.devices()[:1])
    hand, own = (functools.partial(f, args, mesh, tokens) for f in (by_hand, by_jzero))
    programs = {"bare jit": hand(whole), "bare jit again": hand(whole), "jzero": own(0)}
    report("one device", programs, args.rounds, {"bare jit": ["bare jit again", "jzero"]})

    mesh, stages = jzero.make_mesh("dp=8"), [f"jzero stage {stage}" for stage in range(4)]
    hand, own = (functools.partial(f, args, mesh, tokens) for f in (by_hand, by_jzero))
    programs = {"DP": hand(whole), "DP again": hand(whole), "FSDP": hand(split), "FSDP again": hand(split)}
    programs |= {name: own(stage) for stage, name in enumerate(stages)}
    report("8 devices", programs, args.rounds // 2, {"DP": ["DP again", *stages], "FSDP": ["FSDP again", *stages]})


def model(args: argparse.Namespace) -> Decoder:
    sizes = {"width": args.width, "layers": args.layers, "heads": 4, "kv_heads": 4, "mlp_width": 3 * args.width}
    return Decoder(DecoderConfig(**sizes, vocab=256, tied=True, remat=args.remat), rngs=nnx.Rngs(0))


def by_jzero(args: argparse.Namespace, mesh: Mesh, tokens: np.ndarray, stage: int) -> Program:
    run = jzero.setup(
        lambda: model(args), next_token_loss, optax.adamw(1e-3), mesh, {"tokens": tokens},
        stage=stage, micro_batches=args.micro_batches, clip_norm=CLIP_NORM,
    )  # fmt: skip
    return run.step, run.init(), run.put({"tokens": tokens})


# The same by hand.


def by_hand(args: argparse.Namespace, mesh: Mesh, tokens: np.ndarray, spec_of: Callable[[Any, Any], P]) -> Program:
    graphdef, params = nnx.split(model(args))
    tx = optax.adamw(1e-3)
    state = (params, tx.init(params), jnp.zeros((3,), jnp.int32))
    shardings = jax.tree_util.tree_map_with_path(lambda path, x: NamedSharding(mesh, spec_of(path, x)), state)
    rows = NamedSharding(mesh, P(DATA_AXES))
    step = jax.jit(
        functools.partial(bare_step, graphdef, tx, args.micro_batches),
        in_shardings=(shardings, rows),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    state, batch = jax.device_put(state, shardings), jax.device_put({"tokens": tokens}, rows)

    # What MaxText writes into its layers: activations stay split by sequence, whatever the parameters do.  The decoder
    # has hints for tensor parallelism in the same places.
    def held(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(DATA_AXES, None, None)))

    with mock.patch("jzero.models.decoder.whole_over_tp", held), mock.patch("jzero.models.blocks.whole_over_tp", held):
        state, _ = step(state, batch)  # traced here, once
    return step, state, batch


def whole(path: Any, x: jax.Array) -> P:  # noqa: ARG001
    return P()


def split(path: Any, x: jax.Array) -> P:
    """The largest dim that 8 devices divide, but not that of the layers."""
    dims = [d for d in range("'layers'" in jax.tree_util.keystr(path), x.ndim) if x.shape[d] % 8 == 0]
    dim = max(dims, key=lambda d: x.shape[d], default=None)
    return P() if dim is None else P(*[None] * dim, DATA_AXES)


def bare_step(
    graphdef: Any, tx: optax.GradientTransformation, micro_batches: int, state: Any, batch: Any
) -> tuple[Any, Any]:
    params, opt_state, (step, skipped, skipped_in_row) = state

    def loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return next_token_loss(nnx.merge(graphdef, params), batch)

    def add(total: Any, batch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss, has_aux=True)(params, batch)), None

    if micro_batches == 1:
        (total, weight), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    else:
        # Neighbouring rows go to different microbatches, so that each device keeps the rows that it has.
        parts = jax.tree.map(lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)
        start = ((jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, params))
        ((total, weight), grads), _ = lax.scan(add, start, parts)
    grads = jax.tree.map(lambda g: g / weight, grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(total)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP_NORM / norm), grads)
    updates, new_opt_state = tx.update(grads, opt_state, params)
    new = (optax.apply_updates(params, updates), new_opt_state)
    new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, (params, opt_state))
    skip = 1 - finite.astype(jnp.int32)
    counts = jnp.stack([step + 1, skipped + skip, (skipped_in_row + 1) * skip])
    return (*new, counts), {"loss": total / weight, "grad_norm": norm, "skipped": counts[1]}


# Measuring.


def report(title: str, programs: dict[str, Program], rounds: int, against: dict[str, Sequence[str]]) -> None:
    seconds = measure(programs, max(rounds, 2))
    print(f"\n{title}, {max(rounds, 2)} rounds, load {os.getloadavg()[0]:.1f}")
    print("  step ms: " + ", ".join(f"{name} {1e3 * np.median(s[:, 0]):.1f}" for name, s in seconds.items()))
    print(f"  {'ratio':<28} of step times            of CPU seconds, all threads")
    for base, names in against.items():
        for name in names:
            ratios = seconds[name] / seconds[base]
            print(f"  {name + ' / ' + base:<28} " + "".join(f"{shown(r):<25}" for r in ratios.T), flush=True)


def measure(programs: dict[str, Program], rounds: int) -> dict[str, np.ndarray]:
    """[rounds, 2] of each program: seconds of a step, and CPU seconds of the process meanwhile."""
    states = {name: state for name, (_, state, _) in programs.items()}
    seconds: dict[str, list[np.ndarray]] = {name: [] for name in programs}
    rng = np.random.default_rng(0)
    for _ in range(rounds + 2):  # the first compiles, the second finds its memory
        for name in rng.permutation(list(programs)):
            step, _, batch = programs[name]
            start = np.array([time.perf_counter(), time.process_time()])
            states[name], metrics = step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            seconds[name].append(np.array([time.perf_counter(), time.process_time()]) - start)
    return {name: np.array(taken[2:]) for name, taken in seconds.items()}


def shown(ratios: np.ndarray) -> str:
    """The median and the central 95 % of bootstrapped medians."""
    samples = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(samples, axis=1), [0.025, 0.975])
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--rounds", type=int, default=40, help="on one device; half as many on 8")
    cli.add_argument("--micro-batches", type=int, default=1)
    cli.add_argument("--width", type=int, default=64)
    cli.add_argument("--layers", type=int, default=4)
    cli.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    cli.add_argument("--tokens-per-1000", type=float, default=64, help="tokens a step per 1,000 parameters")
    return cli.parse_args()


if __name__ == "__main__":
    main()
