"""What one device sends in a step: as jzero writes it, as the compiled program has it, and as the formulas say.

Two conventions are in use, and mixed up everywhere; each number here says which it follows.  `message_bytes` counts
full tensors, as tutorials do.  `wire_bytes` is what one device sends with a ring: (N-1)/N of the message for a gather
or scatter, 2(N-1)/N for an all-reduce.  In wire elements the stages send 2Ψ, 2Ψ, (M+1)Ψ and 3MΨ with M microbatches
(Rajbhandari et al. 2020, section 7), times (N-1)/N; in bytes that depends on the dtype of each collective.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

import jzero
from jzero import hlo, traced
from jzero.hlo import Collective
from jzero.mesh import DATA_AXES, TP, data_size
from jzero.plan import formulas
from jzero.rates import spread

IN_HOST, BETWEEN_HOSTS = "in a host", "between hosts"


@dataclass(frozen=True)
class Sent:
    """All collectives of one kind, over the same axes, in one dtype, in one step.

    Attributes:
        kind, axes, dtype: as of `hlo.Collective`.
        link: "in a host" or "between hosts": the slowest that a group of devices lies across.
        message_bytes: full tensors.
        wire_bytes: what one device sends.
        written_bytes: message bytes that jzero writes; None where the compiler decides, for tensor parallelism.  Of
            gathers and reduce-scatters all is written; to all-reduces the compiler adds a scalar per leaf, for the
            gradient norm.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    link: str
    message_bytes: int
    wire_bytes: int
    written_bytes: int | None


@dataclass(frozen=True)
class Traffic:
    """One device's traffic in a step.

    Attributes:
        sent: by kind, axes and dtype.
        zero_wire_bytes: of those over data-parallel axes.
        tp_wire_bytes: of the others.
        formula_elements: wire elements of the closed form, (N-1)/N left in; per tp slice.
        formula: that form, in words.
    """

    sent: tuple[Sent, ...]
    zero_wire_bytes: int
    tp_wire_bytes: int
    formula_elements: float
    formula: str

    def wire_bytes(self, link: str) -> int:
        """Over one kind of link."""
        return sum(sent.wire_bytes for sent in self.sent if sent.link == link)


def traffic_of(
    run: jzero.Run, ledger: Iterable[Collective], stage: int, devices_per_host: int, times: Mapping[str, int]
) -> Traffic:
    """What a step of `run` sends.

    Args:
        ledger: of the compiled step, all of its programs.
        stage: whose closed form stands beside it.
        devices_per_host: devices fill hosts in the order of the mesh.
        times: how often each program of the step runs.
    """
    messages = hlo.traffic(found := list(ledger))
    written = Counter[Any]()
    for name, program in run.trace().items():
        for key, nbytes in hlo.traffic(traced.collectives(program, run.mesh)).items():
            written[key] += nbytes * times[name]
    wires: dict[Any, int] = {}
    for c in found:
        key = c.kind, c.axes, c.dtype
        wires[key] = wires.get(key, 0) + c.wire_bytes
    sent = tuple(
        Sent(
            kind,
            axes,
            dtype,
            link_of(run.mesh, axes, devices_per_host),
            messages.get((kind, axes, dtype), 0),
            wires.get((kind, axes, dtype), 0),
            written.get((kind, axes, dtype), 0) if set(axes) <= set(DATA_AXES) else None,
        )
        for kind, axes, dtype in sorted(messages.keys() | written.keys())
    )
    zero = sum(s.wire_bytes for s in sent if TP not in s.axes)
    elements, formula = _closed_form(run, stage)
    return Traffic(sent, zero, sum(s.wire_bytes for s in sent) - zero, elements, formula)


def link_of(mesh: Mesh, axes: tuple[str, ...], devices_per_host: int) -> str:
    """The slowest link between the devices of one group over `axes`.

    Args:
        devices_per_host: devices fill hosts in the order of the flattened mesh.
    """
    hosts, _ = spread(mesh, axes, devices_per_host)
    return BETWEEN_HOSTS if hosts > 1 else IN_HOST


def _closed_form(run: jzero.Run, stage: int) -> tuple[float, str]:
    psi = sum(x.size for x in jax.tree.leaves(run.abstract_state.params)) / run.mesh.shape[TP]
    parts = run.micro_batches
    of_one = formulas.traffic(1, stage, data_size(run.mesh), parts)
    several = f" (M = {parts})" if stage >= 2 and parts > 1 else ""
    return of_one.wire_elements * psi, f"{of_one.ring_elements:g}Ψ{several}"
