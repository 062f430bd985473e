"""What may be said of a plan beside the settings of the run."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from jzero import targets
from jzero.models.decoder_config import Remat
from jzero.plan import formula_command
from jzero.plan.auto import MARGIN
from jzero.plan.settings import CPU, HERE
from jzero.zero import STAGES

#: Flags that ask for a table of all combinations; by the names that `settings.combinations` has for them.
SWEEPS = ("stages", "meshes", "micro_batches", "remats")


def flags() -> argparse.ArgumentParser:
    """A parser of the flags that are a plan's own."""
    own = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    add = own.add_argument_group("plan").add_argument
    known = ", ".join(targets.GPUS)
    add(
        "--target",
        help=f"{HERE} (default), {CPU} (fake devices), {known}, or a GPU of one's own: h100:memory_gb=94,...",
    )
    add("--devices", type=_count, help="how many, where the mesh leaves an axis open (default: one host)")
    add("--margin", type=_part, help=f"part of a device's memory that is to stay free (default {MARGIN})")
    add("--stages", type=_list(int, tuple(STAGES)), help="several, such as 0,1,2,3: one table of all combinations")
    add("--meshes", type=_meshes, help="several, such as 'dp=8; dp=4,tp=2'")
    add("--micro_batches", type=_list(_count), help="several, such as 1,2,4")
    add("--remats", type=_list(str, get_args(Remat)), help="several, such as none,full")
    add(formula_command.FLAG, metavar="paper|deepspeed", help="closed formulas instead; see --formula paper --help")
    add("--plot", metavar="FILE.png", help="draws memory, traffic and the layer loop too (.png, .svg or .pdf)")
    add("--json", action="store_true", help="everything, as JSON")
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


def _list(kind: Callable[[str], Any], allowed: Sequence[Any] = ()) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        try:
            values = [kind(part.strip()) for part in text.split(",")]
        except ValueError:
            values = [text]
        wrong = [value for value in values if allowed and value not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]}: must be of {', '.join(map(str, allowed))}")
        return list(dict.fromkeys(values))

    return parse


def _meshes(text: str) -> list[str]:
    return [part for part in re.split(r"[;\s]+", text) if part]
