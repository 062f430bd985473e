"""What one device holds, by class: at rest from the specs, exactly; during a step from the compiler.

The paper counts 16 bytes per parameter (Rajbhandari et al. 2020, section 3.1): parameters 2, gradients 2, float32
master, m and v 4 each, and divides by N what a stage shards.  A run differs from that where its dtypes do, where leaves
stay whole, and where an optimizer keeps something else; each part says by how much and why.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

import jzero
from jzero import hlo
from jzero.mesh import DATA_AXES, TP, data_size
from jzero.plan import formulas

# Class of an optimizer's array by the name under which optax, or jzero, keeps it.
_OPTIMIZER = {"master": "master", "mu": "m", "nu": "v"}
#: Class -> bytes per parameter in the paper, in the order in which they are shown.
PAPER: Mapping[str, int] = {"parameters": 2, "gradients": 2, "master": 4, "m": 4, "v": 4}


@dataclass(frozen=True)
class Part:
    """One class of what a device holds.

    Attributes:
        name: "parameters", "frozen", "gradients", "master", "m", "v", "other optimizer state", "model state".
        nbytes: of one device.
        formula_bytes: the paper's count for it, with the parameters divided by tp; 0 for what the paper does not count.
        why: where the difference comes from; "" where there is none.
    """

    name: str
    nbytes: int
    formula_bytes: float
    why: str


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
        parts: the model states by class; the gradients, which live during a step, among them.
        tiers: bytes at rest by tier, "device" and "host".
        host_bytes_per_machine: what the tier "host" of all devices of a machine takes of its memory.
        batch_bytes, counter_bytes: what else is given to the step.
        argument_bytes, temp_bytes, peak_bytes: as the compiler says; gradients are among the temporaries.
        activations_bytes: what the forward pass leaves for the backward pass, read off the compiled program.
        gathered_bytes: the most of gathered parameters at a time, read off the compiled program.
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

    @property
    def at_rest_bytes(self) -> int:
        """Of the train state, counters included; with the batch, the program's arguments."""
        return sum(part.nbytes for part in self.parts if part.name != "gradients") + self.counter_bytes

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
        """Bytes of one class; 0 where there is none."""
        return sum(part.nbytes for part in self.parts if part.name == name)


def memory_of(
    run: jzero.Run,
    program: jax.stages.Compiled,
    devices_per_host: int,
    activations_bytes: int = 0,
    gathered_bytes: int = 0,
) -> Memory:
    """Specs and compiler on what a device holds for a step of `run`.

    Args:
        program: the run's step, compiled.
        devices_per_host: of the machines it is for.
        activations_bytes, gathered_bytes: as read off the program.
    """
    found = hlo.memory(program)
    tiers = _tiers(run)
    return Memory(
        parts=tuple(_parts(run)),
        tiers=tiers,
        host_bytes_per_machine=tiers.get("host", 0) * min(devices_per_host, run.mesh.size),
        batch_bytes=sum(map(_shard_bytes, jax.tree.leaves(run.abstract_batch))),
        counter_bytes=sum(_shard_bytes(x) for x in _counters(run.abstract_state)),
        argument_bytes=found.argument_bytes,
        temp_bytes=found.temp_bytes,
        peak_bytes=found.peak_bytes,
        activations_bytes=activations_bytes,
        gathered_bytes=gathered_bytes,
    )


def stage_of(run: jzero.Run) -> int:
    """The stage that a run's specs are those of: which of the three are shards.  0 where no leaf can be sharded."""
    kinds = ((3, run.specs.params), (2, run.specs.grads), (1, run.specs.opt_state))
    return next((stage for stage, specs in kinds if _is_sharded(specs)), 0)


def _is_sharded(specs: Any) -> bool:
    named = {axis for spec in jax.tree.leaves(specs) for axis in jax.tree.leaves(tuple(spec))}
    return bool(named & set(DATA_AXES))


def _parts(run: jzero.Run) -> list[Part]:
    state, elements, nbytes = run.abstract_state, dict[str, int](), dict[str, int]()
    for name, x in [
        *(("parameters", x) for x in jax.tree.leaves(state.params)),
        *(("frozen", x) for x in jax.tree.leaves(state.frozen)),
        *((_class_of(path), x) for path, x in jax.tree.leaves_with_path(state.opt_state)),
        *(("model state", x) for x in jax.tree.leaves(state.model_state)),
    ]:
        held = x.sharding.shard_shape(x.shape)
        elements[name] = elements.get(name, 0) + math.prod(held)
        nbytes[name] = nbytes.get(name, 0) + _shard_bytes(x)
    nbytes["gradients"] = run.grads_bytes()
    elements["gradients"] = run.grads_bytes() // run.grads_dtype.itemsize
    trained, stage = sum(x.size for x in jax.tree.leaves(state.params)), stage_of(run)
    names = [*PAPER, *(name for name in nbytes if name not in PAPER)]
    closed = _closed_form(trained, stage, run)
    return [_part(name, nbytes.get(name, 0), elements.get(name, 0), closed.get(name)) for name in names]


def _closed_form(trained: int, stage: int, run: jzero.Run) -> dict[str, float]:
    """Class -> bytes of one device."""
    states = formulas.states(trained, stage, data_size(run.mesh), run.mesh.shape[TP])
    one_moment = states.moments / 2
    return dict(zip(PAPER, (states.params, states.grads, states.master, one_moment, one_moment), strict=True))


def _part(name: str, nbytes: int, elements: int, formula: float | None) -> Part:
    """A part beside the paper's count, with the difference taken apart: in bytes per element, and in elements."""
    if formula is None:
        return Part(name, nbytes, 0.0, "not in the paper's count" if nbytes else "")
    ideal = formula / PAPER[name]
    reasons: list[str] = []
    if not elements:
        return Part(name, nbytes, formula, "the run keeps none")
    width = nbytes / elements
    if width != PAPER[name]:
        reasons.append(f"{width:g} bytes a number instead of {PAPER[name]}")
    if not math.isclose(elements, ideal, rel_tol=1e-9):
        reasons.append(f"{elements - ideal:+,.0f} numbers, of leaves that stay whole")
    return Part(name, nbytes, formula, "; ".join(reasons))


def _class_of(path: tuple[Any, ...]) -> str:
    names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
    return next((_OPTIMIZER[name] for name in names if name in _OPTIMIZER), "other optimizer state")


def _tiers(run: jzero.Run) -> dict[str, int]:
    tiers = {"device": 0, "host": 0}
    for x in jax.tree.leaves(run.abstract_state):
        tiers["host" if x.sharding.memory_kind == "pinned_host" else "device"] += _shard_bytes(x)
    return tiers


def _counters(state: jzero.TrainState) -> tuple[Any, ...]:
    return state.step, state.skipped, state.skipped_in_row


def _shard_bytes(x: Any) -> int:
    sharding: NamedSharding = x.sharding
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
