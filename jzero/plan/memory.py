"""What one device holds, by class: at rest from the specs, exactly; during a step from the compiler.

The paper counts 16 bytes per parameter (Rajbhandari et al. 2020, section 3.1): parameters 2, gradients 2, float32
master, m and v 4 each, and divides by N what a stage shards.  A run differs from that where its dtypes do, where leaves
stay whole, and where an optimizer keeps something else; each part says by how much and why.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

import jzero
from jzero import hlo
from jzero.mesh import DATA_AXES, TP, data_size
from jzero.plan import formulas
from jzero.plan.moments import moments
from jzero.plan.programs import Programs
from jzero.plan.tiers import class_of, counters, elsewhere_of, tiers_of
from jzero.zero import shard_bytes

#: Class -> bytes per parameter in the paper, in the order in which they are shown.
PAPER: Mapping[str, int] = {"parameters": 2, "gradients": 2, "master": 4, "m": 4, "v": 4}


@dataclass(frozen=True)
class Part:
    """One class of what a device holds.

    Attributes:
        name: "parameters", "frozen", "gradients", "master", "m", "v", "average of the weights", "other optimizer
            state", "model state".
        nbytes: of one device's part, wherever it rests.
        formula_bytes: the paper's count for it, with the parameters divided by tp; 0 for what the paper does not count.
        why: where the difference comes from; "" where there is none.
        elsewhere: of these, bytes that rest outside of the device, by tier, "host" and "nvme".
    """

    name: str
    nbytes: int
    formula_bytes: float
    why: str
    elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """Those on the device."""
        return self.nbytes - sum(self.elsewhere.values())


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
        parts: the model states by class; the gradients, which live during a step, among them.
        tiers: bytes at rest by tier, "device", "host" and "nvme"; gradients on the host keep their place there.
        host_bytes_per_machine: what the tier "host" of all devices of a machine takes of its memory.
        batch_bytes, counter_bytes: what else is given to the step.
        argument_bytes, temp_bytes, peak_bytes: as the compiler says; gradients are among the temporaries.  Of a step of
            several programs: what lies on the device when the program with the peak begins, and what that adds.
        activations_bytes: what the forward pass leaves for the backward pass, read off the compiled program.
        gathered_bytes: the most of gathered parameters at a time, read off the compiled program.
        nvme_bytes_per_machine: what the tier "nvme" of all devices of a machine takes of its disks.
        peak_program: which program of the step has the peak.
        in_flight_bytes: the most of optimizer state that is on the device for its update alone.
        pinned_bytes: of what is in host memory, those that the device copies from and to by itself.
        devices_per_machine: those of the run that share a machine's memory.
    """

    parts: tuple[Part, ...]
    tiers: dict[str, int]
    host_bytes_per_machine: int
    batch_bytes: int
    counter_bytes: int
    argument_bytes: int
    temp_bytes: int
    peak_bytes: int
    activations_bytes: int = 0
    gathered_bytes: int = 0
    nvme_bytes_per_machine: int = 0
    peak_program: str = "step"
    in_flight_bytes: int = 0
    pinned_bytes: int = 0
    devices_per_machine: int = 1

    @property
    def at_rest_bytes(self) -> int:
        """Of the train state on the device, counters included; with the batch, the arguments of a step's program."""
        return sum(part.device_bytes for part in self.parts if part.name != "gradients") + self.counter_bytes

    @property
    def states_bytes(self) -> int:
        """What the paper calls model states: parameters, gradients and optimizer state."""
        return sum(part.nbytes for part in self.parts)

    @property
    def formula_bytes(self) -> float:
        """The same by the paper's formula."""
        return sum(part.formula_bytes for part in self.parts)

    @property
    def other_bytes(self) -> int:
        """Temporaries that are neither gradients nor activations nor gathered parameters.

        The three are largest at different moments, so together they may be more than the compiler needs.
        """
        named = self.bytes_of("gradients") + self.activations_bytes + self.gathered_bytes
        return max(0, self.temp_bytes - named)

    def bytes_of(self, name: str) -> int:
        """Bytes of one class on the device; 0 where there is none."""
        return sum(part.device_bytes for part in self.parts if part.name == name)


def memory_of(
    run: jzero.Run,
    programs: Programs,
    devices_per_host: int,
    activations_bytes: int = 0,
    gathered_bytes: int = 0,
) -> Memory:
    """Specs and compiler on what a device holds for a step of `run`.

    Args:
        programs: of the run's step, compiled.
        devices_per_host: of the machines it is for.
        activations_bytes, gathered_bytes: as read off the program.
    """
    tiers, here = tiers_of(run), min(devices_per_host, run.mesh.size)
    return Memory(
        parts=tuple(_parts(run)),
        tiers=tiers,
        host_bytes_per_machine=tiers["host"] * here,
        batch_bytes=sum(map(shard_bytes, jax.tree.leaves(run.abstract_batch))),
        counter_bytes=sum(shard_bytes(x) for x in counters(run.abstract_state)),
        **_peak(run, programs),
        activations_bytes=activations_bytes,
        gathered_bytes=gathered_bytes,
        nvme_bytes_per_machine=tiers.get("nvme", 0) * here,
        pinned_bytes=run.pinned_bytes(),
        devices_per_machine=here,
    )


def _peak(run: jzero.Run, programs: Programs) -> dict[str, Any]:
    """The fields of `Memory` that say when most is held."""
    if run.stream is None:
        found = hlo.memory(programs.passes)
        return {name: getattr(found, name) for name in ("argument_bytes", "temp_bytes", "peak_bytes")}
    all_moments = list(moments(run, run.stream, programs))
    most = max(all_moments, key=lambda moment: moment.peak_bytes)
    return {
        "argument_bytes": most.lying_bytes,
        "temp_bytes": most.more_bytes,
        "peak_bytes": most.peak_bytes,
        "peak_program": most.program,
        "in_flight_bytes": max(moment.in_flight_bytes for moment in all_moments),
    }


