"""What a step moves between a device, its host's memory and disks, and how much slower that makes it.

As Rajbhandari et al. 2021 (ZeRO-Infinity, section 4) ask it: which bandwidth would each class of bytes need to hide
behind what is computed meanwhile?  Parameters come while a pass computes; the optimizer's state comes and goes while it
is updated, so it hides behind little, and what counts is its share of the step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax.traverse_util import flatten_dict

import jzero
from jzero.gpus import Gpu
from jzero.plan.estimate import Estimate
from jzero.zero import shard_bytes

#: Bytes of host memory for each element that the host updates: a gradient, m, v and a master of 4 bytes, of which the
#: last three are written, too, and a parameter of 2.
CPU_BYTES = 30
PCIE_EFFICIENCY = 0.8
WAYS = ("up_bytes", "down_bytes", "read_bytes", "written_bytes")


@dataclass(frozen=True)
class Moved:
    """Bytes of one class that one device's part of a step moves.

    Attributes:
        what: "optimizer state", "gradients" or "parameters".
        when: "passes" or "update": what is computed meanwhile; "sums", over microbatches and for the norm, beside which
            nothing is.
        up_bytes, down_bytes: from host memory to the device, and back.
        read_bytes, written_bytes: of files.
    """

    what: str
    when: str
    up_bytes: int = 0
    down_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class Offloading:
    """What resting elsewhere costs a step.

    Attributes:
        moved: by class.
        cpu_elements: numbers that the host updates for one device.
        devices_per_host: share the memory and the disks of a host.
        without_s: seconds of the step if everything were on the device, and enough of that; 0 where no rates are known.
        step_s: with it.
        needed_gb_per_s: "passes" and "update" -> 10^9 bytes per second and device, in the busier direction, at which
            it would cost nothing.
        assumptions: in the rates.
    """

    moved: tuple[Moved, ...]
    cpu_elements: int
    devices_per_host: int
    without_s: float = 0.0
    step_s: float = 0.0
    needed_gb_per_s: dict[str, float] | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def slowdown(self) -> float:
        """Of the step, as a factor."""
        return self.step_s / self.without_s if self.without_s else 1.0

    def total(self, way: str, when: str) -> int:
        """Bytes of all classes in a field of `Moved`, of one part of the step."""
        return sum(getattr(moved, way) for moved in self.moved if moved.when == when)


def offloading_of(run: jzero.Run, devices_per_host: int) -> Offloading | None:
    """What a step of `run` moves, without rates; None where nothing rests elsewhere."""
    classes = _together([*_state(run), *_params(run), *_grads(run)])
    moved = [m for m in classes if m.up_bytes + m.down_bytes + m.read_bytes + m.written_bytes]
    elements = sum(math.prod(cut.shape) for cut in _cuts_on_cpu(run))
    here = min(devices_per_host, run.mesh.size)
    return Offloading(tuple(moved), elements, here) if moved else None


def _together(classes: Sequence[Moved]) -> list[Moved]:
    """Those of the same bytes at the same time as one: the host's update takes down what came up from the host."""
    found: dict[tuple[str, str], Moved] = {}
    for m in classes:
        old = found.get((m.what, m.when), Moved(m.what, m.when))
        sums = {way: getattr(old, way) + getattr(m, way) for way in WAYS}
        found[m.what, m.when] = replace(m, **sums)
    return list(found.values())


def _state(run: jzero.Run) -> list[Moved]:
    """Groups that come to the device, groups in files, and what the host's update takes and gives."""
    groups = run.stream.groups if run.stream else ()
    flying = sum(group.state.nbytes for group in groups if group.state.tier.name != "device" and not group.on_cpu)
    files = sum(group.state.nbytes for group in groups if group.state.tier.name == "nvme")
    grads = sum(4 * math.prod(cut.shape) for cut in _cuts_on_cpu(run))
    given: dict[Any, Any] = flatten_dict(run.abstract_state.params)
    in_files = run.params_in_files()  # read and written where they are updated
    cuts = [
        (math.prod(cut.shape), given[cut.path].dtype.itemsize) for cut in _cuts_on_cpu(run) if cut.path not in in_files
    ]
    params, masters = (sum(n * width for n, width in cuts if width >= least) for least in (0, 4))
    return [
        Moved("optimizer state", "update", flying, flying, files, files),
        Moved("gradients", "update", 0, grads),
        Moved("parameters", "update", params, masters),  # those in 32 bits are their own masters
    ]


def _cuts_on_cpu(run: jzero.Run) -> list[Any]:
    groups = run.stream.groups if run.stream else ()
    return [cut for group in groups if group.on_cpu for cut in group.cuts]


