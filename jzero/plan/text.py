"""A plan in words and numbers for a terminal: bytes of one device, in 10^9 (GB) or 10^6 (MB)."""

from collections.abc import Sequence
from dataclasses import dataclass

from jzero import host_memory
from jzero.plan.estimate import Estimate
from jzero.plan.fit import remedies
from jzero.plan.memory import Memory, Part
from jzero.plan.offloading import WAYS, Offloading
from jzero.plan.report import MARGIN, Plan
from jzero.plan.traffic import BETWEEN_HOSTS, IN_HOST, Traffic


def describe(plan: Plan, margin: float = MARGIN) -> str:
    """All that a plan says.

    Args:
        margin: part of a device's memory that is to stay free.
    """
    unit = Unit.of(plan)
    sections = [_head(plan, unit), _memory(plan, margin, unit), _traffic(plan, unit)]
    if plan.offload:
        sections.append(_offload(plan.offload, unit))
    if plan.time:
        sections.append(_time(plan, plan.time, unit))
    return "\n\n".join([*sections, *([_notes(plan)] if plan.notes else [])])


_WHERE = {"layers": "in the layer loop", "beside": "beside it"}


@dataclass(frozen=True)
class Unit:
    """In which sizes are shown: one unit for all of a plan."""

    name: str
    nbytes: float

    @classmethod
    def of(cls, plan: Plan) -> "Unit":
        """MB for what is small, GB else."""
        return cls("MB", 1e6) if plan.memory.peak_bytes < 1e9 else cls("GB", 1e9)

    def show(self, nbytes: float) -> str:
        """The number, without the unit, with three digits or those before the point."""
        size = nbytes / self.nbytes
        if not size:
            return "0"
        digits = ",.0f" if abs(size) >= 1000 else ".2f" if abs(size) >= 0.1 else ".2g"
        return format(size, digits)


def compare(plans: Sequence[Plan], margin: float = MARGIN) -> str:
    """One line for each plan: what it holds, whether it fits, and what it sends."""
    unit = max((Unit.of(plan) for plan in plans), key=lambda unit: unit.nbytes)
    head = (
        "mesh", "stage", "remat", "rows", "states", "temporaries", "peak", "fits", "wire, in a host", "between hosts",
        "tokens/s", "mfu",
    )  # fmt: skip
    rows = [head, *(_row(plan, margin, unit) for plan in plans)]
    first = plans[0]
    capacity = "" if first.capacity_bytes is None else f" of {unit.show(first.capacity_bytes)}"
    said = f"{first.parameters:,} parameters on {first.device}; {unit.name} of one device{capacity}"
    return "\n".join([f"{said}, {margin:.0%} to stay free", table(rows), *_fastest(plans, margin)])


def _fastest(plans: Sequence[Plan], margin: float) -> list[str]:
    """Which of several plans that fit trains most tokens per second, by the estimate."""
    rates = {i: plan.time.tokens_per_s for i, plan in enumerate(plans) if plan.time and plan.missing_bytes(margin) <= 0}
    if len(plans) == 1 or not any(plan.time for plan in plans):
        return []
    if not rates:
        return [f"none fits; of the last, {remedies(plans[-1], margin)}"]
    best = max(rates, key=lambda i: rates[i])
    mesh, stage, remat, *_ = _row(plans[best], margin, Unit.of(plans[best]))
    return [f"fastest that fits: {mesh}, stage {stage}, remat {remat}, {rates[best]:,.0f} tokens/s over all devices"]


