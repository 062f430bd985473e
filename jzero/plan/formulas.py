"""The closed formulas: model states and traffic of the ZeRO paper, and DeepSpeed's two estimators.

They know of no layer, activation or compiler, and that is their use: what a plan measures stands beside them.  Ψ is the
number of parameters, N the data-parallel devices, M the microbatches of a step; with tensor parallelism every formula
holds per slice, with Ψ / tp.

Traffic is counted in two ways, and no number here leaves open in which.  A *message* is the full tensor of a gather,
scatter or all-reduce.  The *wire* is what one device sends: with a ring (N-1)/N of a gather's or scatter's message and
twice that of an all-reduce's, which is a scatter and a gather.  By messages stages 1 and 2 send twice what data
parallelism does, by wire the same: 2Ψ.
"""

from dataclasses import dataclass

from jzero.zero import STAGES, stage_row


@dataclass(frozen=True)
class Widths:
    """Bytes per parameter of each thing that is held or sent; the defaults are the paper's mixed precision.

    Attributes:
        params, grads, master, moments: held; `moments` are m and v together.
        reduce: a gradient on the wire.
    """

    params: float = 2
    grads: float = 2
    master: float = 4
    moments: float = 8
    reduce: float = 2


PAPER = Widths()


@dataclass(frozen=True)
class States:
    """Bytes of one device, by class; `moments` are m and v together."""

    params: float
    grads: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.params + self.grads + self.master + self.moments


