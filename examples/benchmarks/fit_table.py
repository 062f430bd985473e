"""What fits where: models of 7 to 70 B on 1 to 64 GPUs of 24, 48 and 80 GB, at every ZeRO stage.

Writes a Markdown table, `fit_table.md` beside this file by default.  Each cell is a step compiled for that many H100s
that are not here: bfloat16 parameters, float32 gradients, master, m and v (adamw), rematerialisation in full, one
sequence of 2,048 tokens on each device.  No GPU is needed:

    pip install -e '.[aot]'; python examples/benchmarks/fit_table.py [--models A,B] [--gpus 1,8] [--out FILE]

A program is compiled once, for the H100, and compared with three memories.  Compiled for a smaller card it could come
out smaller, since XLA recomputes more where it sees that memory is short.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from tqdm import tqdm

from jzero import targets
from jzero.config import Config, load
from jzero.plan import Plan
from jzero.plan.auto import MARGIN
from jzero.plan.kept import Kept, directory
from jzero.plan.settings import setting_of
from jzero.plan.sweep import cores, plans
from jzero.zero import STAGES

MODELS = "llama-2-7b,llama-2-13b,llama-30b,llama-65b,llama-2-70b"
GPUS = "1,4,8,32,64"
CARDS = {"24": "rtx4090", "48": "l40s", "80": "h100"}  # in GB as they are sold, and whose memory that is
COMPILED_FOR = "h100"
SEQ_LEN = 2048


class Cell(NamedTuple):
    model: str
    gpus: int
    stage: int


def main() -> None:
    args = arguments()
    cells = list(cells_of(args.models.split(","), [int(n) for n in args.gpus.split(",")]))
    start = time.monotonic()
    made, before = planned(cells, args.cache)
    found = dict(zip(cells, made, strict=True))
    took = time.monotonic() - start
    parts = [head(found, before, took), *table(found), "", *fewest_gpus(found), "", *on_one_gpu(found), ""]
    text = "\n".join(parts)
    print(text)
    Path(args.out).write_text(text)


def cells_of(models: Sequence[str], gpus: Sequence[int]) -> Iterator[Cell]:
    """One device shards nothing: its program is the same at every stage."""
    for model in models:
        for count in gpus:
            yield from (Cell(model, count, stage) for stage in (STAGES if count > 1 else (0,)))


def planned(cells: Sequence[Cell], cache: str) -> tuple[list[Plan], int]:
    """The plans, and how many of them an earlier call had made."""
    gpu, kept = targets.parse(COMPILED_FOR), Kept(directory(None if cache == "none" else cache))
    settings = [setting_of(config_of(cell), gpu) for cell in cells]
    before = sum(kept.get(setting) is not None for setting in settings)
    with tqdm(total=len(settings), unit="plan") as bar:
        results = plans(settings, kept, bar.update)
    for cell, result in zip(cells, results, strict=True):
        if isinstance(result, Exception):
            raise SystemExit(f"error: {cell}: {result}")
    return [result for result in results if isinstance(result, Plan)], before


def config_of(cell: Cell) -> Config:
    per_host = targets.parse(COMPILED_FOR).devices_per_host
    mesh = f"dp={cell.gpus}" if cell.gpus <= per_host else f"node={cell.gpus // per_host},dp={per_host}"
    model = ["--model.preset", cell.model, "--model.remat", "full", "--data.seq_len", str(SEQ_LEN)]
    return load([*model, "--mesh", mesh, "--stage", str(cell.stage)])


# The file.


HEAD = """# What fits where

Made by `python {command}`, on a machine without a GPU: {programs} in
{minutes:.0f} minutes on {cores} CPU cores ({cpu_minutes:.0f} CPU minutes), {memory:.1f} GB for the largest of {cores}
processes, jax {jax}.