def _row(plan: Plan, margin: float, unit: Unit) -> tuple[str, ...]:
    show, missing = unit.show, plan.missing_bytes(margin)
    fits = "" if plan.capacity_bytes is None else "yes" if missing <= 0 else f"{show(missing)} too much"
    return (
        ",".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one device",
        f"{plan.stage} kept" if plan.label.get("gathered") else str(plan.stage),
        plan.label.get("remat", ""),
        f"{plan.rows} / {plan.micro_batches}" if plan.micro_batches > 1 else str(plan.rows),
        show(plan.memory.states_bytes),
        show(plan.memory.temp_bytes),
        show(plan.memory.peak_bytes),
        fits,
        show(plan.traffic.wire_bytes(IN_HOST)),
        show(plan.traffic.wire_bytes(BETWEEN_HOSTS)),
        f"{plan.time.tokens_per_s:,.0f}" if plan.time else "",
        f"{plan.time.mfu:.1%}" if plan.time and plan.time.mfu else "",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _head(plan: Plan, unit: Unit) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    where = "not here, compiled for" if plan.absent else "here"
    parts = f"{plan.micro_batches} microbatches" if plan.micro_batches > 1 else "one microbatch"
    asked = plan.label.get("stage", str(plan.stage))
    stage = f"stage {plan.stage}" + (f" ({asked} was asked for)" if asked != str(plan.stage) else "")
    power = {"MB": 6, "GB": 9}[unit.name]
    return (
        f"{plan.parameters:,} parameters, {stage} on mesh {mesh}: {plan.devices} x {plan.device} ({where})\n"
        f"{plan.rows} sequences a step, in {parts}; numbers are of one device, {unit.name} are 10^{power} bytes"
    )


def _memory(plan: Plan, margin: float, unit: Unit) -> str:
    memory, show = plan.memory, unit.show
    rows = [("memory", unit.name, "paper's formula", "")]
    rows += [
        (f"  {part.name}", show(part.nbytes), show(part.formula_bytes) if part.formula_bytes else "", part.why)
        for part in memory.parts
        if _is_shown(part, plan)
    ]
    rows.append(("  model states, all of these", show(memory.states_bytes), show(memory.formula_bytes), ""))
    rows.append(("at rest", show(memory.at_rest_bytes), "", "exact, from the specs; gradients live during a step"))
    if memory.in_flight_bytes:
        said = "of optimizer state, the most at a time: on its way in, at its update, on its way out"
        rows.append(("in flight", show(memory.in_flight_bytes), "", said))
    rows.append(("temporaries", show(memory.temp_bytes), "", _temporaries(memory)))
    if memory.activations_bytes:
        rows.append(("  activations", show(memory.activations_bytes), "", "kept by forward for backward"))
    if memory.gathered_bytes:
        rows.append(
            (
                "  gathered parameters",
                show(memory.gathered_bytes),
                "",
                "the most at a time, with copies in other layouts",
            )
        )
    if memory.other_bytes:
        rows.append(("  other", show(memory.other_bytes), "", "what a layer computes with, logits, buffers of links"))
    rows.append(("peak", show(memory.peak_bytes), "", _fit(plan, margin, unit)))
    for tier, name, of_machine, of_what in (
        ("host", "host memory", memory.host_bytes_per_machine, "memory"),
        ("nvme", "files", memory.nvme_bytes_per_machine, "disks"),
    ):
        if memory.tiers.get(tier):
            said = f"at rest: {_elsewhere(memory, tier)}; {show(of_machine)} of a machine's {of_what}"
            rows.append((name, show(memory.tiers[tier]), "", said))
    if memory.pinned_bytes:
        rows.append(("  pinned", show(memory.pinned_bytes), "", _pinned(memory, unit)))
    cells = table([row[:3] for row in rows]).split("\n")
    lines = [f"{line}  {row[3]}".rstrip() for line, row in zip(cells, rows, strict=True)]
    does_not_fit = plan.capacity_bytes is not None and plan.missing_bytes(margin) > 0
    return "\n".join([*lines, *([f"  {remedies(plan, margin)}"] if does_not_fit else [])])


def _temporaries(memory: Memory) -> str:
    if memory.peak_program == "step":
        return "by the compiler, gradients among them"
    return (
        f"of program {memory.peak_program!r}, where most is held; by the compiler, beside {memory.argument_bytes:,} B"
    )


def _elsewhere(memory: Memory, tier: str) -> str:
    """What rests in a tier, in words."""
    return ", ".join(part.name for part in memory.parts if part.elsewhere.get(tier))


def _pinned(memory: Memory, unit: Unit) -> str:
    """What a process needs of pinned memory, and what to set where that is more than it gets."""
    devices = memory.devices_per_machine
    of_process = devices * memory.pinned_bytes
    said = "of that" + (f", {unit.show(of_process)} for a process with {devices} devices" if devices > 1 else "")
    limit = f"XLA gives a process {host_memory.DEFAULT_BYTES // 2**30} GiB"
    if setting := host_memory.setting_for(of_process):
        return f"{said}: {limit} unless {setting} or more is set before JAX starts, as jzero.train does"
    return f"{said}; {limit}"


def _fit(plan: Plan, margin: float, unit: Unit) -> str:
    if plan.capacity_bytes is None:
        return ""
    missing = plan.missing_bytes(margin)
    kept = f", of which {margin:.0%} stay free" if margin else ""
    verdict = (
        f"{unit.show(missing)} {unit.name} too much for" if missing > 0 else f"fits, {unit.show(-missing)} left of"
    )
    return f"{verdict} {unit.show(plan.capacity_bytes)}{kept}"


def _traffic(plan: Plan, unit: Unit) -> str:
    traffic, show = plan.traffic, unit.show
    if not traffic.sent:
        return "traffic of a step: none, there is one device"
    rows = [("traffic of a step", "link", "dtype", f"message {unit.name}", f"wire {unit.name}")]
    for sent in traffic.sent:
        if sent.message_bytes > 1e-6 * plan.memory.peak_bytes:
            name = f"  {sent.kind} over {'+'.join(sent.axes)}"
            rows.append((name, sent.link, sent.dtype, show(sent.message_bytes), show(sent.wire_bytes)))
    lines = [table(rows), "  message: full tensors; wire: what one device sends with a ring"]
    if traffic.formula_elements:
        per_element = traffic.zero_wire_bytes / traffic.formula_elements
        lines.append(
            f"  ZeRO: {show(traffic.zero_wire_bytes)} {unit.name} on the wire, {per_element:.2f} bytes for each of the "
            f"{traffic.formula} x (N-1)/N elements of the closed form; tensor parallelism: "
            f"{show(traffic.tp_wire_bytes)}"
        )
    return "\n".join([*lines, *_not_as_written(traffic, unit)])


_WHEN = {"passes": "in the passes", "sums": "in sums and norm", "update": "in the update"}


def _offload(found: Offloading, unit: Unit) -> str:
    """What moves between the device, its host and disks, and what it costs."""
    rows = [("to and from the host", f"up {unit.name}", "down", "read from disk", "written")]
    rows += [(f"  {m.what}, {_WHEN[m.when]}", *(unit.show(getattr(m, way)) for way in WAYS)) for m in found.moved]
    lines = [table(rows)]
    if found.without_s:
        lines.append(
            f"  a step takes {_seconds(found.step_s)}, {found.slowdown:.2f} times the {_seconds(found.without_s)} "
            f"that it would with everything on the device"
        )
    needed = found.needed_gb_per_s or {}
    lines += [f"  {rate:,.1f} GB/s a device would hide it behind the {when}" for when, rate in needed.items()]
    return "\n".join([*lines, *(f"  assumed: {line}" for line in found.assumptions)])


def _time(plan: Plan, time: Estimate, unit: Unit) -> str:
    """Seconds, what of the traffic hides, and what is assumed."""
    mfu = f", mfu {time.mfu:.1%}" if time.mfu else ""
    computing, waiting = _seconds(time.compute_s), _seconds(time.exposed_s)
    lines = [
        f"time of a step, an estimate: {_seconds(time.step_s)}, computing {computing} and waiting for links {waiting}",
        f"  {time.tokens_per_s:,.0f} tokens/s over all devices{mfu}",
    ]
    if time.shares:
        rows = [("  collectives", "message " + unit.name, "on the link", "hidden", "exposed")]
        rows += [
            (
                f"  {share.phase}, {_WHERE[share.where]}: {share.kind} over {share.axes}",
                unit.show(share.message_bytes),
                _seconds(share.seconds),
                f"{share.hidden_s / share.seconds:.1%}",
                _seconds(share.seconds - share.hidden_s),
            )
            for share in time.shares
            if share.message_bytes > 1e-6 * plan.memory.peak_bytes
        ]
        lines.append(table(rows))
    if time.tokens_to_hide:
        enough = "enough" if time.tokens_here >= time.tokens_to_hide else "too few"
        lines.append(
            f"  ZeRO's traffic takes as long as computing at {time.tokens_to_hide:,.0f} tokens in a device's "
            f"microbatch; here are {time.tokens_here:,}: {enough} to hide it"
        )
    return "\n".join([*lines, *(f"  assumed: {line}" for line in time.assumptions)])


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"


def _not_as_written(traffic: Traffic, unit: Unit) -> list[str]:
    """Where the compiler sends other tensors than jzero wrote."""
    return [
        f"  {sent.kind} over {'+'.join(sent.axes)} ({sent.dtype}): written are {unit.show(sent.written_bytes)} "
        f"{unit.name}, the compiler has made {unit.show(sent.message_bytes)} of it"
        for sent in traffic.sent
        if sent.written_bytes is not None
        and abs(sent.written_bytes - sent.message_bytes) > 0.001 * sent.message_bytes
        and sent.kind != "all-reduce"
    ]


def _notes(plan: Plan) -> str:
    return "\n".join(f"note: {note}" for note in plan.notes)


def _is_shown(part: Part, plan: Plan) -> bool:
    return max(part.nbytes, part.formula_bytes) > 1e-6 * plan.memory.peak_bytes