@dataclass(frozen=True)
class Traffic:
    """What one device's collectives move in one step.

    Attributes:
        all_reduced, scattered, gathered: elements of messages, by kind of collective.
        devices: that take part in each.
        widths: in which they travel.
    """

    all_reduced: float
    scattered: float
    gathered: float
    devices: int
    widths: Widths = PAPER

    @property
    def message_elements(self) -> float:
        """Elements of full tensors."""
        return self.all_reduced + self.scattered + self.gathered

    @property
    def message_bytes(self) -> float:
        """Bytes of full tensors."""
        return (self.all_reduced + self.scattered) * self.widths.reduce + self.gathered * self.widths.params

    @property
    def ring_elements(self) -> float:
        """Elements that one of very many devices sends, without the factor (N-1)/N: the paper's 2Ψ, 2Ψ, 2Ψ, 3Ψ."""
        return 2 * self.all_reduced + self.scattered + self.gathered

    @property
    def wire_elements(self) -> float:
        """Elements that one device sends."""
        return self.ring_elements * self._sent

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends."""
        reduced = (2 * self.all_reduced + self.scattered) * self.widths.reduce
        return (reduced + self.gathered * self.widths.params) * self._sent

    @property
    def _sent(self) -> float:
        return (self.devices - 1) / self.devices


def states(parameters: float, stage: int, devices: int, tp: int = 1, widths: Widths = PAPER) -> States:
    """Model states of one device at rest: Rajbhandari et al. 2020, figure 1 and table 1.

    Args:
        parameters: Ψ, of the whole model.
        stage: 0 to 3.
        devices: N, data-parallel ones.
        tp: tensor-parallel devices, on top.
        widths: bytes per parameter; `Widths(grads=4)` for float32 gradients, 2Ψ more.

    Raises:
        ShardingError: there is no such stage.
    """
    row, mine = stage_row(stage), parameters / tp
    of = {True: mine / devices, False: mine}
    return States(
        params=widths.params * of[row.params],
        grads=widths.grads * of[row.grads],
        master=widths.master * of[row.opt_state],
        moments=widths.moments * of[row.opt_state],
    )


def traffic(
    parameters: float,
    stage: int,
    devices: int,
    micro_batches: int = 1,
    tp: int = 1,
    widths: Widths = PAPER,
    *,
    regather: bool = True,
) -> Traffic:
    """What ZeRO moves in one step: Rajbhandari et al. 2020, section 7, with M microbatches.

    The paper's 2Ψ at stage 2 is M = 1: shards can only be accumulated by reducing every microbatch.

    Args:
        parameters: Ψ, of the whole model; one device's slice of it moves.
        stage: 0 to 3.
        devices: N, data-parallel ones.
        micro_batches: M.
        tp: tensor-parallel devices, whose own traffic is not counted.
        widths: bytes per parameter; `Widths(reduce=4)` for float32 reductions.
        regather: False where gathered parameters are kept from the forward to the backward pass.

    Raises:
        ShardingError: there is no such stage.
    """
    row, mine = stage_row(stage), parameters / tp
    if not row.opt_state:
        return Traffic(mine, 0, 0, devices, widths)
    scatters = micro_batches if row.grads else 1
    gathers = (2 if regather else 1) * micro_batches if row.params else 1
    return Traffic(0, scatters * mine, gathers * mine, devices, widths)


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeepSpeedEstimate:
    """A row of what `estimate_zero2_model_states_mem_needs` or `estimate_zero3_model_states_mem_needs` says.

    Attributes:
        stage: 2 or 3.
        offload: "none", "optimizer" or "both", which is optimizer and parameters, to the CPU.
        sharded_init: parameters are created in shards (`zero.Init`); None where it makes no difference.
        cpu_bytes: of one host.
        gpu_bytes: of one device.
    """

    stage: int
    offload: str
    sharded_init: bool | None
    cpu_bytes: int
    gpu_bytes: int


def deepspeed_estimates(
    parameters: int, largest_layer: int, devices_per_host: int, hosts: int, buffer_factor: float = 1.5
) -> list[DeepSpeedEstimate]:
    """DeepSpeed 0.19's estimates, in the order in which it prints them, stage 3 first.

    They leave out activations, buckets, gathered layers beyond one, and fragmentation.

    Args:
        parameters: P.
        largest_layer: L, parameters of the module that itself holds most.
        devices_per_host: g.
        hosts: n.
        buffer_factor: b, by which DeepSpeed multiplies what a host needs.
    """
    p, per_layer, g, n, b = parameters, 4 * largest_layer, devices_per_host, hosts, buffer_factor
    shards = g * n
    cpu_and_gpu = [
        (3, "both", True, 18 * p / n * b, per_layer),
        (3, "both", False, p * max(4 * g, 18 / n) * b, per_layer),
        (3, "optimizer", True, 16 * p / n * b, per_layer + 2 * p // shards),
        (3, "optimizer", False, p * max(4 * g, 16 / n) * b, per_layer + 2 * p // shards),
        (3, "none", True, per_layer * g * b, per_layer + 18 * p // shards),
        (3, "none", False, 4 * p * g * b, per_layer + 18 * p // shards),
        (2, "optimizer", None, p * max(4 * shards, 16) * b, 2 * p),
        (2, "none", None, 4 * p * g * b, 2 * p + 18 * p // shards),
    ]
    return [DeepSpeedEstimate(number, what, init, int(cpu), gpu) for number, what, init, cpu, gpu in cpu_and_gpu]


# ---- the paper's rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperRow:
    """One line of the paper's tables: a model at a stage on so many devices."""

    parameters: int
    devices: int
    stage: int
    states: States
    traffic: Traffic


def paper_rows(
    parameters: list[int],
    devices: list[int],
    micro_batches: int = 1,
    tp: int = 1,
    widths: Widths = PAPER,
) -> list[PaperRow]:
    """Every combination, in the order of the arguments, stages last.

    Args:
        devices: of the whole mesh; each a multiple of `tp`.

    Raises:
        ValueError: a number of devices that tp does not divide.
    """
    if odd := [n for n in devices if n % tp]:
        raise ValueError(f"{odd[0]} devices are not a multiple of tp = {tp}")
    return [
        PaperRow(
            psi,
            total,
            stage,
            states(psi, stage, total // tp, tp, widths),
            traffic(psi, stage, total // tp, micro_batches, tp, widths),
        )
        for psi in parameters
        for total in devices
        for stage in STAGES
    ]
