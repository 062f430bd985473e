"""Two streams, one that computes and one that communicates, followed through a scheduled program.

`schedule.py` says what comes out of it; this is the clockwork.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jzero.hlo_cost import CONTROL, Cost, Costs
from jzero.hlo_text import Instruction, Module
from jzero.rates import Rates

Key = tuple[str, tuple[str, ...]]  # a collective's name and the loops round it


@dataclass(frozen=True)
class Event:
    """Something that one stream is busy with.

    Attributes:
        name: of the instruction.
        stream: "compute" or "communication".
        start_s, end_s: since the computation began.
        what: "matmul", "other" (bound by memory), "loop", or a collective's kind and axes, "all-gather dp".
        op_name: its path in the traced function.
    """

    name: str
    stream: str
    start_s: float
    end_s: float
    what: str
    op_name: str


class Sent(NamedTuple):
    """What the ledger knows of one collective: one execution."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float


class _Busy(NamedTuple):
    """A collective on the link, from start_s to end_s."""

    key: Key
    start_s: float
    end_s: float


@dataclass
class Usage:
    """Of one collective, all executions together."""

    seconds: float = 0.0
    exposed_s: float = 0.0


@dataclass
class Course:
    """One run of a computation.

    Attributes:
        seconds: until its end, on the compute stream.
        compute_s: in which that is busy.
        usages: of the collectives that ran or were waited for.
        events: in the order of their starts; a loop is one event.
        link: collectives that are under way or waiting for the link, at the end of it.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    usages: dict[Key, Usage] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    link: list[_Busy] = field(default_factory=list)

    def usage(self, key: Key) -> Usage:
        """Of one collective."""
        return self.usages.setdefault(key, Usage())

    def compute(self, seconds: float, name: str, what: str, op_name: str) -> None:
        """The compute stream is busy."""
        if seconds:
            self.events.append(Event(name, "compute", self.seconds, self.seconds + seconds, what, op_name))
        self.seconds += seconds
        self.compute_s += seconds

    def send(self, key: Key, seconds: float, what: str, op_name: str) -> float:
        """Puts a collective on the link, after those that are there; returns when it ends."""
        start_s = max([self.seconds, *(busy.end_s for busy in self.link)])
        self.link.append(_Busy(key, start_s, start_s + seconds))
        self.usage(key).seconds += seconds
        self.events.append(Event(key[0], "communication", start_s, start_s + seconds, what, op_name))
        return start_s + seconds

    def wait(self, end_s: float) -> None:
        """The compute stream waits, for whatever is on the link until then."""
        for busy in self.link:
            self.usage(busy.key).exposed_s += max(0.0, min(busy.end_s, end_s) - max(busy.start_s, self.seconds))
        self.seconds = max(self.seconds, end_s)
        self.link = [busy for busy in self.link if busy.end_s > self.seconds]

    def under_way(self) -> list[_Busy]:
        """What is on the link, seen from now on."""
        return [
            _Busy(b.key, b.start_s - self.seconds, b.end_s - self.seconds) for b in self.link if b.end_s > self.seconds
        ]

    def follow(self, other: "Course", turns: int, name: str, op_name: str) -> None:
        """`turns` runs of `other`, which began with what is under way now."""
        start_s = self.seconds
        self.seconds += other.seconds * turns
        self.compute_s += other.compute_s * turns
        for key, usage in other.usages.items():
            self.usage(key).seconds += usage.seconds * turns
            self.usage(key).exposed_s += usage.exposed_s * turns
        self.link = [_Busy(b.key, b.start_s + self.seconds, b.end_s + self.seconds) for b in other.under_way()]
        self.events.append(Event(name, "compute", start_s, self.seconds, "loop", op_name))


class Simulation:
    """A module's computations, run on two streams.

    Attributes:
        loops: by the name of its body, each loop that was met, after those round it.
    """

    def __init__(self, module: Module, rates: Rates, sent: Mapping[Key, Sent]) -> None:
        self.module, self.rates, self.sent = module, rates, sent
        self.costs = Costs(module)
        self.loops: dict[str, tuple[Instruction, ...]] = {}
        self._turns: dict[tuple[Instruction, ...], Course] = {}

    def turn(self, whiles: tuple[Instruction, ...]) -> Course:
        """One turn of the innermost of some loops, begun with an idle link."""
        if whiles not in self._turns:
            self._turns[whiles] = self.run(whiles[-1].called("body"), [], whiles)
        return self._turns[whiles]

    def run(self, name: str, link: Sequence[_Busy] = (), whiles: tuple[Instruction, ...] = ()) -> Course:
        """One run of a computation.

        Args:
            link: what is under way when it begins.
            whiles: the loops in which it stands, outermost first.
        """
        course = Course(link=list(link))
        self._step_through(name, course, {}, whiles)
        course.events.sort(key=lambda event: event.start_s)
        return course

    def _step_through(self, name: str, course: Course, ends: dict[str, float], whiles: tuple[Instruction, ...]) -> None:
        """Follows the instructions of a computation; `ends` says when what was started ends, by name."""
        loops = tuple(loop.called("body") for loop in whiles)
        for i in self.module.computations[name]:
            if i.opcode == "while":
                self._loop((*whiles, i), course)
            elif i.opcode.endswith("-done"):
                course.wait(ends.pop(i.first_operand, 0.0))
            elif i.opcode.endswith("-update"):
                ends[i.name] = ends.pop(i.first_operand, 0.0)
            elif collective := self._collective(i):
                key = (collective.name, loops)
                end_s = self._send(key, collective, course) if key in self.sent else 0.0
                if i.opcode.endswith("-start"):
                    ends[i.name] = end_s
                else:
                    course.wait(end_s)
            elif i.opcode in CONTROL:
                for callee in i.callees:
                    self._step_through(callee, course, ends, whiles)
            else:
                cost = self.costs.of(name, i)
                course.compute(self.rates.compute_s(cost), i.name, _what(cost), i.op_name)

    def _collective(self, i: Instruction) -> Instruction | None:
        """The collective that an instruction is or, as an asynchronous call, wraps."""
        if i.kind or i.opcode != "async-start":
            return i if i.kind else None
        return next((x for callee in i.callees for x in self.module.computations[callee] if x.kind), None)

    def _send(self, key: Key, i: Instruction, course: Course) -> float:
        kind, axes, wire_bytes = self.sent[key]
        seconds = self.rates.collective_s(kind, axes, wire_bytes)
        return course.send(key, seconds, f"{kind} {'+'.join(axes)}", i.op_name)

    def _loop(self, whiles: tuple[Instruction, ...], course: Course) -> None:
        """All turns of the innermost; each by itself as long as something from before the loop is under way."""
        loop = whiles[-1]
        self.loops[loop.called("body")] = whiles
        left = loop.trip_count
        while left:
            link = course.under_way()
            turns, turn = (1, self.run(loop.called("body"), link, whiles)) if link else (left, self.turn(whiles))
            course.follow(turn, turns, loop.name, loop.op_name)
            left -= turns


def _what(cost: Cost) -> str:
    return "matmul" if cost.flops else "other"
