"""What a run would hold, send and take: `python -m jzero.plan`, with the flags of `jzero.train` and a target.

    python -m jzero.plan --target h100 --mesh node=8,dp=8 --model.preset llama-2-7b --data.seq_len 4096
    python -m jzero.plan --target h100 --model.preset llama-2-7b --stages 0,1,2,3 --remats none,full
    python -m jzero.plan --target l40s --model.preset llama-2-7b --stage auto

Nothing runs and no array is made; a GPU that is named need not be here.  With `--formula paper | deepspeed` nothing is
compiled either: closed formulas answer (`--formula paper --help`).  Exit status: 0; 1, a compiler has failed; 2,
the input was wrong or nothing fits.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pydantic
from tqdm import tqdm

from jzero import compile_cache, distributed, host_memory, mesh, targets
from jzero.config import Config, ConfigError, load_with
from jzero.ending import failed
from jzero.plan import Plan, auto, formula_command, kept, plots, text
from jzero.plan.flags import SWEEPS, flags
from jzero.plan.settings import (
    CPU,
    HERE,
    combinations,
    device_count,
    devices_of,
    setting_of,
)
from jzero.plan.sweep import PlanError, name_of, plans

PROG = "python -m jzero.plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Plans as `argv` says and returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if formula_command.is_asked(argv):
            print(formula_command.answer(argv))
        else:
            print(answer(*load_with(argv, PROG, flags())))
    except (ConfigError, targets.TargetError, compile_cache.CacheError, plots.PlotError) as error:
        return failed(error, 2)
    except (PlanError, OSError) as error:  # OSError: a plan or a picture that cannot be written
        return failed(error, 1)
    return 0


def answer(config: Config, own: dict[str, Any]) -> str:
    """What is printed.

    Raises:
        ConfigError: settings that cannot be, or of which none fits.
        TargetError: an unknown target, or nothing to compile for it with.
        CacheError: plans cannot be kept where they should.
        PlotError: a picture cannot be made where it should.
        PlanError: a compiler has ended its process.
    """
    if "plot" in own:
        plots.check(own["plot"])
    swept = {key: own[key] for key in SWEEPS if key in own}
    configs = combinations(config, **swept)
    gpu = start_devices(own.get("target", HERE), configs, own.get("devices"))
    margin, store = own.get("margin", auto.MARGIN), kept.Kept(kept.directory(config.run.cache_dir))

    def made(some: Sequence[Config]) -> list[Plan]:
        settings = [setting_of(each, gpu, own.get("devices")) for each in some]
        with tqdm(total=len(settings), desc="compiling", unit="plan", disable=len(settings) == 1, leave=False) as bar:
            return _whole(some, plans(settings, store, bar.update))

    def made_of(one: Config) -> Plan:
        return made([one])[0]

    host_bytes = None if gpu else host_memory.machine_bytes()
    chosen = [
        _chosen(each, device_count(each, gpu, own.get("devices")), made_of, margin, host_bytes) for each in configs
    ]
    lines, found = [line for said, _ in chosen for line in said], made([each for _, each in chosen])
    if "plot" in own:
        plots.save(own["plot"], found, margin)
    if own.get("json"):
        found_as_json = [as_json(plan, margin, each, lines) for plan, (_, each) in zip(found, chosen, strict=True)]
        return json.dumps(found_as_json if swept else found_as_json[0], indent=1)
    if swept:
        return "\n".join([*lines, text.compare(found, margin)])
    return "\n".join([*lines, text.describe(found[0], margin)])


def as_json(plan: Plan, margin: float, config: Config, lines: Sequence[str]) -> dict[str, Any]:
    """A plan with what follows from it, and what it is a plan of.

    Args:
        config: with its stage chosen.
        lines: of the choice.
    """
    return {
        **pydantic.TypeAdapter(Plan).dump_python(plan, mode="json"),
        "margin": margin,
        "fits": None if plan.capacity_bytes is None else plan.missing_bytes(margin) <= 0,
        "missing_bytes": plan.missing_bytes(margin),
        "tokens_per_s": plan.time and plan.time.tokens_per_s,
        "choice": list(lines),
        "settings": config.model_dump(mode="json"),
        "jax": jax.__version__,
    }


def _chosen(
    config: Config, count: int, made_of: Callable[[Config], Plan], margin: float, host_bytes: int | None
) -> tuple[tuple[str, ...], Config]:
    if config.stage != "auto":
        return (), config
    choice = auto.choose(config, count, made_of, margin, host_bytes)
    return choice.lines, choice.config


def _whole(configs: Sequence[Config], results: Sequence[Any]) -> list[Plan]:
    """Plans alone.

    Raises:
        ConfigError, TargetError: the first of `results` that is one; of several settings it says which.
    """
    for config, result in zip(configs, results, strict=True):
        if isinstance(result, Exception):
            raise result if len(configs) == 1 else type(result)(f"{name_of(config)}: {result}")
    return list(results)


def start_devices(target: str, configs: Sequence[Config], devices: int | None) -> targets.Gpu | None:
    """The GPU that is named, None for devices that are here; starts as many fake ones as the meshes ask for.

    Raises:
        TargetError: no such target.
    """
    if target != HERE:
        jax.config.update("jax_platforms", "cpu")  # a GPU that is here is left alone
    else:
        host_memory.raise_limit(os.environ, host_memory.machine_bytes())
    if target not in (HERE, CPU):
        return targets.parse(target)
    try:
        counts = [devices_of(mesh.parse(config.mesh), devices, distributed.FAKE_DEVICES) for config in configs]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    distributed.make_cpu_devices(max(counts))
    return None


if __name__ == "__main__":
    sys.exit(main())
