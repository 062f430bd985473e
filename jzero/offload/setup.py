"""From an optimizer and its placement to the stream that runs it: groups, their lanes and their programs."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jzero.driver import Driver, in_mesh
from jzero.gradients import Gradients
from jzero.offload.arriving import arrival, arrival_program
from jzero.offload.born import new_state
from jzero.offload.files import InFiles
from jzero.offload.grads_memory import Memory
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.lanes import Lane, gathered
from jzero.offload.on_cpu import UpdatedOnCpu
from jzero.offload.on_device import UpdatedOnDevice
from jzero.offload.param_reads import ParamReads
from jzero.offload.pieces import AbstractPieces
from jzero.offload.placing import param_lanes, state_lanes
from jzero.offload.programs import accumulated_gradients, gradients_memory, gradients_program, publish_program
from jzero.offload.state_params import with_params
from jzero.offload.stream import Group, Stream, Updater
from jzero.offload.updates import Kind, kind_of, name_of, update_arguments, update_program
from jzero.optim import Optimizer
from jzero.placement import Offload
from jzero.step import TrainState
from jzero.zero import Path

Program = tuple[Any, tuple[Any, ...]]  # jitted, and its abstract arguments


def streamed(
    offload: Offload,
    reads: ParamReads,
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
        reads: of parameters in files, which are laid out here.
        optimizer, clip_norm, state, batch, born: as `driver.at_once` has them.
        options: of the compiler, for programs with collectives.

    Raises:
        SeparationError: an optimizer that cannot be run in groups.
        ShardingError: one that keeps an average of parameters which rest in files.
    """
    size, on_cpu = offload.group_size, offload.update == "cpu"
    in_groups = InGroups.of(optimizer, gradients.trained_layouts, state, size, on_cpu=on_cpu)
    cuts = in_groups.groups(size)
    of_state, of_params = state_lanes(offload, in_groups, cuts), param_lanes(offload, reads, in_groups, cuts)
    on_device = [] if offload.update == "cpu" else cuts
    updates = {kind: update_program(in_groups, kind, options) for kind in dict.fromkeys(map(kind_of, on_device))}
    groups = _groups(offload, in_groups, updates, cuts, of_state, of_params)
    first = gradients_program(in_groups, gradients, clip_norm, reads.entered(state), batch, options)
    last = publish_program(in_groups, gradients, options) if in_groups.published else None
    memory = Memory(gradients_memory(in_groups, gradients))
    mesh = in_groups.mesh
    files = _files([*of_state, *of_params])
    return Driver(
        init=functools.partial(new_state, in_groups, groups, of_params, state, born),
        step=Stream(in_groups, groups, in_mesh(mesh, first[0]), last and in_mesh(mesh, last[0]), memory, reads),
        state=_at_rest(state, of_state, of_params),
        programs={
            "gradients": first,
            **_programs_by_kind(in_groups, gradients, updates, cuts),
            **({"publish": last} if last else {}),
        },
        elsewhere_bytes=_elsewhere_bytes(groups),
        file_bytes=sum(each.nbytes for each in files),
        entered=reads.entered,
        finished=reads.finished,
        close=functools.partial(_close, files),
    )


def _groups(
    offload: Offload,
    in_groups: InGroups,
    updates: Mapping[Kind, Any],
    cuts: Sequence[tuple[Cut, ...]],
    of_state: Sequence[Lane],
    of_params: Sequence[Lane],
) -> list[Group]:
    updater = _updater(offload, in_groups, updates)
    return [
        Group(
            cuts=own,
            state=state,
            params=params,
            on_cpu=offload.update == "cpu",
            arrive=arrival(in_groups, own),
            updater=updater(own),
        )
        for own, state, params in zip(cuts, of_state, of_params, strict=False)  # none has frozen parameters
    ]


def _updater(
    offload: Offload, in_groups: InGroups, updates: Mapping[Kind, Any]
) -> Callable[[tuple[Cut, ...]], Updater]:
    if offload.update == "cpu":
        of_chunks: dict[Path, Any] = {}
        return lambda own: UpdatedOnCpu(in_groups, own, of_chunks)
    return lambda own: UpdatedOnDevice(in_groups, own, updates[kind_of(own)])


def _programs_by_kind(
    in_groups: InGroups, gradients: Gradients, updates: Mapping[Kind, Any], cuts: Sequence[tuple[Cut, ...]]
) -> dict[str, Program]:
    """What brings gradients to each kind of group, and what updates it, by name."""
    accumulated, examples = accumulated_gradients(in_groups, gradients), {kind_of(own): own for own in cuts}
    arrivals = {
        f"gradients of {name_of(kind)}": arrival_program(in_groups, own, accumulated) for kind, own in examples.items()
    }
    return arrivals | {
        f"update {name_of(kind)}": (update, update_arguments(in_groups, examples[kind]))
        for kind, update in updates.items()
    }


def _at_rest(state: TrainState, of_state: Sequence[Lane], of_params: Sequence[Lane]) -> TrainState:
    """The state, abstract, with where each piece of it rests."""
    leaves, treedef = jax.tree.flatten(state.opt_state)
    rest = gathered(((lane, lane.fills) for lane in [*of_state, *of_params]), AbstractPieces)
    opt_state = treedef.unflatten([rest.get(i, x) for i, x in enumerate(leaves)])
    return with_params(dataclasses.replace(state, opt_state=opt_state), rest)


def _files(lanes: Sequence[Lane]) -> list[InFiles]:
    """Those in which anything rests, each once."""
    tiers = {id(lane.tier): lane.tier for lane in lanes}
    return [tier for tier in tiers.values() if isinstance(tier, InFiles)]


def _close(files: Sequence[InFiles]) -> None:
    with contextlib.ExitStack() as stack:
        for each in files:
            stack.callback(each.close)


def _elsewhere_bytes(groups: Sequence[Group]) -> dict[str, int]:
    """Bytes of the optimizer's state, of one device, by where they rest."""
    found: dict[str, int] = {}
    for group in (group for group in groups if group.state.tier.name != "device"):
        found[group.state.tier.name] = found.get(group.state.tier.name, 0) + group.state.nbytes
    return found
