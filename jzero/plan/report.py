"""The plan of a run: what a step of it holds, sends and takes, read off its compiled program before anything runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax

import jzero
from jzero import gpus, hlo, targets
from jzero.mesh import data_size
from jzero.plan.estimate import Estimate, Tokens, estimate
from jzero.plan.memory import Memory, memory_of, stage_of
from jzero.plan.offloading import Offloading, largest_group, offloading_of, slowed
from jzero.plan.programs import programs_of
from jzero.plan.traffic import Traffic, traffic_of
from jzero.rates import Rates
from jzero.saved import saved

MARGIN = 0.1  # part of a device's memory that is to stay free: for the driver, for libraries, for fragments
_NAMED = 3  # leaves that stay whole, one by one


@dataclass(frozen=True)
class Plan:
    """What a step costs on one device.

    Attributes:
        device: what the device calls itself.
        absent: the program was compiled for devices that are not here.
        mesh: axis -> size.
        stage: whose specs the run has.
        parameters: how many numbers, frozen ones included.
        rows: of a batch, over the whole mesh; micro_batches: forward-backward passes they are split into.
        capacity_bytes: memory of one device; None where nobody tells.
        memory, traffic: of one device.
        time: an estimate; None where the rates of the device are not known.
        offload: what resting outside of the device moves and costs; None where nothing does.
        notes: what a user should know of how the model runs, and what is assumed here.
        label: what its settings say that the run does not know, such as {"remat": "full"}.
    """

    device: str
    absent: bool
    mesh: dict[str, int]
    stage: int
    parameters: int
    rows: int
    micro_batches: int
    capacity_bytes: int | None
    memory: Memory
    traffic: Traffic
    time: Estimate | None = None
    notes: tuple[str, ...] = ()
    label: dict[str, str] = field(default_factory=dict)
    offload: Offloading | None = None

    @property
    def devices(self) -> int:
        """How many the mesh has."""
        return math.prod(self.mesh.values())

    def missing_bytes(self, margin: float) -> int:
        """What a device lacks for the peak when a part `margin` of its memory stays free; negative where it fits."""
        capacity = self.memory.peak_bytes if self.capacity_bytes is None else self.capacity_bytes * (1 - margin)
        return round(self.memory.peak_bytes - capacity)


def of(
    run: jzero.Run,
    gpu: targets.Gpu | str | None = None,
    *,
    tokens: Tokens | None = None,
    capacity_bytes: int | None = None,
    label: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a run: compiles its step, and runs nothing.

    Args:
        run: from `jzero.setup`; on a mesh of `targets.gpu_devices`, the GPUs need not be here.
        gpu: the description of those, or its name, for their memory and rates; None for devices that are here, of which
            a GPU that the table knows by its name has rates, too.
        tokens: what a row of the batch is to the model, for tokens per second.
        capacity_bytes: memory of one device, where it is not that of `gpu`.
        label: what a table is to say of it.

    Raises:
        ValueError: the run is on other devices than `gpu`.
        HloError: the program cannot be read to the byte; the message names the instruction.
    """
    gpu = targets.parse(gpu) if isinstance(gpu, str) else gpu
    device = run.mesh.devices.flat[0]
    if gpu and gpu.name != device.device_kind:
        raise ValueError(f"the run is on {device.device_kind}, and the plan asked for is of {gpu.name}")
    programs = programs_of(run, targets.COMPILER_OPTIONS if gpu else None)
    known = gpu or gpus.by_name(device.device_kind)
    per_host = gpu.devices_per_host if gpu else jax.local_device_count()
    stage = stage_of(run)
    ledger = [
        replace(c, trips=c.trips * times)
        for _, program, times in programs.running()
        for c in hlo.collectives(program, run.mesh)
    ]
    kept = saved(programs.passes)
    time = estimate(run, programs, Rates.of(known, run.mesh, per_host), tokens) if known else None
    moved = offloading_of(run, per_host)
    if time and moved and known:
        time, moved = slowed(time, moved, known, largest_group(run))
    return Plan(
        device=gpu.name if gpu else device.device_kind,
        absent=gpu is not None,
        mesh=dict(run.mesh.shape),
        stage=stage,
        parameters=run.parameters,
        rows=jax.tree.leaves(run.abstract_batch)[0].shape[0],
        micro_batches=run.micro_batches,
        capacity_bytes=capacity_bytes or (gpu.memory_bytes if gpu else None),
        memory=memory_of(run, programs, per_host, kept.activation_bytes, kept.gathered_bytes),
        traffic=traffic_of(run, ledger, stage, per_host, programs.times),
        time=time,
        offload=moved,
        notes=(*_whole(run), *run.notes),
        label=dict(label or {}),
    )


def _whole(run: jzero.Run) -> list[str]:
    """What the stage would shard and could not, the largest first."""
    if data_size(run.mesh) == 1:
        return ["there is one data-parallel device: nothing is sharded, and all stages are stage 0"]
    largest = sorted(run.whole, key=lambda leaf: -leaf.nbytes)
    if not largest:
        return []
    total = sum(leaf.nbytes for leaf in largest)
    named = [f"{leaf.path} {tuple(leaf.shape)}, {leaf.nbytes:,} bytes: {leaf.reason}" for leaf in largest[:_NAMED]]
    return [f"whole on every device: {len(largest)} leaves, {total:,} bytes of parameters", *named]
