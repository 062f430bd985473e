"""From an optimizer and its placement to the stream that runs it: groups, their tiers and their programs."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.driver import Driver, in_mesh
from jzero.gradients import Gradients
from jzero.offload.arriving import arrival, arrival_program
from jzero.offload.born import new_state
from jzero.offload.copies import Copies
from jzero.offload.files import InFiles, Place, from_device, to_device
from jzero.offload.grads_memory import Memory
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.on_cpu import UpdatedOnCpu, from_chunks, to_chunks
from jzero.offload.on_device import UpdatedOnDevice
from jzero.offload.param_files import ParamFiles
from jzero.offload.piece import Piece
from jzero.offload.pieces import AbstractPieces
from jzero.offload.programs import (
    Kind,
    accumulated_gradients,
    gradients_memory,
    gradients_program,
    kind_of,
    name_of,
    publish_program,
    update_arguments,
    update_program,
)
from jzero.offload.stream import Group, Stream, Updater
from jzero.offload.tiers import InHostMemory, Stays, Tier
from jzero.optim import Optimizer
from jzero.placement import Offload
from jzero.step import TrainState
from jzero.zero import Path


def streamed(
    offload: Offload,
    files: ParamFiles,
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
        files: of parameters, which are laid out here.
        optimizer: of all parameters.
        clip_norm: largest global norm of the gradient; infinite for none.
        state, batch: abstract, with shardings.
        born: makes a new train state with the state of an optimizer; not jitted.
        options: of the compiler, for programs with collectives.

    Raises:
        SeparationError: an optimizer that cannot be run in groups.
    """
    in_groups = InGroups.of(optimizer, gradients.trained_layouts, state)
    mesh, cuts = in_groups.mesh, in_groups.groups(offload.group_size)
    programs = {kind: update_program(in_groups, kind, options) for kind in dict.fromkeys(map(kind_of, cuts))}
    updater, ways = _updater(offload, in_groups, programs), _ways(offload)
    files.lay_out(offload.dir, state, cuts, offload.group_size, *ways)
    groups = [
        Group(
            own,
            in_groups.nbytes(own),
            0 if offload.update == "cpu" else in_groups.nbytes(own),
            tier,
            tuple(in_groups.in_files(own)),
            files.tier(k),
            arrival(in_groups, own),
            updater(own),
        )
        for k, (own, tier) in enumerate(zip(cuts, _tiers(offload, in_groups, cuts), strict=True))
    ]
    first = gradients_program(in_groups, gradients, clip_norm, files.entered(state), batch, options)
    last = publish_program(in_groups, gradients, options) if in_groups.published else None
    examples = {kind_of(own): own for own in cuts}
    updates = {
        f"update {name_of(kind)}": (program, update_arguments(in_groups, examples[kind]))
        for kind, program in programs.items()
    }
    accumulated = accumulated_gradients(in_groups, gradients)
    arrivals = {
        f"gradients of {name_of(kind)}": arrival_program(in_groups, own, accumulated) for kind, own in examples.items()
    }
    memory = Memory(gradients_memory(in_groups, gradients))
    return Driver(
        init=functools.partial(new_state, in_groups, groups, files, state, born),
        step=Stream(in_groups, groups, in_mesh(mesh, first[0]), last and in_mesh(mesh, last[0]), memory, files),
        state=files.at_rest(dataclasses.replace(state, opt_state=_at_rest(in_groups, groups))),
        programs={"gradients": first, **arrivals, **updates, **({"publish": last} if last else {})},
        elsewhere_bytes=_elsewhere_bytes(groups),
        file_bytes=files.nbytes
        + max((group.tier.nbytes for group in groups if isinstance(group.tier, InFiles)), default=0),
        entered=files.entered,
        finished=files.finished,
        close=functools.partial(_close, groups, files),
    )


def _updater(offload: Offload, groups: InGroups, programs: Mapping[Kind, Any]) -> Callable[[tuple[Cut, ...]], Updater]:
    if offload.update == "cpu":
        of_chunks: dict[Path, Any] = {}
        return lambda own: UpdatedOnCpu(groups, own, of_chunks)
    return lambda own: UpdatedOnDevice(groups, own, programs[kind_of(own)])


def _tiers(offload: Offload, groups: InGroups, cuts: Sequence[tuple[Cut, ...]]) -> list[Tier]:
    """Where each group rests."""
    on_cpu = offload.update == "cpu"
    in_memory = Stays("host", _in_chunks) if on_cpu else InHostMemory()
    on_device = Stays("device", _on_device)
    memory: dict[str, Tier] = {"none": on_device, "device": on_device, "host": in_memory}
    if offload.optimizer in memory:
        return [memory[offload.optimizer]] * len(cuts)
    filled = itertools.accumulate(map(groups.nbytes, cuts))
    stays = [total <= offload.host_bytes for total in filled]
    leaves = jax.tree.leaves(groups.opt_state)
    places = {
        k: [_place(k, i, Piece(leaves[i], cut)) for i, cut in groups.cuts(own)]
        for k, own in enumerate(cuts)
        if not stays[k]
    }
    files = InFiles(
        offload.dir,
        f"optimizer state of process {jax.process_index()} of {jax.process_count()}",
        places,
        *_ways(offload),
    )
    return [in_memory if stay else files for stay in stays]


def _ways(offload: Offload) -> tuple[Any, Any]:
    """From files to the update and back."""
    return (to_chunks, from_chunks) if offload.update == "cpu" else (to_device, from_device)


def _in_chunks(piece: Piece, shards: Sequence[np.ndarray]) -> Any:
    return to_chunks(piece, shards, Copies())


def _on_device(piece: Piece, shards: Sequence[np.ndarray]) -> Any:
    return jax.block_until_ready(to_device(piece, shards, Copies()))


def _at_rest(in_groups: InGroups, groups: Sequence[Group]) -> Any:
    """The optimizer state, abstract, with where each piece of it rests."""
    leaves, treedef = jax.tree.flatten(in_groups.opt_state)
    found: dict[int, list[tuple[Cut, Any]]] = {}
    for k, group in enumerate(groups):
        for number, (i, cut) in enumerate(in_groups.cuts(group.cuts)):
            found.setdefault(i, []).append((cut, functools.partial(group.tier.fill, k, number, Piece(leaves[i], cut))))
    rest = [AbstractPieces(x, *zip(*found[i], strict=True)) if i in found else x for i, x in enumerate(leaves)]
    return treedef.unflatten(rest)


def _place(group: int, leaf: int, piece: Piece) -> Place:
    """A piece in blocks, one for each shard."""
    return Place(piece, tuple(f"group {group} leaf {leaf} shard {number}" for number, _ in enumerate(piece.regions)))


def _close(groups: Sequence[Group], files: ParamFiles) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(files.close)
        for tier in {id(group.tier): group.tier for group in groups}.values():
            if isinstance(tier, InFiles):
                stack.callback(tier.close)


def _elsewhere_bytes(groups: Sequence[Group]) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in (group for group in groups if group.tier.name != "device"):
        found[group.tier.name] = found.get(group.tier.name, 0) + group.nbytes
    return found
