"""When a step holds most of a device: each of its programs, with what else lies on the device meanwhile."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

import jzero
from jzero import hlo
from jzero.offload.stream import Stream
from jzero.plan.programs import Programs, on_cpu, state_in_flight, update_of
from jzero.plan.tiers import shard_bytes, tiers_of
from jzero.zero import Path


@dataclass(frozen=True)
class Moment:
    """One run of a program.

    Attributes:
        program: its name.
        lying_bytes: of all that is on the device when it begins: its arguments and what other programs need or left.
        in_flight_bytes: of these, optimizer state that is there for its update.
        more_bytes: what it adds at its most: temporaries, and results that take no argument's place.
    """

    program: str
    lying_bytes: int
    in_flight_bytes: int
    more_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.lying_bytes + self.more_bytes


def moments(run: jzero.Run, stream: Stream, programs: Programs, fetched_bytes: int) -> Iterator[Moment]:
    """All programs of a step whose optimizer runs in groups, in the order in which they run.

    Args:
        fetched_bytes: of parameters that come from the host during the passes and are in no program, as of absent
            devices.
    """
    more = {name: _more(program) for name, program in programs.compiled.items()}
    always = tiers_of(run)["device"] + sum(map(shard_bytes, jax.tree.leaves(run.abstract_batch)))
    yield Moment("gradients", always, 0, more["gradients"] + fetched_bytes)
    own = stream.optimizer
    grads = {path: shard_bytes(own.param(path), own.sharding(path), jnp.float32) for path in own.layouts}
    shards = sum(shard_bytes(own.param(path), own.sharding(path)) for path in own.published)
    last = {cut.path: k for k, group in enumerate(stream.groups) for cut in group.cuts}
    for k, group in enumerate(stream.groups):
        left = sum(size for path, size in grads.items() if last[path] >= k)
        flying = state_in_flight(stream, k)
        name, pieces = update_of(group), sum(math.prod(cut.shape) for cut in group.cuts)
        # The host's update takes a piece of gradients from the device, and gives one of parameters.
        adds = 12 * pieces if on_cpu(group) else more[name]
        yield Moment("update on the host" if on_cpu(group) else name, always + shards + left + flying, flying, adds)
    if own.published:
        yield Moment("publish", always + shards, 0, more["publish"])


def _more(program: jax.stages.Compiled) -> int:
    found = hlo.memory(program)
    return max(0, found.peak_bytes - found.argument_bytes)


def fetched_bytes(run: jzero.Run) -> int:
    """The most of parameters from the host that passes have on the device: two layers of each stack, and of all else
    the largest.

    Of devices that are here the compiler says it.
    """
    state = run.abstract_state
    given = flatten_dict(state.params) | flatten_dict(state.frozen)
    layers, lone = 0, 0
    for path in run.params_on_host():
        nbytes, depth = shard_bytes(given[path]), _layers(run, path, given[path])
        layers += 2 * nbytes // depth if depth > 1 else 0
        lone = max(lone, nbytes if depth == 1 else 0)
    return layers + lone


def _layers(run: jzero.Run, path: Path, x: Any) -> int:
    """How many layers are stacked in a parameter."""
    layer: Any = flatten_dict(run.per_layer).get(path)
    return max(1, x.size // layer.size) if layer is not None else 1
