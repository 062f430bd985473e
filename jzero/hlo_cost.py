"""What each instruction of a compiled program costs: floating point operations, and bytes of memory.

XLA gives no account of that for programs of GPUs (`cost_analysis()` is None there), and where it does, loops count
once.  Here it is read off the scheduled program, on any backend, and loops count their trips::

    total = cost(jax.jit(f).lower(x).compile())
    print(total.flops, total.read_bytes + total.written_bytes)

FLOPs are those of matrix products, convolutions and attention (`hlo_flops.py`).  What works element by element is bound
by memory and counts bytes alone.  Inside other custom calls (Pallas, Triton) nothing is seen: they count their operands
and results.

Bytes are those that a kernel reads and writes if each operand and result passes once: a fusion's inside costs nothing,
of an operand that is only sliced the slices count, and an update in place costs what it updates.  Collectives count
nothing here, they are `hlo.collectives`, and no more do copies to and from host memory, they are `hlo_host.moved`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jzero.hlo_flops import rule
from jzero.hlo_shapes import Array, arrays, in_host_memory, shape_bytes
from jzero.hlo_text import Instruction, Module

#: Run computations of their own; what is in them costs, not they.
CONTROL = ("while", "conditional", "call", "async-start")

# Names for what is there already, or done by others.
_FREE = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
        "partition-id", "replica-id", "domain", "get-dimension-size",
    }
)  # fmt: skip
# A view of an operand: what is read of its result is read of the operand.
_VIEWS = frozenset(["bitcast", "convert", "copy", "reshape", "transpose"])
_SLICES = frozenset(["slice", "dynamic-slice", "gather"])


@dataclass(frozen=True)
class Cost:
    """Of one instruction or of many, on one device.

    Attributes:
        flops: of matrix products, all of them.
        wide_flops: those of `flops` whose operands have 32 bits or more.
        read_bytes, written_bytes: of device memory.
        kernels: instructions that run something.
    """

    flops: int = 0
    wide_flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    kernels: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Both after each other."""
        return Cost(
            self.flops + other.flops,
            self.wide_flops + other.wide_flops,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
            self.kernels + other.kernels,
        )

    def times(self, count: int) -> "Cost":
        """`count` times the same."""
        return Cost(
            self.flops * count,
            self.wide_flops * count,
            self.read_bytes * count,
            self.written_bytes * count,
            self.kernels * count,
        )


def cost(program: "jax.stages.Compiled | str") -> Cost:
    """All that one run of a program costs on one device.

    Every branch of a conditional counts, so with conditionals it is an upper bound.

    Raises:
        HloError: a loop whose trip count XLA does not know, or an instruction that cannot be read.
    """
    module = Module(program if isinstance(program, str) else program.as_text() or "")
    return Costs(module).of_computation(module.entry)


