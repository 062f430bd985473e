"""The compiled programs of a step, and how often each runs: one, or those of an optimizer that runs in groups."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax

import jzero
from jzero.offload.stream import Group, Stream
from jzero.offload.updates import kind_of, name_of

_PASSES = ("step", "gradients")  # the one that has the passes


@dataclass(frozen=True)
class Programs:
    """What a step runs on a device.

    Attributes:
        compiled: by name.
        times: how often each runs.
    """

    compiled: Mapping[str, jax.stages.Compiled]
    times: Mapping[str, int]

    @property
    def passes(self) -> jax.stages.Compiled:
        """The program of the forward and the backward pass."""
        return next(self.compiled[name] for name in _PASSES if name in self.compiled)

    def running(self) -> Iterator[tuple[str, jax.stages.Compiled, int]]:
        """(name, program, times) of those that run."""
        yield from ((name, program, self.times[name]) for name, program in self.compiled.items() if self.times[name])


def programs_of(run: jzero.Run, options: dict[str, str | bool] | None) -> Programs:
    """Compiles the programs of `run`.

    Args:
        options: of the compiler.
    """
    compiled = {name: lowered.compile(compiler_options=options) for name, lowered in run.lower().items()}
    times = times_of(run)
    return Programs(compiled, {name: times.get(name, 1) for name in compiled})


def times_of(run: jzero.Run) -> dict[str, int]:
    """Program of an update, or of its gradients -> how many groups a step runs it for."""
    if run.stream is None:
        return {}
    found = Counter[str]()
    for group in run.stream.groups:
        if not group.on_cpu:
            found[update_of(group)] += 1
        found[f"gradients of {name_of(kind_of(group.cuts))}"] += 1
    return dict(found)


def update_of(group: Group) -> str:
    """The name of the program that updates a group on the device."""
    return f"update {name_of(kind_of(group.cuts))}"


def state_in_flight(stream: Stream, k: int) -> int:
    """Bytes that are on the device for the update of group `k`, and rest elsewhere: its own, and those of the group
    before and of the next."""
    return sum(group.device_bytes for group in stream.groups[max(0, k - 1) : k + 2])
