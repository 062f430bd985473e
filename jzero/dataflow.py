"""Where the arrays of a scheduled program come from: each instruction's results as values with an origin.

Tuples, views and copies make no values of their own: they hand on those of their operands, so a value is followed from
what computes it to all that reads it, through the carries of loops.
"""

import enum
import re
from dataclasses import dataclass, replace

from jzero.hlo_shapes import arrays, tuple_parts
from jzero.hlo_text import Instruction, Module
from jzero.phases import Phase, Phases


class Origin(enum.IntEnum):
    """What a value is made of; of several operands the highest."""

    CONSTANT = 0
    ARGUMENT = 1  # moved about, cast or sliced, but not computed with
    GATHERED = 2  # an argument, all-gathered
    COMPUTED = 3


@dataclass(frozen=True, eq=False)
class Value:
    """One array.

    Attributes:
        name, op_name: of the instruction that makes it, "" of what a computation is given.
        shape: as HLO prints it.
        bytes: that it takes.
        phase: in which it is made; None of what is given or constant.
    """

    name: str
    op_name: str
    shape: str
    bytes: int
    origin: Origin
    phase: Phase | None


# Hand on the values of their operands.
HANDS_ON = frozenset({"bitcast", "copy", "tuple", "get-tuple-element", "opt-barrier", "domain", "add-dependency"})
# Of these the first operand is the data; of `_MOVES_ALL` the first two are.
_MOVES_FIRST = frozenset(
    {
        "convert",
        "reshape",
        "transpose",
        "slice",
        "dynamic-slice",
        "reverse",
        "broadcast",
        "reduce-precision",
        "copy-start",
    }
)
_MOVES_ALL = frozenset({"concatenate", "dynamic-update-slice"})
_MADE_OF_NOTHING = frozenset({"constant", "iota", "partition-id", "replica-id", "after-all"})


@dataclass(frozen=True)
class Flow:
    """The values of one run of a computation.

    Attributes:
        name: of the computation.
        whiles: the loops round it, outermost first.
        values: of each instruction its results, tuples flattened.
        reads: of each instruction the values of its operands.
        given, results: what the computation is given, and returns.
    """

    name: str
    whiles: tuple[Instruction, ...]
    values: dict[str, list[Value]]
    reads: dict[str, list[Value]]
    given: list[Value]
    results: list[Value]


class Dataflow:
    """The values of a module, computation by computation."""

    def __init__(self, module: Module) -> None:
        self.module, self.phases = module, Phases(module)
        self._origins_of: dict[tuple[str, tuple[Origin, ...]], list[Origin]] = {}

    def entry(self) -> Flow:
        """The program's."""
        return self._flow(self.module.entry, None, ())

    def body(self, flow: Flow, loop: Instruction) -> Flow:
        """Those of any turn of a loop that stands in `flow`."""
        return self._turn([value.origin for value in flow.reads[loop.name]], (*flow.whiles, loop))

    def _turn(self, before: list[Origin], whiles: tuple[Instruction, ...]) -> Flow:
        """Of any turn: with the origins that there are before the first, and those that the turns make of them."""
        while True:
            body = self._flow(whiles[-1].called("body"), before, whiles)
            after = [max(first, value.origin) for first, value in zip(before, body.results, strict=True)]
            if after == before:
                return body
            before = after

    def _flow(self, name: str, given: list[Origin] | None, whiles: tuple[Instruction, ...]) -> Flow:
        body = self.module.computations[name]
        flow = Flow(name, whiles, {}, {}, [], [])
        parameters = sorted((i for i in body if i.opcode == "parameter"), key=_number)
        for i in parameters:
            flow.reads[i.name] = []
            flow.values[i.name] = [
                Value(i.name, "", x.printed, x.bytes, Origin.ARGUMENT, None) for x in arrays(i.shape)
            ]
            flow.given.extend(flow.values[i.name])
        if given is not None:
            settled = [replace(v, origin=origin) for v, origin in zip(flow.given, given, strict=True)]
            flow.given[:] = settled
            for i in parameters:
                count = len(flow.values[i.name])
                flow.values[i.name], settled = settled[:count], settled[count:]
        for i in body:
            if i.opcode != "parameter":
                flow.reads[i.name] = [value for operand in i.operands for value in flow.values[operand]]
                flow.values[i.name] = self._made(flow, i)
        flow.results.extend(flow.values[next(i.name for i in body if i.is_root)])
        return flow

    def _made(self, flow: Flow, i: Instruction) -> list[Value]:
        """The values of an instruction's results."""
        read = flow.reads[i.name]
        if i.opcode == "get-tuple-element":
            first, last = self._element(flow, i)
            return read[first:last]
        if i.opcode in HANDS_ON or i.opcode.endswith(("-done", "-update")):
            return read
        phase = self._phase(flow, i)
        if i.opcode == "while":
            body = self._turn([value.origin for value in read], (*flow.whiles, i))
            return [  # What no turn changes is the same value after it.
                before if after is first else replace(after, name=i.name, phase=phase)
                for before, first, after in zip(read, body.given, body.results, strict=True)
            ]
        results = arrays(_result(i))
        origins = self._origins(i, [value.origin for value in read], len(results))
        return [
            Value(i.name, i.op_name, x.printed, x.bytes, origin, phase)
            for x, origin in zip(results, origins, strict=True)
        ]

    def _phase(self, flow: Flow, i: Instruction) -> Phase:
        """By its name; where that does not say it, by what it reads."""
        named = self.phases.of(i, flow.whiles)
        read = {value.phase for value in flow.reads[i.name]}
        if named != "update" or "backward" in read:
            return "backward" if named == "update" else named
        return "forward" if "forward" in read else named

    def _origins(self, i: Instruction, read: list[Origin], count: int) -> list[Origin]:
        """Of each result."""
        if i.opcode in _MADE_OF_NOTHING or (read and max(read) == Origin.CONSTANT):
            return [Origin.CONSTANT] * count
        if i.opcode in _MOVES_FIRST:
            return [read[0]] * count
        if i.opcode in _MOVES_ALL:
            return [max(read if i.opcode == "concatenate" else read[:2])] * count
        if i.kind == "all-gather":
            return [Origin.GATHERED if origin == Origin.ARGUMENT else origin for origin in read]
        if i.opcode in ("fusion", "fusion-start", "call", "async-start"):
            return self._inside(i.callees[0], tuple(read))
        return [Origin.COMPUTED] * count

    def _inside(self, callee: str, read: tuple[Origin, ...]) -> list[Origin]:
        if (callee, read) not in self._origins_of:
            results = self._flow(callee, list(read), ()).results
            self._origins_of[callee, read] = [value.origin for value in results]
        return self._origins_of[callee, read]

    def _element(self, flow: Flow, i: Instruction) -> tuple[int, int]:
        """Where the element that an instruction gets lies among the flattened values of its operand."""
        operand = self.module.named(flow.name, i.operands[0])
        sizes = [len(arrays(part)) for part in tuple_parts(operand.shape)]
        found = re.search(r"\bindex=(\d+)", i.attributes)
        index = int(found[1]) if found else 0
        return sum(sizes[:index]), sum(sizes[: index + 1])


def _result(i: Instruction) -> str:
    """The shape of what an instruction makes; of the start of a pair, of what its done will give."""
    if not i.opcode.endswith("-start") or (i.opcode == "all-reduce-start" and not i.shape.startswith("((")):
        return i.shape
    return tuple_parts(i.shape)[0 if i.opcode == "copy-start" else 1]


def _number(parameter: Instruction) -> int:
    return int(parameter.attributes.split(")")[0])