def stage_of(run: jzero.Run) -> int:
    """The stage that a run's specs are those of: which of the three are shards.  0 where no leaf can be sharded."""
    kinds = ((3, run.specs.params), (2, run.specs.grads), (1, run.specs.opt_state))
    return next((stage for stage, specs in kinds if _is_sharded(specs)), 0)


def _is_sharded(specs: Any) -> bool:
    named = {axis for spec in jax.tree.leaves(specs) for axis in jax.tree.leaves(tuple(spec))}
    return bool(named & set(DATA_AXES))


class _Leaf(NamedTuple):
    """One array of a class: its numbers, those that a device holds, over how many it is sharded, bytes of a number."""

    size: int
    held: int
    data_shards: int
    tp_shards: int
    itemsize: int


def _leaf(x: Any, spec: Any, dtype: Any, mesh: Mesh) -> _Leaf:
    axes = jax.tree.leaves(tuple(spec))
    data, tp = (math.prod(mesh.shape[axis] for axis in axes if axis in among) for among in (DATA_AXES, (TP,)))
    held = NamedSharding(mesh, spec).shard_shape(x.shape)
    return _Leaf(math.prod(x.shape), math.prod(held), data, tp, dtype.itemsize)


def _parts(run: jzero.Run) -> list[Part]:
    state, specs, mesh = run.abstract_state, run.specs.state, run.mesh
    found: dict[str, list[_Leaf]] = {}

    def add(name: str, x: Any, spec: Any, dtype: Any = None) -> None:
        found.setdefault(name, []).append(_leaf(x, spec, dtype or x.dtype, mesh))

    for name, shapes, of in (
        ("parameters", state.params, specs.params),
        ("frozen", state.frozen, specs.frozen),
        ("model state", state.model_state, specs.model_state),
    ):
        jax.tree.map(functools.partial(add, name), shapes, of)
    jax.tree.map(functools.partial(add, "gradients", dtype=run.grads_dtype), state.params, run.specs.grads)
    jax.tree.map_with_path(lambda path, x, spec: add(class_of(path), x, spec), state.opt_state, specs.opt_state)
    trained, stage = sum(x.size for x in jax.tree.leaves(state.params)), stage_of(run)
    closed = _closed_form(trained, stage, run)
    names = [*PAPER, *(name for name in found if name not in PAPER)]
    elsewhere = elsewhere_of(run)
    parts = [_part(name, found.get(name, []), closed.get(name), trained, run) for name in names]
    return [_placed(part, elsewhere.get(part.name, {}), run) for part in parts]


def _placed(part: Part, elsewhere: dict[str, int], run: jzero.Run) -> Part:
    """A part with where it rests; gradients on the host may be there twice."""
    if part.name != "gradients" or not elsewhere:
        return replace(part, elsewhere=elsewhere)
    nbytes = run.grads_bytes() + sum(elsewhere.values())
    twice = "twice on the host, of a microbatch and their sum" if nbytes > part.nbytes else ""
    why = "; ".join(words for words in (part.why, twice) if words)
    return replace(part, nbytes=nbytes, why=why, elsewhere=elsewhere)


def _closed_form(trained: int, stage: int, run: jzero.Run) -> dict[str, float]:
    """Class -> bytes of one device."""
    states = formulas.states(trained, stage, data_size(run.mesh), run.mesh.shape[TP])
    one_moment = states.moments / 2
    return dict(zip(PAPER, (states.params, states.grads, states.master, one_moment, one_moment), strict=True))


def _part(name: str, leaves: Sequence[_Leaf], formula: float | None, trained: int, run: jzero.Run) -> Part:
    """A part beside the paper's count, and where they differ."""
    nbytes = sum(leaf.held * leaf.itemsize for leaf in leaves)
    if formula is None:
        return Part(name, nbytes, 0.0, "not in the paper's count" if nbytes else "")
    if not leaves:
        return Part(name, 0, formula, "the run keeps none")
    shards = round(trained * PAPER[name] / formula / run.mesh.shape[TP]) if formula else 1
    return Part(name, nbytes, formula, "; ".join(_reasons(leaves, PAPER[name], trained, shards, run.mesh.shape[TP])))


def _reasons(leaves: Sequence[_Leaf], width: int, trained: int, shards: int, tp: int) -> Iterator[str]:
    """Why a class is not `width` bytes for every trained number, over `shards` x `tp` devices."""
    widths = sorted({leaf.itemsize for leaf in leaves})
    if widths != [width]:
        yield f"{' or '.join(map(str, widths))} bytes a number instead of {width}"
    if missing := trained - sum(leaf.size for leaf in leaves):
        yield f"of {abs(missing):,} numbers {'the run keeps none' if missing > 0 else 'more than one'}"
    fewer = [leaf for leaf in leaves if 1 < leaf.data_shards < shards]
    if fewer:
        yield f"sharded over {min(leaf.data_shards for leaf in fewer)} of {shards} devices"
    for words, some in (
        ("stay whole", [leaf for leaf in leaves if leaf.data_shards == 1 < shards]),
        ("are not split by tp", [leaf for leaf in leaves if leaf.tp_shards < tp and leaf.data_shards == shards]),
    ):
        extra = sum(leaf.held - leaf.size / (shards * tp) for leaf in some)
        if extra:
            yield f"{extra:+,.0f} numbers, of {len(some)} leaves that {words}"
