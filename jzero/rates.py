"""How fast a GPU, its memory and its links are: what turns the counts of a program into seconds.

Datasheets give peaks; what is reached of them is an assumption, stands in a field of its own and is printed::

    rates = Rates.of(GPUS["h100"], mesh)
    print("\\n".join(rates.assumptions()))

Who talks over which link follows from the mesh.  Devices fill it host by host, so a group of devices that differ along
some axes lies within a host or reaches over several, with some members in each.  Within a host a ring runs at NVLink's
rate, or PCIe's where there is none.  Across hosts it also passes the network cards: every GPU has one of its own, and
those of all members that a host holds work together, so the rate is the lower one of a GPU's NVLink and members per
host times a card's.
"""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh

from jzero.gpus import Gpu, TargetError
from jzero.hlo_cost import Cost

_TF32 = (8, 0)  # the first compute capability whose matrix units take 32-bit operands
# A collective's fixed cost, and what each step of its ring adds: the order of what NCCL's own tables have for its
# protocols (1 to 3 microseconds within a host, 3 to 14 across).
_START_S = 10e-6
_STEP_IN_HOST_S = 1e-6
_STEP_ACROSS_S = 5e-6


@dataclass(frozen=True)
class Link:
    """What the groups along some mesh axes talk over.

    Attributes:
        kind: "NVLink", "PCIe" or "network"; the slower one where it is more than one.
        hosts: hosts that a group reaches over; members_per_host of it lie in each.
        bytes_per_s: peak that one device sends at in one direction.
        latency_s: of one gather or scatter, however small: a ring has a step for each member.
        all_reduce_latency_s: of one all-reduce: a tree over the hosts has as many steps as the logarithm, up and down.
    """

    kind: str
    hosts: int
    members_per_host: int
    bytes_per_s: float
    latency_s: float
    all_reduce_latency_s: float


