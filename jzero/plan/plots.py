"""Plans as a picture: memory by class against the GPU's, traffic by axis, and the layer loop's course in time.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.  Everything is placed in inches, so that bars
and words have one size with 1 setting as with 12.  matplotlib is the extra `plot`.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jzero.directories import obstacle
from jzero.plan.bars import draw_memory, draw_traffic
from jzero.plan.lanes import draw_lanes, lanes_legend
from jzero.plan.report import Plan
from jzero.schedule import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
_INSTALL = "pip install 'jzero[plot]'"
# Inches, of the width and of the height.
_LETTER, _MEMORY, _BETWEEN, _TRAFFIC, _RIGHT = 0.075, 6.2, 0.3, 4.5, 0.2
_TITLE, _BAR, _BELOW_BARS, _LANES_TITLE, _LANES, _BELOW_LANES = 0.75, 0.4, 1.3, 0.4, 1.2, 0.6


class PlotError(ValueError):
    """A picture that cannot be made: names the file, or what to install."""


def check(path: str) -> None:
    """Refuses a picture that could not be written in the end.

    Raises:
        PlotError: a format that is not one of `FORMATS`, a place that cannot be written, or no matplotlib.
    """
    file = Path(path).absolute()
    if file.suffix.lower() not in FORMATS:
        raise PlotError(f"--plot {path}: the name must end in one of {', '.join(FORMATS)}")
    if reason := "is a directory" if file.is_dir() else obstacle(file.parent):
        raise PlotError(f"--plot {path}: {reason}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError(f"--plot {path}: pictures need matplotlib: {_INSTALL}")


def save(path: str, plans: Sequence[Plan], margin: float = 0.0) -> None:
    """Writes the picture of `figure`.

    Raises:
        PlotError: as `check`.
    """
    check(path)
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    figure(plans, margin).savefig(path, dpi=100)


def figure(plans: Sequence[Plan], margin: float = 0.0) -> "Figure":
    """Bars of all plans, and one turn of each layer loop of the last plan that sends something in them.

    Args:
        plans: at least one.
        margin: part of a device's memory that is to stay free.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, needed where a picture is drawn alone

    labels, (name, loops) = [difference(plan, plans) for plan in plans], _layer_loops(plans)
    left, inside = 0.25 + _LETTER * max(9, *map(len, labels)), _MEMORY + _BETWEEN + _TRAFFIC
    bars, below = _BAR * len(plans), _LANES_TITLE + _LANES * len(loops) + _BELOW_LANES if loops else 0.0
    page = Figure(figsize=(left + inside + _RIGHT, _TITLE + bars + _BELOW_BARS + below))
    _write(page, 0.2, common(plans), 11)
    draw_memory(_axes(page, left, _TITLE, _MEMORY, bars), plans, labels, margin)
    draw_traffic(_axes(page, left + _MEMORY + _BETWEEN, _TITLE, _TRAFFIC, bars), plans)
    top = _TITLE + bars + _BELOW_BARS
    if loops:
        turn = "one turn of the layer loop" + (f" of {name}" if name else "")
        _write(page, top, f"{turn}: the compiled schedule, simulated with the rates of the GPU and its links", 10)
    for i, loop in enumerate(loops):
        ax = _axes(page, left, top + _LANES_TITLE + i * _LANES, inside, _LANES - 0.4)
        draw_lanes(ax, loop, max(t.seconds for t in loops), last=loop is loops[-1])
        if loop is loops[-1]:
            lanes_legend(ax, loops)
    return page


def _axes(page: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Axes at a place that is given in inches from the left and from the top."""
    w, h = page.get_size_inches()
    return page.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))


def _write(page: "Figure", top: float, text: str, size: float) -> None:
    page.text(0.5, 1 - top / page.get_size_inches()[1], text, ha="center", va="center", fontsize=size)


def _layer_loops(plans: Sequence[Plan]) -> tuple[str, list[Timeline]]:
    """(name, loops with the forward pass first) of the last plan that sends something in its layer loops."""
    for plan in reversed(plans):
        if plan.time and plan.time.loops:
            return difference(plan, plans), sorted(plan.time.loops, key=lambda loop: loop.phase != "forward")
    return "", []


# ---- words ----------------------------------------------------------------------------------------------------------


def common(plans: Sequence[Plan]) -> str:
    """What all plans have in common."""
    facts = [_facts(plan) for plan in plans]
    return ", ".join(text for key, text in facts[0].items() if all(other.get(key) == text for other in facts))


def difference(plan: Plan, plans: Sequence[Plan]) -> str:
    """What one of several plans does not share with all others; "" where there is nothing."""
    facts = [_facts(other) for other in plans]
    mine = _facts(plan).items()
    return ", ".join(text for key, text in mine if any(other.get(key) != text for other in facts))


def _facts(plan: Plan) -> dict[str, str]:
    mesh = ",".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    more = {key: f"{key.replace('_', ' ')} {value}" for key, value in plan.label.items()}
    counted = {"parameters": f"{plan.parameters:,} parameters", "device": plan.device}
    return {**counted, "stage": f"stage {plan.stage}", "mesh": mesh, **more}
