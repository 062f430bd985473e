"""What a run would hold, send and take: `python -m jzero.plan`, with the flags of `jzero.train` and a target.

    python -m jzero.plan --target h100 --mesh node=8,dp=8 --model.preset llama-2-7b --data.seq_len 4096

Nothing runs and no array is made; a GPU that is named need not be here.  With `--formula paper | deepspeed` nothing is
compiled either: closed formulas answer (`--formula paper --help`).  Exit status: 0, or 2 where the input is wrong.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import pydantic

from jzero import mesh, targets
from jzero.config import Config, ConfigError, load_with
from jzero.plan import Plan, formula_command, text
from jzero.plan.settings import CPU, FAKE_DEVICES, HERE, devices_of, fixed_by_environment, plan_of, setting_of

PROG = "python -m jzero.plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Plans as `argv` says and returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if formula_command.is_asked(argv):
            print(formula_command.answer(argv))
        else:
            print(planned(*load_with(argv, PROG, flags())))
    except (ConfigError, targets.TargetError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def flags() -> argparse.ArgumentParser:
    """What may be said of a plan beside the settings of the run."""
    own = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = own.add_argument_group("plan")
    known = ", ".join(targets.GPUS)
    group.add_argument("--target", help=f"{HERE} (default), {CPU} (fake devices), {known}, or h100:memory_gb=94,...")
    group.add_argument("--devices", type=_count, help="how many, where the mesh leaves an axis open; default: one host")
    group.add_argument("--margin", type=_part, help="part of a device's memory that is to stay free (default 0.1)")
    group.add_argument(
        formula_command.FLAG, metavar="paper|deepspeed", help="closed formulas instead; see --formula paper --help"
    )
    group.add_argument("--json", action="store_true", help="the whole plan as JSON")
    return own


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def _part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 0 to below 1")
    return value


def planned(config: Config, own: dict[str, Any]) -> str:
    """The answer, as it is printed.

    Raises:
        ConfigError: settings that cannot be.
        TargetError: an unknown target, or nothing to compile for it with.
    """
    gpu = start_devices(own.get("target", HERE), config, own.get("devices"))
    plan = plan_of(setting_of(config, gpu, own.get("devices")))
    if own.get("json"):
        return pydantic.TypeAdapter(Plan).dump_json(plan, indent=1).decode()
    return text.describe(plan, own.get("margin", 0.1))


def start_devices(target: str, config: Config, devices: int | None) -> targets.Gpu | None:
    """The GPU that is named, None for devices that are here; starts as many fake ones as are asked for.

    Raises:
        TargetError: no such target.
    """
    if target != HERE:
        jax.config.update("jax_platforms", "cpu")  # a GPU that is here is left alone
    if target in (HERE, CPU):
        count = devices_of(mesh.parse(config.mesh), devices, FAKE_DEVICES)
        if not fixed_by_environment():
            jax.config.update("jax_num_cpu_devices", count)
        return None
    return targets.parse(target)


if __name__ == "__main__":
    sys.exit(main())