def _params(run: jzero.Run) -> list[Moved]:
    """Fetched, or read, for both passes of every microbatch; trained ones are updated, too.

    Beside a stack of layers, what is read outside of it (tables, heads) is fetched once and kept for the backward pass.
    """
    if run.stream is None:
        return []
    state, stacked, files = run.abstract_state, run.stacked(), run.params_in_files()
    trained, frozen = flatten_dict(state.params), flatten_dict(state.frozen)
    elsewhere = files | run.params_on_host()
    each = {path: shard_bytes(x) for path, x in {**trained, **frozen}.items() if path in elsewhere}
    passes = {path: (2 if path in stacked or not stacked else 1) * run.micro_batches * each[path] for path in each}
    updated = {path: shard_bytes(run.stream.in_groups.param(path)) for path in each.keys() & trained.keys()}
    # What the host updates in files does not come up for it.
    up = updated.keys() - {cut.path for cut in _cuts_on_cpu(run) if cut.path in files}
    read = sum(passes[path] for path in passes.keys() & files)
    written = sum(updated[path] for path in updated.keys() & files)
    of_update = (sum(updated[path] for path in up), sum(each[path] for path in up), written, written)
    return [
        Moved("parameters", "passes", sum(passes.values()), 0, read),
        Moved("parameters", "update", *of_update),
    ]


def _grads(run: jzero.Run) -> list[Moved]:
    """Those that rest on the host: stored there as backward makes them, added up there and squared for the norm, and
    fetched in pieces for the update.

    What is no stack is still on the device when it is added, or where nothing is, when the norm is taken.
    """
    if run.stream is None:
        return []
    own, parts = run.stream.in_groups, run.micro_batches
    sizes = {path: shard_bytes(own.param(path), own.sharding(path), run.grads_dtype) for path in run.grads_on_host()}
    one, stacks = sum(sizes.values()), sum(sizes[path] for path in sizes.keys() & run.stacked())
    sums = (parts * (one + stacks) + one, (parts + 1) * one) if parts > 1 else (stacks, 0)  # a sum begins as zeros
    return [
        Moved("gradients", "passes", 0, parts * one),
        Moved("gradients", "sums", *sums),
        Moved("gradients", "update", one, 0),
    ]


def slowed(time: Estimate, found: Offloading, gpu: Gpu, group_bytes: int) -> tuple[Estimate, Offloading]:
    """A step's time with what `found` says under way, and what that costs.

    Args:
        time: with everything on the device.
        group_bytes: of the largest group: the first comes and the last goes while nothing is updated.
    """
    link, shared = gpu.pcie_gb_per_s * 1e9 * PCIE_EFFICIENCY, found.devices_per_host
    passes_s, update_s = time.parts_s["passes"], time.parts_s["update"]
    fetched, busiest = (
        max(found.total("up_bytes", when), found.total("down_bytes", when)) for when in ("passes", "update")
    )
    # A layer comes up, is worked on and goes down again before the next one does.
    summed = found.total("up_bytes", "sums") + found.total("down_bytes", "sums")
    disks = gpu.disk_gb_per_s * 1e9 / shared
    sums_s, link_s = _seconds(summed, link), _seconds(busiest, link)
    fetch_s = max(_seconds(fetched, link), _seconds(found.total("read_bytes", "passes"), disks))
    disk = max(found.total("read_bytes", "update"), found.total("written_bytes", "update"))
    moving_s = max(
        link_s,
        _seconds(disk, disks),
        CPU_BYTES * found.cpu_elements * shared / (gpu.host_gb_per_s * 1e9),
    )
    ends_s = 2 * _seconds(min(group_bytes, busiest), link)
    more_s = sums_s + max(0.0, fetch_s - passes_s) + max(0.0, moving_s - update_s) + ends_s
    step_s = time.step_s + more_s
    needed = {
        "passes": fetched / passes_s / 1e9,
        "update": busiest / update_s / 1e9 if update_s else math.inf,
    }
    later = replace(time, step_s=step_s, exposed_s=time.exposed_s + more_s, mfu=time.mfu * time.step_s / step_s)
    cost = replace(
        found,
        without_s=time.step_s,
        step_s=step_s,
        needed_gb_per_s={when: rate for when, rate in needed.items() if 0 < rate < math.inf},
        assumptions=_assumptions(found, gpu),
    )
    return later, cost


def _seconds(nbytes: int, rate: float) -> float:
    return nbytes / rate if rate else math.inf if nbytes else 0.0


def _assumptions(found: Offloading, gpu: Gpu) -> tuple[str, ...]:
    pcie = (
        f"PCIe: {gpu.pcie_gb_per_s:g} GB/s in each direction and for each device, of which copies reach "
        f"{PCIE_EFFICIENCY:.0%}; other values as in --target h100:pcie_gb_per_s=32"
    )
    lines = [pcie]
    if any(moved.read_bytes for moved in found.moved):
        lines.append(f"disks of a host: {gpu.disk_gb_per_s:g} GB/s in each direction, all together (disk_gb_per_s)")
    if found.cpu_elements:
        lines.append(
            f"memory of a host: {gpu.host_gb_per_s:g} GB/s, all together (host_gb_per_s), of which the update of an "
            f"element takes {CPU_BYTES} bytes"
        )
    return tuple(lines)


def largest_group(run: jzero.Run) -> int:
    """Bytes of one device in the largest group; 0 where there is none."""
    return max((group.device_bytes for group in run.stream.groups), default=0) if run.stream else 0
