"""What a training step's forward pass leaves in memory for its backward pass, and how much of it is gathered weights.

Read off the scheduled program, per device, for any function of `jax.grad`::

    found = saved(compiled)
    print(found.activation_bytes, found.gathered_bytes)

Activations saved for backward are the values that an operation of the forward pass computes and one of the backward
pass reads; what the forward loop over layers stacks up is one of them.  Arguments do not count, nor what is only moved
out of them, cast or gathered: parameters, however they are stored.  Nor does what depends on neither (masks, tables of
angles), which XLA may keep or make again.  A value that lives on as a copy counts once.

Gathered parameters are what comes out of the all-gathers of arguments, and copies of it that are laid out or cast
anew.  They are counted where most of them are alive at once, from the start of a gather to the last reader in the
schedule, through the carries of loops.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jzero.dataflow import HANDS_ON, Dataflow, Flow, Origin, Value
from jzero.hlo_text import Instruction, Module


@dataclass(frozen=True)
class Held:
    """A value that is kept.

    Attributes:
        name, op_name: of the instruction that makes it; of a loop that stacks it up, the loop's name.
        shape: as HLO prints it, "bf16[31,1,4096,4096]".
        bytes: on one device.
    """

    name: str
    op_name: str
    shape: str
    bytes: int


@dataclass(frozen=True)
class Saved:
    """What is kept between the passes, on one device.

    Attributes:
        activations: saved for backward, largest first.
        gathered_bytes: of gathered parameters, where most are alive at once.
        gathered: those that are alive then, largest first.
    """

    activations: tuple[Held, ...]
    gathered: tuple[Held, ...]

    @property
    def activation_bytes(self) -> int:
        """Of all activations saved for backward, of one microbatch."""
        return sum(held.bytes for held in self.activations)

    @property
    def gathered_bytes(self) -> int:
        """Of all gathered parameters that are alive at once."""
        return sum(held.bytes for held in self.gathered)


def saved(program: "jax.stages.Compiled | str") -> Saved:
    """What the forward pass of a program keeps for its backward pass; nothing where nothing is differentiated.

    Raises:
        HloError: the program cannot be read.
    """
    module = Module(program if isinstance(program, str) else program.as_text() or "")
    dataflow = Dataflow(module)
    entry = dataflow.entry()
    kept = {id(value): value for flow in _runs(dataflow, entry) for value in _read_on_the_way_back(dataflow, flow)}
    return Saved(_held(list(kept.values())), _held(_most_gathered(dataflow, entry)))


def _held(values: list[Value]) -> tuple[Held, ...]:
    held = [Held(value.name, value.op_name, value.shape, value.bytes) for value in values]
    return tuple(sorted(held, key=lambda h: (-h.bytes, h.name)))


def _runs(dataflow: Dataflow, flow: Flow) -> Iterator[Flow]:
    """A computation, and those of the loops in it."""
    yield flow
    for i in dataflow.module.computations[flow.name]:
        if i.opcode == "while":
            yield from _runs(dataflow, dataflow.body(flow, i))


def _read_on_the_way_back(dataflow: Dataflow, flow: Flow) -> Iterator[Value]:
    """Values of the forward pass that the backward pass reads."""
    for i in dataflow.module.computations[flow.name]:
        if _reads(i) and dataflow.phases.of(i, flow.whiles) == "backward":
            yield from (v for v in flow.reads[i.name] if v.phase == "forward" and v.origin == Origin.COMPUTED)


def _most_gathered(dataflow: Dataflow, flow: Flow) -> list[Value]:
    """The gathered values that are alive where most bytes of them are."""
    body = dataflow.module.computations[flow.name]
    last = {id(value): place for place, i in enumerate(body) if _reads(i) for value in flow.reads[i.name]}
    last |= {id(value): len(body) for value in flow.results}
    alive = {id(value): value for value in flow.given if value.origin == Origin.GATHERED}
    most: list[Value] = list(alive.values())
    for place, i in enumerate(body):
        alive |= {id(value): value for value in flow.values[i.name] if value.origin == Origin.GATHERED}
        now = list(alive.values())
        if i.opcode == "while":
            passed = {id(value) for value in (*flow.reads[i.name], *flow.values[i.name])}
            inside = _most_gathered(dataflow, dataflow.body(flow, i))
            now = [value for value in now if id(value) not in passed] + inside
        most = max(most, now, key=lambda values: sum(value.bytes for value in values))
        alive = {key: value for key, value in alive.items() if last.get(key, -1) > place}
    return most


def _reads(i: Instruction) -> bool:
    return i.opcode not in HANDS_ON
