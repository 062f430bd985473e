"""From a placement to lanes: where the pieces of each group rest, and in which blocks of which files."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jzero.offload.copies import Copies
from jzero.offload.files import InFiles, from_device, to_device
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.lanes import Lane, lanes
from jzero.offload.on_cpu import from_chunks, to_chunks
from jzero.offload.param_blocks import ParamBlocks
from jzero.offload.param_reads import ParamReads
from jzero.offload.piece import Piece
from jzero.offload.place import Place
from jzero.offload.tiers import InHostMemory, Stays, Tier
from jzero.optim import keeps_average
from jzero.placement import Offload
from jzero.zero import ShardingError

Groups = Sequence[tuple[Cut, ...]]


def state_lanes(offload: Offload, in_groups: InGroups, groups: Groups) -> list[Lane]:
    """The optimizer's state of each group."""
    leaves = jax.tree.leaves(in_groups.opt_state)
    pieces = [[(i, Piece(leaves[i], cut)) for i, cut in in_groups.cuts(group)] for group in groups]
    memory = _memory(offload)
    if offload.optimizer in memory:
        return lanes([memory[offload.optimizer]] * len(groups), pieces)
    filled = itertools.accumulate(map(in_groups.nbytes, groups))
    stays = [total <= offload.host_bytes for total in filled]
    places = {k: [_place(k, *own) for own in pieces[k]] for k, stay in enumerate(stays) if not stay}
    files = InFiles(offload.dir, _owner("optimizer state"), places, *_ways(offload))
    return lanes([memory["host"] if stay else files for stay in stays], pieces)


def param_lanes(offload: Offload, reads: ParamReads, in_groups: InGroups, groups: Groups) -> list[Lane]:
    """The parameters of each group that rest in files; behind those of all groups frozen ones, which none updates.

    Raises:
        ShardingError: the optimizer averages parameters, and programs read those in files alone.
    """
    if reads.layers and keeps_average(in_groups.opt_state):
        raise ShardingError(
            "offload.params nvme with an average of the parameters (optim.ema, jzero.averaged): averages are "
            "evaluated from memory; take offload.params host, or no average"
        )
    blocks = ParamBlocks.of(reads.wholes, reads.layers, groups, offload.group_size)
    places = dict(enumerate(blocks.places))
    files = InFiles(offload.dir, _owner("parameters"), places, *_ways(offload), before_write=reads.forget)
    reads.read_from(functools.partial(blocks.begin_read, files))
    nowhere = Stays("device", lambda *_: None)
    return lanes(
        [files if group else nowhere for group in blocks.places],
        [[(place.piece.cut.path, place.piece) for place in group] for group in blocks.places],
    )


def _memory(offload: Offload) -> dict[str, Tier]:
    """Tiers that are no files, as an update takes pieces from them."""
    on_device = Stays("device", _on_device)
    in_memory = Stays("host", _in_chunks) if offload.update == "cpu" else InHostMemory()
    return {"none": on_device, "device": on_device, "host": in_memory}


def _ways(offload: Offload) -> tuple[Any, Any]:
    """From files to the update and back."""
    return (to_chunks, from_chunks) if offload.update == "cpu" else (to_device, from_device)


def _in_chunks(piece: Piece, shards: Sequence[np.ndarray]) -> Any:
    return to_chunks(piece, shards, Copies())


def _on_device(piece: Piece, shards: Sequence[np.ndarray]) -> Any:
    return jax.block_until_ready(to_device(piece, shards, Copies()))


def _place(group: int, leaf: int, piece: Piece) -> Place:
    """A piece of the optimizer's state, in one block for each shard."""
    return Place(piece, tuple(f"group {group} leaf {leaf} shard {number}" for number, _ in enumerate(piece.regions)))


def _owner(what: str) -> str:
    return f"{what} of process {jax.process_index()} of {jax.process_count()}"
