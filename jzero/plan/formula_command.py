"""`python -m jzero.plan --formula paper | deepspeed`: the closed formulas by command, without compiling anything."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jzero.config import ConfigError, load
from jzero.models.flops import largest_module, parameter_count
from jzero.plan.formula_text import deepspeed_table, paper_table
from jzero.plan.formulas import Widths, deepspeed_estimates, paper_rows

PROG, FLAG = "python -m jzero.plan", "--formula"
_DTYPES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class _Model:
    """What the formulas know of a model; no largest layer where none was named."""

    parameters: list[int]
    largest_layer: int | None


def is_asked(argv: Sequence[str]) -> bool:
    """Whether `argv` asks for a formula instead of a plan."""
    return any(word.partition("=")[0] == FLAG for word in argv)


def answer(argv: Sequence[str]) -> str:
    """The tables that `argv` asks for; `--help` prints the flags and exits.

    Raises:
        ConfigError: one line that names the flag, the value and what is allowed.
    """
    args, rest = _parser().parse_known_args(argv)
    model = _model(args.parameters, getattr(args, "largest_layer", None), rest)
    return {"paper": _paper, "deepspeed": _deepspeed}[args.formula](args, model)


def _paper(args: argparse.Namespace, model: _Model) -> str:
    _refuse(args, "deepspeed", ("largest_layer", "devices_per_host", "hosts", "buffer_factor"))
    devices, tp, micro_batches = args.devices or [8], args.tp or 1, args.micro_batches or 1
    widths = Widths(grads=_DTYPES[args.grads or "bfloat16"], reduce=_DTYPES[args.reduce or "bfloat16"])
    try:
        rows = paper_rows(model.parameters, devices, micro_batches, tp, widths)
    except ValueError as error:
        raise ConfigError(f"--devices: {error}") from None
    return paper_table(rows, micro_batches, tp, widths)


def _deepspeed(args: argparse.Namespace, model: _Model) -> str:
    _refuse(args, "paper", ("devices", "tp", "micro_batches", "grads", "reduce"))
    if model.largest_layer is None:
        raise ConfigError("--formula deepspeed needs --largest_layer L beside --parameters P")
    per_host, hosts, factor = args.devices_per_host or 8, args.hosts or 1, args.buffer_factor or 1.5
    tables = []
    for parameters in model.parameters:
        rows = deepspeed_estimates(parameters, model.largest_layer, per_host, hosts, factor)
        setting = f"{hosts} host{'s' * (hosts > 1)} of {per_host}, buffer factor {factor:g}"
        tables.append(deepspeed_table(rows, parameters, model.largest_layer, setting))
    return "\n\n".join(tables)


def _refuse(args: argparse.Namespace, other: str, names: Sequence[str]) -> None:
    """Flags of the other formula would say nothing."""
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} says nothing to --formula {args.formula}; it is for --formula {other}")


def _model(parameters: list[int] | None, largest_layer: int | None, rest: Sequence[str]) -> _Model:
    """The model of `--parameters`, else the one that the settings describe."""
    if parameters is not None:
        if rest:
            raise ConfigError(f"{rest[0]} says nothing beside --parameters, which stands for the model")
        return _Model(parameters, largest_layer)
    for word in rest:
        if word.startswith("--") and not word.startswith(("--model.", "--config")):
            raise ConfigError(f"{word}: of a run's settings a formula reads --config and --model.* alone")
    config = load(rest, PROG).model.decoder("bfloat16")
    return _Model([parameter_count(config)], largest_layer or largest_module(config))


def _parser() -> argparse.ArgumentParser:
    cli = _Parser(
        prog=PROG,
        usage=f"{PROG} --formula FORMULA [--parameters N,N,...] [FLAGS], or --config FILE.yaml, --model.KEY VALUE",
        description="Closed formulas for the model of --parameters, or for that of --config and --model.*.",
        allow_abbrev=False,
    )
    cli.add_argument(
        "--formula", choices=("paper", "deepspeed"), required=True, help="the ZeRO paper's, or DeepSpeed's"
    )
    cli.add_argument("--parameters", type=_wholes, metavar="N,N,...", help="such as 7.5e9,128e9")
    paper = cli.add_argument_group("paper")
    paper.add_argument("--devices", type=_wholes, metavar="N,N,...", help="in all (default 8)")
    paper.add_argument("--tp", type=_whole, metavar="N", help="tensor-parallel devices among them (default 1)")
    paper.add_argument("--micro_batches", type=_whole, metavar="M", help="of a step (default 1)")
    paper.add_argument("--grads", choices=_DTYPES, help="gradients are held in (default bfloat16, the paper's 16 bits)")
    paper.add_argument("--reduce", choices=_DTYPES, help="gradients travel in (default bfloat16)")
    deepspeed = cli.add_argument_group("deepspeed")
    deepspeed.add_argument("--largest_layer", type=_whole, metavar="L", help="parameters of the largest module")
    deepspeed.add_argument("--devices_per_host", type=_whole, metavar="N", help="default 8")
    deepspeed.add_argument("--hosts", type=_whole, metavar="N", help="default 1")
    deepspeed.add_argument("--buffer_factor", type=_factor, metavar="B", help="default 1.5")
    return cli


def _whole(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1, such as 8 or 7.5e9")
    return int(value)


def _wholes(text: str) -> list[int]:
    return [_whole(part.strip()) for part in text.split(",")]


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1")
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))
