"""One turn of a loop as two lanes: what is computed, and what is sent meanwhile."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jzero.plan.bars import inches_high
from jzero.schedule import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LANES = {"compute": 1.0, "communication": 0.0}
# What an event is busy with -> word, colour.
_LOOKS = {
    "matmul": ("matrix products", "#0072B2"),
    "other": ("other kernels", "#A6D3F0"),
    "loop": ("an inner loop", "#444444"),
    "all-gather": ("all-gather", "#E69F00"),
    "reduce-scatter": ("reduce-scatter", "#CC79A7"),
    "all-reduce": ("all-reduce", "#F0E442"),
    "all-to-all": ("all-to-all", "#009E73"),
    "collective-permute": ("permute", "#999999"),
}
_WAITS: dict[str, Any] = {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "xxxxx"}


def draw_lanes(ax: "Axes", turn: Timeline, longest_s: float, *, last: bool) -> None:
    """One turn of a loop, in milliseconds.

    Args:
        longest_s: of all that are drawn with the same scale.
        last: the scale stands below it.
    """
    for kind, (_, color) in _LOOKS.items():
        for lane, at in _LANES.items():
            found = [e for e in turn.events if e.stream == lane and e.what.split()[0] == kind]
            _bars(ax, [(e.start_s, e.end_s) for e in found], at, facecolor=color, edgecolor="white", linewidth=0.3)
    gaps = list(waits(turn))
    _bars(ax, gaps, _LANES["compute"], linewidth=0.0, **_WAITS)
    waited = sum(end_s - start_s for start_s, end_s in gaps)
    words = f"{turn.phase}, one of {turn.turns} turns: {1e3 * turn.seconds:.2f} ms, {1e3 * waited:.2f} ms of it waiting"
    ax.set_title(words, fontsize=9, loc="left", pad=3)
    ax.set_yticks(list(_LANES.values()), ["computes", "sends"], fontsize=8.5)
    ax.set(xlim=(0, 1.01e3 * longest_s), ylim=(-0.5, 1.5))
    ax.tick_params(labelsize=8.5, labelbottom=last, left=False)
    ax.spines[["top", "right"]].set_visible(False)
    if last:
        ax.set_xlabel("ms", fontsize=8.5)


def lanes_legend(ax: "Axes", turns: Sequence[Timeline]) -> None:
    """What the colours of all turns mean, below the axes of the last."""
    from matplotlib.patches import Patch  # noqa: PLC0415 - an extra, needed where a picture is drawn alone

    kinds = {event.what.split()[0] for turn in turns for event in turn.events}
    handles = [Patch(color=color, label=word) for kind, (word, color) in _LOOKS.items() if kind in kinds]
    handles.append(Patch(**_WAITS, linewidth=0.0, label="waiting for what is sent: exposed"))
    at = (0, -0.42 / inches_high(ax))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=at, ncols=len(handles), fontsize=8, frameon=False)


def _bars(ax: "Axes", spans: Sequence[tuple[float, float]], lane: float, **look: Any) -> None:
    if spans:
        ax.broken_barh([(1e3 * start, 1e3 * (end - start)) for start, end in spans], (lane - 0.38, 0.76), **look)


def waits(turn: Timeline) -> Iterator[tuple[float, float]]:
    """Where nothing is computed, for longer than a thousandth of the turn."""
    now = 0.0
    busy = sorted((e.start_s, e.end_s) for e in turn.events if e.stream == "compute")
    for start_s, end_s in [*busy, (turn.seconds, turn.seconds)]:
        if start_s - now > 1e-3 * turn.seconds:
            yield now, start_s
        now = max(now, end_s)
