"""What a compiled program moves between a device and its host's memory, for which XLA has memory space 5.

Only a GPU's program tells: to XLA:CPU both are one memory, and its programs move nothing here.
"""

from dataclasses import dataclass

import jax

from jzero.hlo_cost import CONTROL, Costs
from jzero.hlo_shapes import Array, arrays, in_host_memory
from jzero.hlo_text import Instruction, Module

_MOVES = frozenset(["copy", "fusion", "dynamic-slice", "dynamic-update-slice"])


@dataclass(frozen=True)
class Moved:
    """Bytes of one run of a program on one device.

    Attributes:
        up_bytes, down_bytes: from host memory to the device, and back.
    """

    up_bytes: int = 0
    down_bytes: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        """Both."""
        return Moved(self.up_bytes + other.up_bytes, self.down_bytes + other.down_bytes)

    def times(self, count: int) -> "Moved":
        """`count` times the same."""
        return Moved(self.up_bytes * count, self.down_bytes * count)


def moved(program: "jax.stages.Compiled | str") -> Moved:
    """All that one run of `program` moves; what loops move counts their trips.

    Arguments that are copied as they come do not count: absent devices name no memory that they could lie in.

    Raises:
        HloError: a loop whose trip count XLA does not know.
    """
    module = Module(program if isinstance(program, str) else program.as_text() or "")
    return _of_computation(Costs(module), module.entry)


def _of_computation(costs: Costs, name: str) -> Moved:
    total = Moved()
    for i in costs.module.computations[name]:
        total += _of(costs.module, name, i)
        for callee, turns in costs.calls(i):
            total += _of_computation(costs, callee).times(turns)
    return total


def _of(module: Module, computation: str, i: Instruction) -> Moved:
    if i.opcode in CONTROL or i.opcode.removesuffix("-start") not in _MOVES:
        return Moved()
    given = [module.named(computation, name) for name in i.operands]
    result, sources = _result(i), [arrays(x.shape)[0] for x in given if not x.shape.startswith("(")]
    if in_host_memory(result):
        if i.opcode.startswith("copy") and given[0].opcode == "parameter" and computation == module.entry:
            return Moved()
        # An update in place has the whole as its first operand; what it brings is the other one.
        brought = [x for x in sources if not in_host_memory(x) and x.dims]
        return Moved(0, max((x.bytes for x in brought), default=0))
    return Moved(result.bytes, 0) if any(map(in_host_memory, sources)) else Moved()


def _result(i: Instruction) -> Array:
    """Where a pair starts, its shape is a tuple: of a copy (result, operand, ..), else ((operands), result, ..)."""
    found = arrays(i.shape)
    if not i.opcode.endswith("-start"):
        return found[0]
    return found[0] if i.opcode.startswith("copy") else found[-2]
