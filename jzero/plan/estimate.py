"""How long a step takes, by arithmetic: the program's operations, bytes and schedule, and the target's rates.

No GPU has run it.  The order of kernels and what runs beside each collective are the compiler's own; the seconds are
the rates', and every assumption in them is listed.  Compare settings with it before you believe its absolute numbers.

Whether ZeRO's traffic can hide is a matter of tokens: a microbatch of T tokens per device takes time that grows with T,
while what ZeRO sends for it does not.  `tokens_to_hide` is the T at which the two are equal, on this mesh.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import jax

import jzero
from jzero.mesh import DATA_AXES, data_size
from jzero.plan.programs import Programs
from jzero.rates import Rates
from jzero.schedule import CollectiveTime, Timeline, schedule, sums


@dataclass(frozen=True)
class Tokens:
    """What the rows of a batch are to the model.

    Attributes:
        per_row: tokens of one row.
        flops: model FLOPs of one trained token, recomputation not counted; 0 where it is not known.
    """

    per_row: int
    flops: float = 0.0


@dataclass(frozen=True)
class Share:
    """Collectives of one kind in one part of a step, and what of their time is hidden.

    Attributes:
        phase: "forward", "backward" or "update".
        where: "layers", inside a loop over layers, or "beside" them.
        kind, axes: as of `hlo.Collective`.
        message_bytes: of all executions.
        seconds: on the link; hidden_s of them something is computed.
    """

    phase: str
    where: str
    kind: str
    axes: str
    message_bytes: int
    seconds: float
    hidden_s: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step on one device.

    Attributes:
        step_s: all of it; compute_s, in which something is computed, and exposed_s, in which it waits for the link.
        communication_s: in which the link is busy, hidden or exposed.
        flops: of matrix products and attention, recomputation counted.
        mfu: model FLOPs per second of the peak (Chowdhery et al. 2022, appendix B); 0 where they are not known.
        tokens: of a step, over all devices; rows where nobody says how many tokens a row has.
        tokens_here: of one device and microbatch; the devices of a tp group share theirs.
        tokens_to_hide: of one device and microbatch, at which computing takes as long as ZeRO's collectives.
        shares: what is hidden of each kind of collective.
        loops: one turn of each loop over layers, for a picture.
        assumptions: in the rates.
        parts_s: "passes", "update" and "publish" -> seconds of their programs, of a step that is several.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    communication_s: float
    flops: int
    mfu: float
    tokens: int
    tokens_here: int
    tokens_to_hide: float
    shares: tuple[Share, ...]
    loops: tuple[Timeline, ...]
    assumptions: tuple[str, ...]
    parts_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Over all devices."""
        return self.tokens / self.step_s


def estimate(run: jzero.Run, programs: Programs, rates: Rates, tokens: Tokens | None) -> Estimate:
    """The time of a step of `run`, with everything that it needs on the device.

    Args:
        programs: of its step, compiled for the target that the rates are of.
        tokens: what a row is; None counts rows.

    Raises:
        HloError: something in the program cannot be counted.
    """
    courses = [(schedule(program, run.mesh, rates), times) for _, program, times in programs.running()]
    collectives = [c for course, times in courses for c in [*course.collectives] * times]
    compute_s = sum(course.compute_s * times for course, times in courses)
    step_s = sum(course.step_s * times for course, times in courses)
    parts_s = {"passes": 0.0, "update": 0.0, "publish": 0.0}
    for (name, program, times), (course, _) in zip(programs.running(), courses, strict=True):
        part = "passes" if program is programs.passes else "publish" if name == "publish" else "update"
        parts_s[part] += course.step_s * times
    rows = jax.tree.leaves(run.abstract_batch)[0].shape[0]
    per_row = tokens.per_row if tokens else 1
    here = rows * per_row // (data_size(run.mesh) * run.micro_batches)
    of_zero = sum(c.seconds for c in collectives if set(c.axes) <= set(DATA_AXES))
    model_flops = rows * per_row * (tokens.flops if tokens else 0.0)
    return Estimate(
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=sum(course.exposed_s * times for course, times in courses),
        communication_s=sum(course.communication_s * times for course, times in courses),
        flops=sum(course.cost.flops * times for course, times in courses),
        mfu=model_flops / (step_s * run.mesh.size * rates.matmul_flops_per_s),
        tokens=rows * per_row,
        tokens_here=here,
        tokens_to_hide=here * of_zero / compute_s,
        shares=tuple(_shares(collectives)),
        loops=tuple(line for course, _ in courses for line in course.timelines if line.phase != "update"),
        assumptions=tuple(dict.fromkeys(line for course, _ in courses for line in course.assumptions)),
        parts_s=parts_s,
    )


def _shares(found: Iterable[CollectiveTime]) -> Iterable[Share]:
    """In the order of a step: forward, backward, update."""
    order = {"forward": 0, "backward": 1, "update": 2}
    parts = sums(found, "phase", "layer_turns", "kind", "axes")
    together: dict[tuple[str, str, str, str], list[float]] = {}
    for part in parts:
        phase, turns, kind, axes = part.key
        key = (phase, "layers" if turns else "beside", kind, "+".join(axes))
        total = together.setdefault(key, [0, 0.0, 0.0])
        for i, value in enumerate((part.message_bytes, part.seconds, part.hidden_s)):
            total[i] += value
    for key in sorted(together, key=lambda key: (order[key[0]], key[1] != "layers", key[2:])):
        nbytes, seconds, hidden_s = together[key]
        yield Share(*key, int(nbytes), seconds, max(0.0, hidden_s))  # a difference: may come out at -0.0