A cell says *model states / peak* of one GPU, in GB (10^9 bytes), and the smallest card that holds the peak, **-** where
none does. States are parameters (bfloat16), gradients, master, m and v (float32), 18 bytes a parameter in all; the peak
is the compiler's, activations and gathered parameters included, with one sequence of {seq_len:,} tokens per GPU and
full rematerialisation. A program is compiled once, for H100s, and compared with the memory of three cards
({cards}), of which {margin:.0%} stay free. GPUs stand in hosts of 8; all are
data-parallel. On one GPU all stages are one program.
"""


def head(found: dict[Cell, Plan], before: int, took_s: float) -> str:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return HEAD.format(
        command=" ".join(["examples/benchmarks/fit_table.py", *sys.argv[1:]]),
        programs=f"{len(found)} programs" + (f" ({before} by an earlier call)" if before else ""),
        minutes=took_s / 60,
        cores=cores(),
        cpu_minutes=sum(of.ru_utime + of.ru_stime for of in used) / 60,
        memory=max(of.ru_maxrss for of in used) * 1024 / 1e9,
        jax=jax.__version__,
        seq_len=SEQ_LEN,
        cards=", ".join(f"{card} GB: {targets.GPUS[gpu].memory_bytes / 1e9:.1f}" for card, gpu in CARDS.items()),
        margin=MARGIN,
    )


def table(found: dict[Cell, Plan]) -> list[str]:
    stages = list(STAGES)
    rows = ["| model | GPUs |" + "".join(f" stage {stage} |" for stage in stages), "|---" * (len(stages) + 2) + "|"]
    for model, gpus in dict.fromkeys((cell.model, cell.gpus) for cell in found):
        cells = [found.get(Cell(model, gpus, stage)) for stage in stages]
        shown = [cell_text(plan) if plan else "same" for plan in cells]
        rows.append(f"| {model} | {gpus} | {' | '.join(shown)} |")
    return rows


def cell_text(plan: Plan) -> str:
    memory = plan.memory
    return f"{gb(memory.states_bytes)} / {gb(memory.peak_bytes)} **{card_of(plan) or '-'}**"


def card_of(plan: Plan) -> str | None:
    """The smallest card that holds the peak."""
    return next((card for card in CARDS if over(plan, card) <= 0), None)


def over(plan: Plan, card: str) -> float:
    """Bytes by which the peak is more than what a card may be filled with."""
    return plan.memory.peak_bytes - (1 - MARGIN) * targets.GPUS[CARDS[card]].memory_bytes


def fewest_gpus(found: dict[Cell, Plan]) -> list[str]:
    head = "| model |" + "".join(f" {card} GB |" for card in CARDS)
    rows = [
        f"| {model} | {' | '.join(fewest(model, card, found) for card in CARDS)} |"
        for model in dict.fromkeys(cell.model for cell in found)
    ]
    return [
        "The fewest GPUs of each size, and the stages that fit them:",
        "",
        head,
        "|---" * (len(CARDS) + 1) + "|",
        *rows,
    ]


def on_one_gpu(found: dict[Cell, Plan]) -> list[str]:
    largest = list(CARDS)[-1]
    lacks = [
        f"{cell.model} {gb(max(0.0, over(plan, largest)))} of {gb(plan.memory.peak_bytes)} GB"
        for cell, plan in found.items()
        if cell.gpus == 1
    ]
    return [f"On one card of {largest} GB there lack: {', '.join(lacks)}."] if lacks else []


def fewest(model: str, card: str, found: dict[Cell, Plan]) -> str:
    mine = {cell: plan for cell, plan in found.items() if cell.model == model}
    fits = [cell for cell, plan in mine.items() if over(plan, card) <= 0]
    if not fits:
        cell, plan = min(mine.items(), key=lambda item: item[1].memory.peak_bytes)
        return f"none: on {cell.gpus} at stage {cell.stage} {gb(over(plan, card))} GB are missing"
    least = min(fits)
    stages = ", ".join(str(cell.stage) for cell in fits if cell.gpus == least.gpus)
    return f"{least.gpus}: stage {stages}" if least.gpus > 1 else "1"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f}"


def arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--models", default=MODELS, help="presets")
    cli.add_argument("--gpus", default=GPUS, help="how many: up to 8, or multiples of 8")
    cli.add_argument("--cache", default="auto", help="directory of plans that are made already, or none")
    cli.add_argument("--out", default=str(Path(__file__).with_suffix(".md")))
    return cli.parse_args()


if __name__ == "__main__":
    main()
