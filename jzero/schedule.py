"""How long a compiled program takes, and what of its traffic hides under computation: a simulation of its schedule.

A program for GPUs is scheduled when it is compiled: its text is the order in which kernels start, and an asynchronous
collective is a pair, start and done, between which others run.  So its course can be followed without a GPU, given
rates::

    result = schedule(compiled, mesh, Rates.of(GPUS["h100"], mesh))
    print(result.step_s, result.sums("phase", "kind"))

One stream computes, in the order of the text; one communicates, a collective after the other in the order of their
starts.  A `done` makes the first wait for the second: that time is exposed, and everything else of a collective is
hidden.  So hidden is a matter of time here and not of a count: of a gather that is longer than the matmul over it, the
rest is exposed.  A collective without a pair is exposed as a whole; XLA's CPU compiler knows no others, so a CPU
program's traffic is all exposed.

Loops take their trips times a turn.  Conditionals take all their branches after each other, an upper bound.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from jzero.hlo import Collective, collectives
from jzero.hlo_cost import Cost
from jzero.hlo_text import Module
from jzero.phases import Phase, Phases
from jzero.rates import Rates
from jzero.simulate import Course, Event, Key, Sent, Simulation, Usage

__all__ = ["CollectiveTime", "Event", "Schedule", "Sum", "Timeline", "schedule", "sums"]


@dataclass(frozen=True)
class CollectiveTime:
    """One collective instruction, all its executions together; other fields as in `hlo.Collective`.

    Attributes:
        message_bytes: of one execution, all dtypes together.
        wire_bytes: of all trips.
        seconds: on the link, all trips; hidden_s of them something is computed, and for exposed_s computation waits.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    phase: Phase
    loops: tuple[str, ...]
    layer_turns: int
    trips: int
    message_bytes: int
    wire_bytes: int
    matmuls: int
    seconds: float
    hidden_s: float
    exposed_s: float
    op_name: str


@dataclass(frozen=True)
class Timeline:
    """One run of the program, or one turn of a loop's body.

    Attributes:
        name: of the computation.
        phase: the pass that it is part of; "update" of the whole program and of loops round both passes.
        turns: of the loop in one run of what is round it; 1 of the whole program.
        seconds: until its end, on the compute stream.
        events: in the order of their starts; waiting is where the compute stream has none.
    """

    name: str
    phase: Phase
    turns: int
    seconds: float
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Sum:
    """Collectives that agree in some fields, together; `key` are their values."""

    key: tuple
    message_bytes: int
    wire_bytes: int
    seconds: float
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True)
class Schedule:
    """The course of one run of a program on one device.

    Attributes:
        step_s: all of it: compute_s, in which the compute stream is busy, and exposed_s, in which it waits.
        communication_s: in which the link is busy, hidden or exposed.
        cost: what was computed.
        collectives: in program order.
        timelines: of the whole program, and of each loop in which something is sent.
        assumptions: of the rates that count here.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    cost: Cost
    collectives: tuple[CollectiveTime, ...]
    timelines: tuple[Timeline, ...]
    assumptions: tuple[str, ...]

    def sums(self, *by: str) -> tuple[Sum, ...]:
        """Sums over collectives that agree in the fields `by`, of `CollectiveTime`, ordered by these."""
        return sums(self.collectives, *by)


def sums(found: Iterable[CollectiveTime], *by: str) -> tuple[Sum, ...]:
    """Sums over collectives that agree in the fields `by`, ordered by these; message bytes are of all trips."""
    groups: dict[tuple, list[CollectiveTime]] = {}
    for c in found:
        groups.setdefault(tuple(getattr(c, name) for name in by), []).append(c)
    return tuple(
        Sum(
            key,
            sum(c.message_bytes * c.trips for c in group),
            sum(c.wire_bytes for c in group),
            sum(c.seconds for c in group),
            sum(c.hidden_s for c in group),
            sum(c.exposed_s for c in group),
        )
        for key, group in sorted(groups.items())
    )


def schedule(program: "jax.stages.Compiled | str", mesh: Mesh, rates: Rates) -> Schedule:
    """The course of one run of a program whose text is in the order of its schedule.

    Args:
        program: a compiled function, or the HLO text of one.
        mesh: the mesh it was compiled for.

    Raises:
        HloError: as `hlo.collectives` and `hlo_cost.cost`.
        ValueError: rates that know no link for what the program sends.
    """
    ledger: dict[Key, list[Collective]] = {}
    for c in collectives(program, mesh):
        ledger.setdefault((c.name, c.loops), []).append(c)
    module = Module(program if isinstance(program, str) else program.as_text() or "")
    simulation = Simulation(module, rates, {key: _sent(found) for key, found in ledger.items()})
    whole = simulation.run(module.entry)
    times = [_time(found, whole.usages.get(key, Usage())) for key, found in ledger.items()]
    return Schedule(
        step_s=whole.seconds,
        compute_s=whole.compute_s,
        communication_s=sum(c.seconds for c in times),
        exposed_s=sum(c.exposed_s for c in times),
        cost=simulation.costs.of_computation(module.entry),
        collectives=tuple(times),
        timelines=tuple(_timelines(simulation, whole)),
        assumptions=rates.assumptions({"+".join(c.axes) for c in times}),
    )


def _once(found: list[Collective]) -> list[Collective]:
    """One of each dtype: an instruction that is reached by two ways stands twice in the ledger."""
    return list({c.dtype: c for c in found}.values())


def _sent(found: list[Collective]) -> Sent:
    first = found[0]
    return Sent(first.kind, first.axes, sum(replace(c, trips=1).wire_bytes for c in _once(found)))


def _time(found: list[Collective], usage: Usage) -> CollectiveTime:
    """Of one instruction, all its dtypes together."""
    first, once = found[0], _once(found)
    return CollectiveTime(
        name=first.name,
        kind=first.kind,
        axes=first.axes,
        phase=first.phase,
        loops=first.loops,
        layer_turns=first.layer_turns,
        trips=sum(c.trips for c in found if c.dtype == first.dtype),
        message_bytes=sum(c.message_bytes for c in once),
        wire_bytes=sum(c.wire_bytes for c in found),
        matmuls=first.matmuls,
        seconds=usage.seconds,
        hidden_s=max(0.0, usage.seconds - usage.exposed_s),  # rounding
        exposed_s=usage.exposed_s,
        op_name=first.op_name,
    )


def _timelines(simulation: Simulation, whole: Course) -> Iterator[Timeline]:
    """The whole program's, and those of loops in which something is sent."""
    module = simulation.module
    yield Timeline(module.entry, "update", 1, whole.seconds, tuple(whole.events))
    phases = Phases(module)
    for body, whiles in simulation.loops.items():
        if module.busy(body):
            turn = simulation.turn(whiles)
            phase = phases.of(whiles[-1], whiles[:-1])
            yield Timeline(body, phase, whiles[-1].trip_count, turn.seconds, tuple(turn.events))