class Costs:
    """The costs of one module's instructions."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._totals: dict[str, Cost] = {}

    def of_computation(self, name: str) -> Cost:
        """Of one run of a computation, with all that it calls.

        Raises:
            HloError: as `cost`.
        """
        if name not in self._totals:
            total = Cost()
            for i in self.module.computations[name]:
                total += self.of(name, i)
                for callee, turns in self.calls(i):
                    total += self.of_computation(callee).times(turns)
            self._totals[name] = total
        return self._totals[name]

    def calls(self, i: Instruction) -> Iterator[tuple[str, int]]:
        """The computations that an instruction runs as programs of their own, and how often.

        Raises:
            HloError: a loop whose trip count XLA does not know.
        """
        if i.opcode == "while":
            condition = i.called("condition")
            yield condition, i.trip_count + 1
            yield i.called("body"), i.trip_count
        elif i.opcode in CONTROL:
            yield from ((callee, 1) for callee in i.callees)

    def of(self, computation: str, i: Instruction) -> Cost:
        """Of one instruction where it stands; nothing for what only runs other computations.

        Raises:
            HloError: it cannot be read.
        """
        if i.opcode in _FREE or i.opcode in CONTROL or i.kind or i.opcode.endswith(("-done", "-update")):
            return Cost()
        if self._is_to_or_from_host(computation, i):
            return Cost()
        flops, wide = self._flops(computation, i)
        return Cost(flops, wide, self._read(computation, i), self._written(computation, i), 1)

    def _is_to_or_from_host(self, computation: str, i: Instruction) -> bool:
        """Whether an instruction copies between the device and its host's memory: the link's work (`hlo_host.py`)."""
        shapes = [i.shape, *(self.module.named(computation, name).shape for name in i.operands)]
        return any(in_host_memory(array) for shape in shapes if "S(" in shape for array in arrays(shape))

    # ---- floating point operations -----------------------------------------------------------------------------------

    def _flops(self, computation: str, i: Instruction) -> tuple[int, int]:
        """(all, those with wide operands)."""
        if i.opcode == "fusion":
            inside = [(callee, inner) for callee in i.callees for inner in self.module.computations[callee]]
            flops = [self._flops(callee, inner) for callee, inner in inside]
            return sum(f for f, _ in flops), sum(wide for _, wide in flops)
        count = rule(i)
        if count is None:
            return 0, 0
        operands = [self._array(computation, name) for name in i.operands]
        flops = count(i, operands, arrays(i.shape)[0])
        return flops, flops if re.fullmatch(r"[fs](32|64)", operands[0].dtype) else 0

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def _read(self, computation: str, i: Instruction) -> int:
        if i.opcode == "fusion":
            return self._read_by_fusion(computation, i)
        sizes = [shape_bytes(self.module.named(computation, name).shape) for name in i.operands]
        if i.opcode in _SLICES:
            return shape_bytes(i.shape) + sum(sizes[1:])
        if i.opcode in ("dynamic-update-slice", "scatter"):
            return sum(sizes[1:])
        return sum(sizes)

    def _read_by_fusion(self, computation: str, i: Instruction) -> int:
        (callee,) = i.callees
        parameters = {
            int(inner.attributes.split(")")[0]): inner
            for inner in self.module.computations[callee]
            if inner.opcode == "parameter"
        }
        read = 0
        for number, name in enumerate(i.operands):
            whole = shape_bytes(self.module.named(computation, name).shape)
            found = arrays(parameters[number].shape)
            if len(found) == 1 and found[0].elements:
                read += (
                    whole * min(self._elements_read(callee, parameters[number]), found[0].elements) // found[0].elements
                )
            else:
                read += whole
        return read

    def _elements_read(self, computation: str, of: Instruction) -> int:
        """How many elements of a value inside a fusion are read: all, or those that are sliced out of it."""
        whole, read = arrays(of.shape)[0].elements, 0
        for user in self._users(computation).get(of.name, []):
            if user.opcode in _VIEWS and not user.is_root:
                read += self._elements_read(computation, user)
            elif user.opcode in _SLICES and user.operands[0] == of.name:
                read += arrays(user.shape)[0].elements
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == of.name:
                read += 0 if self._is_result(computation, user) else whole
            else:
                return whole
        return read

    def _written(self, computation: str, i: Instruction) -> int:
        if i.opcode == "fusion":
            (callee,) = i.callees
            return self._written_by(callee, next(x for x in self.module.computations[callee] if x.is_root))
        if i.opcode in ("dynamic-update-slice", "scatter"):
            return self._written_by(computation, i)
        return shape_bytes(i.shape) - _workspace_bytes(i)

    def _written_by(self, computation: str, i: Instruction) -> int:
        """Bytes that a result of a fusion takes to write."""
        if i.opcode == "tuple":
            return sum(self._written_by(computation, self.module.named(computation, name)) for name in i.operands)
        if i.opcode == "bitcast" and not i.shape.startswith("("):
            source = self.module.named(computation, i.operands[0])
            return (
                self._written_by(computation, source)
                if source.opcode == "dynamic-update-slice"
                else shape_bytes(i.shape)
            )
        if i.opcode == "dynamic-update-slice":
            return shape_bytes(self.module.named(computation, i.operands[1]).shape)
        if i.opcode == "scatter":
            return shape_bytes(self.module.named(computation, i.operands[-1]).shape)
        return shape_bytes(i.shape)

    def _is_result(self, computation: str, i: Instruction) -> bool:
        """Whether an instruction of a fusion is its result, or one of them."""
        users = self._users(computation).get(i.name, [])
        return i.is_root or (
            bool(users)
            and all(
                (user.opcode == "tuple" and user.is_root)
                or (user.opcode == "bitcast" and self._is_result(computation, user))
                for user in users
            )
        )

    # ---- names -------------------------------------------------------------------------------------------------------

    def _array(self, computation: str, name: str) -> Array:
        return arrays(self.module.named(computation, name).shape)[0]

    def _users(self, computation: str) -> dict[str, list[Instruction]]:
        return self.module.users(computation)


def _workspace_bytes(i: Instruction) -> int:
    """Of a library's call: the last result is room to work in, which need not be used."""
    results = arrays(i.shape)
    is_library = i.custom_call_target.startswith(("__cublas$", "__cudnn$"))
    return results[-1].bytes if is_library and len(results) > 1 and results[-1].dtype in ("s8", "u8") else 0