@dataclass(frozen=True)
class Rates:
    """Peaks of one device, and how much of them is reached.

    Attributes:
        device: its name.
        matmul_flops_per_s: peak of 16-bit matrix products.
        memory_bytes_per_s: peak of device memory, reads and writes together.
        links: by mesh axes, "node+dp": what groups along them talk over.
        matmul_efficiency, memory_efficiency, link_efficiency: shares of the peaks that are reached.
        wide_matmuls: speed of products of 32-bit operands by that of 16-bit ones: as TF32, or without matrix units.
        kernel_s: what starting one kernel adds to its time.
    """

    device: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    links: dict[str, Link] = field(default_factory=dict)
    matmul_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    wide_matmuls: float = 0.5
    kernel_s: float = 2e-6

    @staticmethod
    def of(gpu: Gpu, mesh: Mesh, devices_per_host: int | None = None, **reached: float) -> "Rates":
        """The rates of `gpu` with all groups that a program on `mesh` can have.

        Args:
            devices_per_host: so many devices that follow each other in the mesh share a host; None is `gpu`'s.
            reached: other values for efficiencies, `wide_matmuls` and `kernel_s`.

        Raises:
            TargetError: a mesh that reaches over hosts, of a GPU without a network rate.
        """
        axes = [name for name, size in mesh.shape.items() if size > 1]
        links = {
            "+".join(chosen): _link(gpu, mesh, chosen, devices_per_host or gpu.devices_per_host)
            for count in range(1, len(axes) + 1)
            for chosen in itertools.combinations(axes, count)
        }
        if gpu.capability < _TF32:  # a multiplication and an addition per unit and cycle
            reached.setdefault("wide_matmuls", 2e-3 * gpu.cores * gpu.fpus_per_core * gpu.clock_ghz / gpu.bf16_tflops)
        return Rates(gpu.name, gpu.bf16_tflops * 1e12, gpu.hbm_gb_per_s * 1e9, links, **reached)

    def compute_s(self, cost: Cost) -> float:
        """Seconds of one kernel: its matrix products or its memory traffic, whichever takes longer."""
        flops = cost.flops + cost.wide_flops * (1 / self.wide_matmuls - 1)
        multiplying = flops / (self.matmul_flops_per_s * self.matmul_efficiency)
        moving = (cost.read_bytes + cost.written_bytes) / (self.memory_bytes_per_s * self.memory_efficiency)
        return max(multiplying, moving) + self.kernel_s * cost.kernels

    def collective_s(self, kind: str, axes: tuple[str, ...], wire_bytes: float) -> float:
        """Seconds of one execution of a collective in which each device sends `wire_bytes`.

        Raises:
            ValueError: no link is known for these axes.
        """
        if "+".join(axes) not in self.links:
            raise ValueError(f"no link for groups along {'+'.join(axes)!r}: these rates know {', '.join(self.links)}")
        link = self.links["+".join(axes)]
        latency_s = link.all_reduce_latency_s if kind == "all-reduce" else link.latency_s
        return latency_s + wire_bytes / (link.bytes_per_s * self.link_efficiency)

    def assumptions(self, used: Collection[str] | None = None) -> tuple[str, ...]:
        """What is assumed, a line each.

        Args:
            used: keys of the links to speak of; None for all.
        """
        matmuls = (
            f"{self.device}: {self.matmul_flops_per_s / 1e12:g} TFLOPS in 16 bits, of which matrix products reach "
            f"{self.matmul_efficiency:.0%} (with 32-bit operands {self.wide_matmuls:.3g} times that)"
        )
        memory = (
            f"memory: {self.memory_bytes_per_s / 1e9:g} GB/s, of which kernels reach {self.memory_efficiency:.0%}; a "
            f"kernel takes the time of its products or of its memory, the longer one, and {self.kernel_s * 1e6:g} us"
        )
        links = (
            f"groups along {axes}: {link.kind}, {link.members_per_host} members in each of {link.hosts} hosts, "
            f"{link.bytes_per_s / 1e9:g} GB/s per device, of which collectives reach {self.link_efficiency:.0%}, "
            f"after {link.latency_s * 1e6:.0f} us (all-reduces {link.all_reduce_latency_s * 1e6:.0f} us)"
            for axes, link in self.links.items()
            if used is None or axes in used
        )
        return matmuls, memory, *links, "one collective at a time; it takes nothing from kernels that run beside it"


def _link(gpu: Gpu, mesh: Mesh, axes: tuple[str, ...], devices_per_host: int) -> Link:
    hosts, members = spread(mesh, axes, devices_per_host)
    within = ("NVLink", gpu.nvlink_gb_per_s) if gpu.nvlink_gb_per_s else ("PCIe", gpu.pcie_gb_per_s)
    network = members * gpu.nic_gb_per_s
    if hosts > 1 and not network:
        raise TargetError(
            f"{gpu.name} has no network card, and groups along {'+'.join(axes)} reach over {hosts} hosts of "
            f"{devices_per_host}: say how fast it is, as in h100:nic_gb_per_s=12.5, or take one host"
        )
    kind, rate = within if hosts == 1 or within[1] <= network else ("network", network)
    ring = (hosts - 1) * _STEP_ACROSS_S + hosts * (members - 1) * _STEP_IN_HOST_S
    tree = 2 * (math.ceil(math.log2(hosts)) * _STEP_ACROSS_S + (members - 1) * _STEP_IN_HOST_S)
    return Link(kind, hosts, members, rate * 1e9, _START_S + ring, _START_S + tree)


def spread(mesh: Mesh, axes: tuple[str, ...], devices_per_host: int) -> tuple[int, int]:
    """(hosts of a group along `axes`, members in each), of the group that is spread widest."""
    names = [*(name for name in mesh.axis_names if name not in axes), *axes]
    order = [mesh.axis_names.index(name) for name in names]
    size = int(np.prod([mesh.shape[name] for name in axes]))
    devices = np.arange(mesh.size).reshape(tuple(mesh.shape.values())).transpose(order).reshape(-1, size)
    hosts = max(len(np.unique(group // devices_per_host)) for group in devices)
    return hosts, -(-size // hosts)
