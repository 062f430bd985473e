"""One small model trained at every ZeRO stage: equal losses, and what each stage holds, sends and takes.

Prints a row per stage: the last loss and how far any loss is from stage 0's, bytes of one device at rest by class, the
step's temporaries, its traffic by kind (`message_bytes`: full tensors, read off the compiled program), and the time of
a step (median; the stages take turns).  With matplotlib (pip install -e '.[plot]') it draws loss curves and memory.
On fake CPU devices times compare programs, not networks.

    python examples/compare_stages.py [--mesh dp=8] [--steps 20] [--plot stages.png]
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

jax.config.update("jax_num_cpu_devices", 8)  # has no effect on real accelerators

import numpy as np
import optax
from flax import nnx

import jzero
from jzero import compile_cache, data, hlo
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

MODEL = DecoderConfig(width=128, layers=4, heads=4, kv_heads=4, mlp_width=384, vocab=256)
SEQ_LEN = 64
KINDS = {"all-reduce": "all-reduce", "reduce-scatter": "scatter", "all-gather": "gather"}


@dataclass
class Stage:
    """What one stage showed; MB are 10^6 bytes of one device.

    Attributes:
        held: class -> MB between steps, and of the gradients during one.
        temporaries: MB of all that the compiler allocates during a step, gradients included.
        sent: kind of collective -> MB of a step.
        losses, seconds: of every step.
    """

    run: jzero.Run
    held: Mapping[str, float]
    temporaries: float
    sent: Mapping[str, float]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    args = arguments()
    compile_cache.use(compile_cache.AUTO)  # the next start compiles nothing
    stages = [look(args, stage) for stage in range(4)]
    train(stages, args)
    print(table(stages))
    if args.plot:
        plot(stages, args)


def look(args: argparse.Namespace, stage: int) -> Stage:
    """A run of `stage`, and what its compiled step holds and sends."""
    run = jzero.setup(
        lambda: Decoder(MODEL, rngs=nnx.Rngs(0)),
        next_token_loss,
        optax.adamw(3e-3),
        args.mesh,
        {"tokens": jax.ShapeDtypeStruct((args.batch_size, SEQ_LEN + 1), np.int32)},
        stage=stage,
        micro_batches=args.micro_batches,
        clip_norm=1.0,
    )
    program = run.lower()["step"].compile()
    at_rest = run.at_rest_bytes()
    held = {"parameters": at_rest["params"], "optimizer": at_rest["opt_state"], "gradients": run.grads_bytes()}
    sent = hlo.traffic(hlo.collectives(program, run.mesh), by=("kind",))
    return Stage(
        run,
        held={name: size / 1e6 for name, size in held.items()},
        temporaries=hlo.memory(program).temp_bytes / 1e6,
        sent={kind: size / 1e6 for (kind,), size in sent.items()},
    )


def train(stages: list[Stage], args: argparse.Namespace) -> None:
    """The same batches through every stage, in turns, so that a busy machine is busy for all of them."""
    windows, _ = data.split_windows(data.open_corpus(data.Source(), vocab=256).tokens, SEQ_LEN, 0.0)
    states = [stage.run.init() for stage in stages]
    for batch in data.batches(windows, args.batch_size, seed=0, count=args.steps):
        for i, stage in enumerate(stages):
            start = time.perf_counter()
            states[i], metrics = stage.run.step(states[i], batch)
            stage.losses.append(float(metrics["loss"]))
            stage.seconds.append(time.perf_counter() - start)


def table(stages: list[Stage]) -> str:
    """Markdown: a row per stage."""
    kinds = [kind for kind in KINDS if any(kind in stage.sent for stage in stages)]
    heads = ["stage", "last loss", "largest difference", *(f"{name} MB" for name in stages[0].held)]
    heads += ["temporaries MB", *(f"{KINDS[kind]} MB" for kind in kinds), "step ms"]
    lines = [heads, ["---"] * len(heads)]
    for number, stage in enumerate(stages):
        apart = max(abs(a - b) for a, b in zip(stage.losses, stages[0].losses, strict=True))
        sizes = [*stage.held.values(), stage.temporaries, *(stage.sent.get(kind, 0.0) for kind in kinds)]
        step_ms = statistics.median(stage.seconds[1:]) * 1e3  # the first compiles
        cells = [f"{stage.losses[-1]:.6f}", f"{apart:.1e}", *(f"{size:.2f}" for size in sizes), f"{step_ms:.1f}"]
        lines.append([str(number), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(stages: list[Stage], args: argparse.Namespace) -> None:
    """Loss curves on the left, one over the other; bytes of one device on the right."""
    try:
        from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports] (extra plot)
    except ImportError:
        print("no plot: pip install -e '.[plot]' brings matplotlib")
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, stage in enumerate(stages):  # thinner from line to line, so that equal curves all show
        left.plot(range(1, args.steps + 1), stage.losses, linewidth=8 - 2 * number, label=f"stage {number}")
    left.set(xlabel="step", ylabel="loss, nats per byte", title="Loss: equal at every stage")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False)
    bottom = np.zeros(len(stages))
    for name in stages[0].held:
        sizes = np.array([stage.held[name] for stage in stages])
        right.bar(range(len(stages)), sizes, 0.6, bottom=bottom, label=name)
        bottom += sizes
    temporaries = [stage.temporaries for stage in stages]
    right.plot(range(len(stages)), temporaries, "k_", markersize=30, label="temporaries of a step")
    right.set_ylim(0, 1.45 * max(*bottom, *temporaries))  # room for the legend
    right.set(xlabel="stage", ylabel="MB of one device", title=f"Memory on {args.mesh}", xticks=range(len(stages)))
    right.legend(frameon=False, loc="upper right", ncols=2)
    figure.savefig(args.plot, dpi=120)
    print(f"plot: {args.plot}")


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--mesh", default="dp=8")
    cli.add_argument("--steps", type=int, default=20)
    cli.add_argument("--batch-size", type=int, default=16)
    cli.add_argument("--micro-batches", type=int, default=1)
    cli.add_argument("--plot", default="stages.png", help="file of the plot; '' for none")
    return cli.parse_args()


if __name__ == "__main__":
    main()
