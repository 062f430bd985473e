"""From an optimizer and its placement to the stream that runs it: groups, their tiers and their programs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jzero.driver import Driver
from jzero.gradients import Gradients
from jzero.offload.born import new_state
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.programs import (
    gradients_program,
    kind_of,
    name_of,
    publish_program,
    update_arguments,
    update_program,
)
from jzero.offload.stream import Group, Stream
from jzero.offload.tiers import InHostMemory, OnDevice, Tier
from jzero.optim import Optimizer
from jzero.placement import Offload
from jzero.step import Found, TrainState


def streamed(
    offload: Offload,
    optimizer: Optimizer,
    gradients: Gradients,
    clip_norm: float,
    state: TrainState,
    batch: Any,
    born: Callable[[Optimizer], TrainState],
    options: dict[str, Any] | None,
) -> Driver:
    """A step whose optimizer runs in groups.

    Args:
        optimizer: of all parameters.
        clip_norm: largest global norm of the gradient; infinite for none.
        state, batch: abstract, with shardings.
        born: makes a new train state with the state of an optimizer; not jitted.
        options: of the compiler, for programs with collectives.

    Raises:
        SeparationError: an optimizer that cannot be run in groups.
    """
    in_groups = InGroups.of(optimizer, gradients.trained_layouts, state)
    cuts = in_groups.groups(offload.group_size)
    programs = {kind: update_program(in_groups, kind, options) for kind in dict.fromkeys(map(kind_of, cuts))}
    tier = _tier(offload)
    groups = [
        Group(own, in_groups.nbytes(own), tier, on_device(in_groups, own, programs[kind_of(own)])) for own in cuts
    ]
    first = gradients_program(in_groups, gradients, clip_norm, state, batch, options)
    last = publish_program(in_groups, gradients, options) if in_groups.published else None
    examples = {kind_of(own): own for own in cuts}
    updates = {
        f"update {name_of(kind)}": (program, update_arguments(in_groups, examples[kind]))
        for kind, program in programs.items()
    }
    return Driver(
        init=functools.partial(new_state, in_groups, groups, state, born),
        step=Stream(in_groups, groups, first[0], last and last[0]),
        programs={"gradients": first, **updates, **({"publish": last} if last else {})},
        elsewhere_bytes=_elsewhere_bytes(groups),
    )


def on_device(groups: InGroups, group: Sequence[Cut], program: Any) -> Callable[..., Any]:
    """The update of one group on the devices of the run, as `stream.Group` has it."""
    starts = [np.asarray(cut.start, np.int32) for cut in group]
    counts = [len(groups.numbers(cut.path)) for cut in group]

    def update(grads: Any, old: Any, pieces: Sequence[Any], shared: Any, found: Found) -> Any:
        flat = iter(pieces)
        state = [[next(flat) for _ in range(count)] for count in counts]
        old, state, shared, report = program(grads, old, state, shared, starts, found.loss, found.finite)
        return old, jax.tree.leaves(state), shared, report

    return update


def _tier(offload: Offload) -> Tier:
    return {"device": OnDevice, "host": InHostMemory}[offload.optimizer]()


def _elsewhere_bytes(groups: Sequence[Group]) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in (group for group in groups if group.tier.name != OnDevice.name):
        found[group.tier.name] = found.get(group.tier.name, 0) + group.nbytes
    return found
