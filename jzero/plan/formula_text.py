"""The closed formulas as tables for a reader."""

from collections.abc import Sequence
from itertools import groupby

from jzero.plan.formulas import PAPER, DeepSpeedEstimate, PaperRow, Widths, states
from jzero.plan.text import table


def paper_table(rows: Sequence[PaperRow], micro_batches: int = 1, tp: int = 1, widths: Widths = PAPER) -> str:
    """The ZeRO paper's table 1 for `rows`, or the states by class where there is one number of devices; the traffic.

    Args:
        rows: of `paper_rows`, with the other arguments given there.
    """
    unit = _Unit(min(row.parameters for row in rows))
    split = f"a slice of Ψ/{tp} on each of tp = {tp} devices, N = devices/{tp}" if tp > 1 else "N = devices"
    held = (
        f"parameters {widths.params:g}, gradients {widths.grads:g}, master {widths.master:g}, m + v {widths.moments:g}"
    )
    parts = [
        "ZeRO's formulas (Rajbhandari et al. 2020): model states and traffic of one device, no activations.",
        f"Ψ parameters, {split}; {unit.name} are {unit.words} bytes.",
        f"Bytes per parameter: {held}; {widths.reduce:g} for a gradient on the wire.",
    ]
    one = len({row.devices for row in rows}) == 1
    for psi, found in groupby(rows, lambda row: row.parameters):
        mine = list(found)
        on = f" on {mine[0].devices:,} device{'s' * (mine[0].devices > 1)}" if one else ""
        lines = _by_class(mine, unit) if one else _by_devices(mine, unit, widths)
        parts += ["", f"Ψ = {psi:,}{on}, {unit.name}", lines]
    return "\n".join([*parts, "", *_traffic(rows, unit, micro_batches, tp)])


def deepspeed_table(rows: Sequence[DeepSpeedEstimate], parameters: int, largest_layer: int, setting: str) -> str:
    """DeepSpeed's estimates; `setting` says for which machines."""
    head = ["stage", "offload to the CPU", "parameters created", "per host, GB", "per GPU, GB"]
    created = {True: "in shards", False: "whole", None: "-"}
    body = [
        [str(r.stage), r.offload, created[r.sharded_init], f"{r.cpu_bytes / 2**30:.2f}", f"{r.gpu_bytes / 2**30:.2f}"]
        for r in rows
    ]
    lines = [
        "DeepSpeed's estimators (0.19): no activations, buckets or fragmentation; GB, as there, are 2^30 bytes.",
        f"{parameters:,} parameters, largest layer {largest_layer:,}; {setting}",
        "",
        table([head, *body]),
    ]
    return "\n".join(lines)


class _Unit:
    """GB, or MB where the smallest model is below 0.1 B."""

    def __init__(self, parameters: int) -> None:
        self.name, self.words, self._bytes = ("GB", "10^9", 1e9) if parameters >= 1e8 else ("MB", "10^6", 1e6)

    def of(self, nbytes: float) -> str:
        return f"{nbytes / self._bytes:,.2f}"


def _by_devices(rows: Sequence[PaperRow], unit: _Unit, widths: Widths) -> str:
    stages = sorted({row.stage for row in rows})
    by_devices = groupby(rows, lambda row: row.devices)
    body = [[f"{n:,}", *(unit.of(row.states.total) for row in found)] for n, found in by_devices]
    return table([["devices", *(f"stage {n}: {_formula(n, widths)}" for n in stages)], *body])


def _formula(stage: int, widths: Widths) -> str:
    """Such as 4Ψ + 12Ψ/N."""
    one, two = (states(1, stage, n, widths=widths).total for n in (1, 2))
    shard = 2 * (one - two)
    return " + ".join(f"{_psi(n)}{over}" for n, over in ((one - shard, ""), (shard, "/N")) if n)


def _by_class(rows: Sequence[PaperRow], unit: _Unit) -> str:
    held = [(row.stage, row.states) for row in rows]
    body = [[str(n), *map(unit.of, (s.params, s.grads, s.master, s.moments, s.total))] for n, s in held]
    return table([["stage", "parameters", "gradients", "master", "m + v", "in all"], *body])


def _traffic(rows: Sequence[PaperRow], unit: _Unit, micro_batches: int, tp: int) -> list[str]:
    """In units of Ψ, which holds for all rows; in bytes too where there is one model on one number of devices."""
    ends = (rows[-1].parameters, rows[-1].devices)
    last = [row for row in rows if (row.parameters, row.devices) == ends]
    bytes_too, psi = len(last) == len(rows), rows[-1].parameters / tp
    head = ["stage: collectives", "messages", "sent", "sent / stage 0's"]
    head += [f"messages, {unit.name}", f"sent, {unit.name}"] if bytes_too else []
    body = []
    for row in last:
        moved = row.traffic
        ratio = moved.ring_elements / last[0].traffic.ring_elements
        counts = [_psi(moved.message_elements / psi), _psi(moved.ring_elements / psi), f"{ratio:g}"]
        sizes = [unit.of(moved.message_bytes), unit.of(moved.wire_bytes)] if bytes_too else []
        body.append([f"{row.stage}: {_collectives(row, psi)}", *counts, *sizes])
    slices = f", Ψ being the slice of {psi:,.0f}" if tp > 1 else ""
    in_bytes = "; in bytes with the factor (N-1)/N" if bytes_too else ""
    return [
        f"A step's traffic with M = {micro_batches}{slices}. Messages are full tensors; sent is what one device puts",
        f"on the wire, where an all-reduce takes 2Ψ, as a reduce-scatter and an all-gather do (N large{in_bytes}).",
        table([head, *body]),
    ]


def _collectives(row: PaperRow, psi: float) -> str:
    moved = row.traffic
    kinds = {"all-reduce": moved.all_reduced, "reduce-scatter": moved.scattered, "all-gather": moved.gathered}
    return ", ".join(f"{kind} {_psi(n / psi)}" for kind, n in kinds.items() if n)


def _psi(count: float) -> str:
    return "Ψ" if count == 1 else f"{count:g}Ψ"
