"""Memory by class, and traffic by axis, as bars: one plan a line."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jzero.plan.report import Plan
from jzero.plan.text import Unit
from jzero.plan.traffic import BETWEEN_HOSTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Class in the picture -> classes of a plan's parts, and the colour.
_AT_REST = {
    "parameters": (("parameters", "frozen", "model state"), "#0072B2"),
    "master": (("master",), "#009E73"),
    "m, v, other optimizer state": (("m", "v", "other optimizer state"), "#56B4E9"),
}
_DURING = {
    "gradients": "#E69F00",
    "activations": "#D55E00",
    "gathered parameters": "#CC79A7",
    "other temporaries": "#999999",
}
_FAR = 10  # times the widest bar: so far away memory is not drawn
_AXES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")


def draw_memory(ax: "Axes", plans: Sequence[Plan], labels: Sequence[str], margin: float) -> None:
    """The peak of each plan, by class, against the memory of a device, of which a part is to stay free."""
    unit = _unit(max(plan.memory.peak_bytes for plan in plans))
    colors = {name: color for name, (_, color) in _AT_REST.items()} | _DURING
    _stack(ax, [dict(memory_classes(plan)) for plan in plans], {name: {"color": c} for name, c in colors.items()}, unit)
    for y, plan in enumerate(plans):
        _write(ax, plan.memory.peak_bytes, y, unit, _verdict(plan, margin, unit))
    capacity, widest = max(plan.capacity_bytes or 0 for plan in plans), max(plan.memory.peak_bytes for plan in plans)
    words, near = _words(unit), capacity < _FAR * widest
    if capacity and near:
        _draw_capacity(ax, capacity, margin, unit)
    elif capacity:  # bars would be lines beside it
        words += f" of {unit.show(capacity)} that a device has"
    _finish(ax, len(plans), 1.42 * max(widest, capacity * near) / unit.nbytes, "peak memory of one device", words, 3)
    ax.set_yticks(range(len(plans)), labels, fontsize=8.5)


def draw_traffic(ax: "Axes", plans: Sequence[Plan]) -> None:
    """What one device sends, by the axes that it is sent over."""
    sent = [dict[str, float]() for _ in plans]
    for found, plan in zip(sent, plans, strict=True):
        for one in plan.traffic.sent:
            name = f"over {'+'.join(one.axes)}, {one.link}"
            found[name] = found.get(name, 0.0) + one.wire_bytes
    totals = [sum(found.values()) for found in sent]
    unit = _unit(max(totals))
    _stack(ax, sent, dict(_looks({name for found in sent for name in found})), unit)
    for y, total in enumerate(totals):
        _write(ax, total, y, unit, f"{unit.show(total)} {unit.name}" if total else "nothing")
    words = f"{_words(unit)} on the wire, (N-1)/N of a full tensor, twice that of an all-reduce"
    _finish(ax, len(plans), 1.25 * max(*totals, 1.0) / unit.nbytes, "sent by one device in a step", words, 2)
    ax.set_yticks(range(len(plans)), [""] * len(plans))


def memory_classes(plan: Plan) -> Iterator[tuple[str, float]]:
    """(class, bytes) that add up to the peak.

    Temporaries are largest at different moments.  What of a class is beyond the peak is cut off, in the order of the
    legend.
    """
    memory, left = plan.memory, float(plan.memory.peak_bytes)
    for name, (parts, _) in _AT_REST.items():
        nbytes = sum(memory.bytes_of(part) for part in parts)
        left -= nbytes
        yield name, nbytes
    sizes = (memory.bytes_of("gradients"), memory.activations_bytes, memory.gathered_bytes, left)
    for name, nbytes in zip(_DURING, sizes, strict=True):
        shown = max(0.0, min(nbytes, left))
        left -= shown
        yield name, shown


def _draw_capacity(ax: "Axes", capacity: float, margin: float, unit: Unit) -> None:
    at, shown = capacity / unit.nbytes, f"memory of a device, {unit.show(capacity)} {unit.name}"
    ax.axvline(at, color="black", linewidth=1.2, linestyle="--", label=shown, zorder=3)
    if margin:
        free = f"{margin:.0%} to stay free"
        ax.axvspan(at * (1 - margin), at, color="black", alpha=0.13, linewidth=0, label=free, zorder=0)


def _verdict(plan: Plan, margin: float, unit: Unit) -> str:
    peak = f"{unit.show(plan.memory.peak_bytes)} {unit.name}"
    if plan.capacity_bytes is None:
        return peak
    missing = plan.missing_bytes(margin)
    return f"{peak}, fits" if missing <= 0 else f"{peak}, {unit.show(missing)} too much"


def _looks(names: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A colour for each group of axes, stripes for what leaves a host."""
    ordered = sorted(names)
    axes = list(dict.fromkeys(name.partition(",")[0] for name in ordered))
    for name in ordered:
        color = _AXES[axes.index(name.partition(",")[0]) % len(_AXES)]
        yield name, {"color": color, "hatch": "//" if name.endswith(BETWEEN_HOSTS) else None}


def _stack(ax: "Axes", rows: Sequence[Mapping[str, float]], looks: Mapping[str, Mapping[str, Any]], unit: Unit) -> None:
    """A bar of each row, its classes after each other."""
    ends = [0.0] * len(rows)
    for name, look in looks.items():
        sizes = [row.get(name, 0.0) / unit.nbytes for row in rows]
        if any(sizes):
            ax.barh(range(len(rows)), sizes, 0.62, ends, label=name, edgecolor="white", linewidth=0.6, **look)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]


def _write(ax: "Axes", nbytes: float, y: float, unit: Unit, text: str) -> None:
    """At the end of a bar."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    at = (nbytes / unit.nbytes, y)
    ax.annotate(text, at, (5, 0), textcoords="offset points", va="center", fontsize=8.5, bbox=box, zorder=4)


def _finish(ax: "Axes", lines: int, right: float, title: str, xlabel: str, columns: int) -> None:
    height = inches_high(ax)
    ax.set_ylim(lines - 0.5, -0.5)
    ax.set_xlim(0, right)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(xlabel, fontsize=8)
    ax.tick_params(labelsize=8.5, left=False)
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    bars_first = sorted(ax.get_legend_handles_labels()[0], key=lambda handle: not hasattr(handle, "patches"))
    if bars_first:
        look: dict[str, Any] = {"fontsize": 8, "frameon": False, "borderpad": 0, "handlelength": 1.6}
        ax.legend(handles=bars_first, loc="upper left", bbox_to_anchor=(0, -0.5 / height), ncols=columns, **look)


def inches_high(ax: "Axes") -> float:
    """How high axes are."""
    return ax.get_position().height * ax.figure.get_figure(root=True).get_size_inches()[1]


def _unit(most: float) -> Unit:
    return Unit("GB", 1e9) if most >= 1e9 else Unit("MB", 1e6)


def _words(unit: Unit) -> str:
    return {"GB": "GB (10⁹ bytes)", "MB": "MB (10⁶ bytes)"}[unit.name]
