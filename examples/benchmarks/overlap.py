"""What of ZeRO's traffic hides under matrix multiplications, for a 7 B on 8, 64 and 1,024 H100s that are not there.

Llama-2-7B's sizes in bfloat16, float32 reductions, adamw with float32 masters, full rematerialisation, cuDNN's
attention, one microbatch of one sequence for each data-parallel device.  Programs are compiled for the absent GPUs and
their schedules are simulated (`jzero.schedule`); nothing is run and no GPU is needed, 5 to 20 s for each on 2 cores:

    pip install -e '.[aot]' nvidia-cudnn-cu12
    python examples/benchmarks/overlap.py                                          # prints all tables
    python examples/benchmarks/overlap.py --only shares --devices 8 --stages 3     # some of it
    python examples/benchmarks/overlap.py --into examples/benchmarks/overlap.md    # and puts them there
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jzero
from jzero import hlo, targets
from jzero.gpus import GPUS
from jzero.mesh import DATA_AXES, TP, data_size
from jzero.models.decoder import Decoder, next_token_loss
from jzero.models.presets import PRESETS
from jzero.rates import Rates
from jzero.saved import saved
from jzero.schedule import CollectiveTime, Schedule, schedule

MESHES = {
    "8": ("dp=8", 8),
    "64": ("node=8,dp=8", 64),
    "1024": ("node=128,dp=8", 1024),
    "8 tp": ("dp=4,tp=2", 8),
    "64 tp": ("dp=8,tp=8", 64),
}

AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
TWO_TURNS = "xla_gpu_enable_while_loop_double_buffering"
GATHERS = "xla_gpu_all_gather_combine_threshold_bytes"
BY_XLA = {GATHERS: 30 * 2**20, AT_ONCE: 1, TWO_TURNS: False}
LAYER = 2 * 202_383_360  # bytes that a layer of the model gathers


@dataclass(frozen=True)
class Step:
    """Something that was tried at stage 3.

    Attributes:
        what: for the table.
        kept: whether it is what `jzero.Comm` asks for.
        options: of the compiler, above those that the run asks for itself.
        layers_ahead: of the stack; 0 is the plain scan.
    """

    what: str
    kept: bool
    options: Mapping[str, Any]
    layers_ahead: int = 1


STEPS = (
    Step("plain scan, XLA's own options", False, BY_XLA, 0),
    Step("prefetching stack, XLA's own options", True, BY_XLA),
    Step("and one gather for a layer", True, {AT_ONCE: 1, TWO_TURNS: False}),
    Step("and four collectives at once, across hosts alone", True, {TWO_TURNS: False}),
    Step("and two turns in a loop's body: as it is now", True, {}),
    Step("as it is now, four at once in a host as well", False, {AT_ONCE: 4}),
    Step("as it is now, eight at once", False, {AT_ONCE: 8}),
    Step(
        "four at once without one gather for a layer",
        False,
        {GATHERS: 30 * 2**20, AT_ONCE: 4, TWO_TURNS: False},
    ),
    Step(
        "as it is now, scatters combined up to 810 MB of shards",
        False,
        {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2 * LAYER},
    ),
    Step(
        "as it is now, scatters combined up to 100 MB of shards",
        False,
        {"xla_gpu_reduce_scatter_combine_threshold_bytes": 100 * 10**6},
    ),
    Step(
        "as it is now, no heuristic combining",
        False,
        {"xla_gpu_experimental_enable_heuristic_collective_combining": False},
    ),
    Step("as it is now, pipelined all-gathers", False, {"xla_gpu_enable_pipelined_all_gather": True}),
    Step("as it is now, pipelined reduce-scatters", False, {"xla_gpu_enable_pipelined_reduce_scatter": True}),
    Step("as it is now, analytical latencies", False, {"xla_gpu_enable_analytical_latency_estimator": True}),
)


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--only", choices=["shares", "steps"])
    cli.add_argument("--devices", choices=list(MESHES), nargs="+", default=list(MESHES))
    cli.add_argument("--stages", type=int, nargs="+", default=[3, 2, 1, 0])
    cli.add_argument("--seq-len", type=int, nargs="+", default=[4096, 2048])
    cli.add_argument("--into", type=Path, help="a file with the tables between marks, which are replaced")
    args = cli.parse_args()
    tables = {"assumptions": list(assumptions(args.devices))}
    if args.only != "steps":
        tables["shares"] = list(shares(args))
    if args.only != "shares":
        tables["steps"] = list(steps([name for name in args.devices if not name.endswith("tp")]))
    if args.into:
        args.into.write_text(replaced(args.into.read_text(), tables))


# ---- tables ----------------------------------------------------------------------------------------------------------


def assumptions(devices: Iterable[str]) -> Iterator[str]:
    lines: dict[str, None] = {}
    for name in devices:
        mesh = make_mesh(name)
        said = Rates.of(GPUS["h100"], mesh).assumptions()
        used = ("+".join(axis for axis in DATA_AXES if mesh.shape[axis] > 1), TP)
        of_links = [
            f"{MESHES[name][0]}: {line}" for line in said if line.startswith(tuple(f"groups along {x}:" for x in used))
        ]
        lines |= dict.fromkeys([*said[:2], said[-1], *of_links])
    yield from shown(f"- {line}" for line in lines)


def shares(args: argparse.Namespace) -> Iterator[str]:
    head = (
        "GPUs", "mesh", "tokens", "stage", "step ms", "exposed ms",
        "forward gathers: by count, by time", "backward gathers", "scatters of the loop",
        "beside the loops ms", "once a step ms", "tp ms", "gathered GB", "temporaries GB",
    )  # fmt: skip
    yield from shown([row(head), row("---" for _ in head)])
    for seq_len in args.seq_len:
        for name in args.devices:
            for stage in args.stages:
                yield from shown([row(share(name, stage, seq_len))])


def share(name: str, stage: int, seq_len: int) -> tuple[str, ...]:
    found, temp_bytes, gathered_bytes = course(name, stage, seq_len)
    zero = [c for c in found.collectives if TP not in c.axes]
    in_loops = [c for c in zero if c.layer_turns]
    return (
        str(MESHES[name][1]),
        MESHES[name][0],
        str(seq_len),
        str(stage),
        f"{found.step_s * 1e3:.1f}",
        f"{found.exposed_s * 1e3:.1f}",
        hidden(c for c in in_loops if c.kind == "all-gather" and c.phase == "forward"),
        hidden(c for c in in_loops if c.kind == "all-gather" and c.phase == "backward"),
        hidden(c for c in in_loops if c.kind == "reduce-scatter"),
        exposed(c for c in zero if not c.layer_turns and c.phase != "update"),
        exposed(c for c in zero if c.phase == "update"),
        exposed(c for c in found.collectives if c.axes == (TP,)),
        f"{gathered_bytes / 1e9:.2f}",
        f"{temp_bytes / 1e9:.1f}",
    )


def steps(devices: Iterable[str]) -> Iterator[str]:
    head = (
        "GPUs", "what", "kept", "step ms", "exposed ms",
        "loop: forward gathers", "backward gathers", "scatters", "beside: gathers", "scatters", "temporaries GB",
    )  # fmt: skip
    yield from shown([row(head), row("---" for _ in head)])
    for name in devices:
        for step in STEPS:
            yield from shown([row(tried(name, step))])


def tried(name: str, step: Step) -> tuple[str, ...]:
    options = targets.known_options(step.options)
    if missing := step.options.keys() - options.keys():
        return (name, f"{step.what}: not known here, {', '.join(sorted(missing))}", *[""] * 9)
    found, temp_bytes, _ = course(name, 3, 4096, options, step.layers_ahead)
    parts = (
        lambda c: c.layer_turns and c.kind == "all-gather" and c.phase == "forward",
        lambda c: c.layer_turns and c.kind == "all-gather" and c.phase == "backward",
        lambda c: c.layer_turns and c.kind == "reduce-scatter",
        lambda c: not c.layer_turns and c.kind == "all-gather",
        lambda c: not c.layer_turns and c.kind == "reduce-scatter",
    )
    return (
        name,
        step.what,
        "yes" if step.kept else "",
        f"{found.step_s * 1e3:.1f}",
        f"{found.exposed_s * 1e3:.1f}",
        *(exposed(c for c in found.collectives if part(c)) for part in parts),
        f"{temp_bytes / 1e9:.2f}",
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def hidden(chosen: Iterable[CollectiveTime]) -> str:
    """Shares of bytes with a matmul between start and done, and of seconds that something is computed in."""
    found = list(chosen)
    total = sum(c.wire_bytes for c in found)
    if not total:
        return "-"
    by_count = sum(c.wire_bytes for c in found if c.matmuls) / total
    by_time = sum(c.hidden_s for c in found) / sum(c.seconds for c in found)
    return f"{by_count:.0%}, {by_time:.0%}"


def exposed(chosen: Iterable[CollectiveTime]) -> str:
    """Exposed milliseconds of all."""
    found = list(chosen)
    if not found:
        return "-"
    return f"{sum(c.exposed_s for c in found) * 1e3:.1f} of {sum(c.seconds for c in found) * 1e3:.1f}"


def course(
    name: str, stage: int, seq_len: int, options: Mapping[str, Any] | None = None, layers_ahead: int = 1
) -> tuple[Schedule, int, int]:
    """The simulated step, bytes of temporaries, and of gathered parameters alive at once."""
    mesh = make_mesh(name)
    config = replace(
        PRESETS["llama-2-7b"], dtype="bfloat16", remat="full", attention="cudnn", layers_ahead=layers_ahead
    )
    run = jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)),
        next_token_loss,
        optax.adamw(1e-4),
        mesh,
        {"tokens": jax.ShapeDtypeStruct((data_size(mesh), seq_len + 1), jnp.int32)},
        stage=stage,
        clip_norm=1.0,
        precision=jzero.Precision(params="bfloat16"),
    )
    lowered = run.lower()["step"]
    program = lowered.compile(compiler_options={**targets.COMPILER_OPTIONS, **(options or {})})
    found = schedule(program, mesh, Rates.of(GPUS["h100"], mesh))
    return found, hlo.memory(program).temp_bytes, saved(program).gathered_bytes


def make_mesh(name: str) -> jax.sharding.Mesh:
    spelled, count = MESHES[name]
    return jzero.make_mesh(spelled, targets.gpu_devices("h100", count))


# ---- text ------------------------------------------------------------------------------------------------------------


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        print(line, flush=True)
        yield line


def replaced(text: str, tables: dict[str, list[str]]) -> str:
    """`text` with each table between `<!-- its name -->` and `<!-- end -->`."""
    for name, lines in tables.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        if mark:
            text = f"{before}{mark}" + "\n".join(lines) + f"\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


if __name__ == "__main__":
    main()
