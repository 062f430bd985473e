"""The text of a compiled program, as computations of instructions: where collectives stand, and how often they run.

Operands are printed without shapes, but every message follows from the output's shape and the group size.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jzero.hlo_shapes import HloError, closing

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ASSIGNMENT = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_CUSTOM_CALL = re.compile(r'\bcustom_call_target="([^"]*)"')
# Libraries' matrix multiplications, convolutions and attention.
_MATMUL_CALL = re.compile(r"gemm|matmul|\$conv|fmha", re.IGNORECASE)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
# What follows these is free text that may look like an attribute.
_FREE_TEXT = re.compile(r", (?:metadata|frontend_attributes|backend_config|statistics)=")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name, shape, opcode: as printed.
        attributes: operands and structural attributes.
        free_text: metadata and backend_config.
        is_root: whether it is the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    attributes: str
    free_text: str
    is_root: bool = False

    @property
    def kind(self) -> str | None:
        """The kind where this starts a collective. The done half of a pair is no collective of its own.

        Raises:
            HloError: a collective that is none of `KINDS`.
        """
        if self.opcode.endswith(("-done", "-update")):
            return None
        kind = self.opcode.removesuffix("-start")
        if kind in KINDS:
            return kind
        if re.search(r"collective|all-gather|all-reduce|reduce-scatter|all-to-all|^send$|^recv$", kind):
            raise HloError(f"instruction {self.name}: no rule for counting the bytes of {self.opcode!r}")
        return None

    @property
    def callees(self) -> list[str]:
        """Computations that this runs."""
        if self.opcode.endswith(("-done", "-update")):
            return []  # Older XLA repeats `calls=` there.
        return [name for group in _CALLED.findall(self.attributes) for name in re.findall(r"[\w.\-]+", group)]

    def called(self, role: str) -> str:
        """The computation that this calls as its `role`, "body" or "condition"; "" without one."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    @property
    def first_operand(self) -> str:
        """Name of the first operand; "" without one."""
        found = re.match(r"%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    @property
    def operands(self) -> list[str]:
        """Names of the operands; [] for a parameter and a constant."""
        if self.opcode in ("parameter", "constant"):
            return []
        printed = re.sub(r"/\*.*?\*/", "", self.attributes[: closing("(" + self.attributes) - 2])
        # Older XLA prints the shape before the name.
        return re.findall(r"%([\w.\-]+)", printed) or [word.split()[-1] for word in printed.split(",") if word.strip()]

    @property
    def op_name(self) -> str:
        """The path in the traced function, as in "jit(step)/while/body/all_gather"; "" where XLA kept none."""
        found = _OP_NAME.search(self.free_text)
        return found[1] if found else ""

    @property
    def custom_call_target(self) -> str:
        """What a custom call calls; "" for other instructions."""
        found = _CUSTOM_CALL.search(self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int:
        """How often this loop runs its body.

        Raises:
            HloError: XLA does not know.
        """
        if found := _TRIPS.search(self.free_text):
            return int(found[1])
        raise HloError(
            f"loop {self.name} has no known trip count, and what is in it counts: run it a number of times that is "
            "known when it is compiled (scan, or fori_loop with constants)"
        )


@dataclass(frozen=True)
class Placed:
    """A collective where it stands; fields as in `hlo.Collective`.

    Attributes:
        whiles: the `while` instruction of each.
    """

    instruction: Instruction
    trips: int
    loops: tuple[str, ...]
    matmuls: int
    whiles: tuple[Instruction, ...] = ()


class Module:
    """The computations of one HLO module, by name.

    Attributes:
        computations: name -> instructions, in the order of the schedule.
        entry: the name of the one that the program runs.

    Raises:
        HloError: the text is not that of a compiled program.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current = None
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _ASSIGNMENT.match(line)):
                current.append(parse_instruction(found[2], found[3], is_root=bool(found[1])))
        if not text.startswith("HloModule") or not self.entry:
            raise HloError(f"not the HLO text of a compiled program (compile first): {text[:60]!r}")
        self._busy: dict[str, bool] = {}
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self._named: dict[str, dict[str, Instruction]] = {}

    @property
    def collective_names(self) -> set[str]:
        """Names of all collectives, whether the entry reaches them or not."""
        return {i.name for body in self.computations.values() for i in body if i.kind}

    def named(self, computation: str, name: str) -> Instruction:
        """An instruction of a computation.

        Raises:
            HloError: there is none of that name.
        """
        if computation not in self._named:
            self._named[computation] = {i.name: i for i in self.computations[computation]}
        if name not in self._named[computation]:
            raise HloError(f"computation {computation}: no instruction {name!r}, which is an operand there")
        return self._named[computation][name]

    def users(self, name: str) -> dict[str, list[Instruction]]:
        """Of each value of computation `name` that is used there, the instructions that use it."""
        if name not in self._users:
            users = self._users[name] = {}
            for i in self.computations[name]:
                for operand in dict.fromkeys(i.operands):
                    users.setdefault(operand, []).append(i)
        return self._users[name]

    def busy(self, name: str) -> bool:
        """Whether a run of computation `name` may meet a collective."""
        if name not in self._busy:
            body = self.computations.get(name, [])
            self._busy[name] = any(i.kind or any(self.busy(c) for c in i.callees) for i in body)
        return self._busy[name]

    def walk(
        self,
        name: str,
        trips: int = 1,
        loops: tuple[str, ...] = (),
        matmuls: int = 0,
        whiles: tuple[Instruction, ...] = (),
    ) -> Iterator[Placed]:
        """Every collective that a run of computation `name` meets.

        Args:
            trips, loops, matmuls, whiles: of the place from which it is called.

        Raises:
            HloError: what a collective is, or how often it runs, cannot be told.
        """
        for position, i in enumerate(self.computations[name]):
            # What an asynchronous call wraps is not asynchronous itself.
            under = self.matmuls_under(name, position) if i.opcode.endswith("-start") else matmuls
            if i.kind:
                yield Placed(i, trips, loops, under, whiles)
            for callee in filter(self.busy, i.callees):
                if i.opcode != "while":
                    yield from self.walk(callee, trips, loops, under, whiles)
                    continue
                # A condition is tested once more than the body runs.
                count = i.trip_count + (callee == i.called("condition"))
                yield from self.walk(callee, trips * count, (*loops, callee), 0, (*whiles, i))

    def matmuls_under(self, name: str, start: int) -> int:
        """Matrix multiplications between what stands at `start` and what waits for it; 0 if that is not found here."""
        body = self.computations[name]
        under_way, opcode, count = body[start].name, body[start].opcode.removesuffix("-start"), 0
        for i in body[start + 1 :]:
            if i.first_operand == under_way and i.opcode == f"{opcode}-update":
                under_way = i.name
            elif i.first_operand == under_way and i.opcode == f"{opcode}-done":
                return count
            count += self.multiplies(i)
        return 0

    def multiplies(self, i: Instruction) -> bool:
        """Whether an instruction multiplies matrices, itself or in what it calls."""
        if i.opcode in ("dot", "convolution") or _MATMUL_CALL.search(i.custom_call_target):
            return True
        return any(self.multiplies(inner) for callee in i.callees for inner in self.computations.get(callee, []))


def parse_instruction(name: str, text: str, *, is_root: bool = False) -> Instruction:
    """Splits `SHAPE OPCODE(OPERANDS), ATTRIBUTES`.

    Raises:
        HloError: it cannot be split so.
    """
    end = closing(text) if text.startswith("(") else text.find(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, parenthesis, rest = rest.partition("(")
    if end < 0 or not parenthesis or not re.fullmatch(r"[a-z][\w\-]*", opcode):
        raise HloError(f"instruction {name}: cannot tell shape and operation apart in {text[:120]!r}")
    cut = found.start() if (found := _FREE_TEXT.search(rest)) else len(rest)
    return Instruction(name, shape, opcode, rest[:cut], rest[cut:], is_root)
