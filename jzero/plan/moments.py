"""When a step holds most of a device: each of its programs, with what else lies on the device meanwhile."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jzero
from jzero import hlo
from jzero.offload.groups import Cut
from jzero.offload.stream import Group, Stream
from jzero.plan.programs import Programs, state_in_flight, update_of
from jzero.plan.tiers import tiers_of
from jzero.zero import shard_bytes


@dataclass(frozen=True)
class Moment:
    """One run of a program.

    Attributes:
        program: its name.
        lying_bytes: of all that is on the device when it begins: its arguments and what other programs need or left.
        in_flight_bytes: of these, what is there for its update alone: optimizer state, and parameters in files.
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


def moments(run: jzero.Run, stream: Stream, programs: Programs) -> Iterator[Moment]:
    """All programs of a step whose optimizer runs in groups, in the order in which they run."""
    more = {name: _more(program) for name, program in programs.compiled.items()}
    always = tiers_of(run)["device"] + sum(map(shard_bytes, jax.tree.leaves(run.abstract_batch)))
    yield Moment("gradients", always, 0, more["gradients"])
    own, groups = stream.in_groups, stream.groups
    here = own.layouts.keys() - run.grads_on_host()
    grads = {path: shard_bytes(own.param(path), own.sharding(path), jnp.dtype("float32")) for path in here}
    shards = sum(shard_bytes(own.param(path), own.sharding(path)) for path in own.published)
    left = sum(grads.values())
    for k, group in enumerate(groups):
        arrived = sum(_arrived_bytes(stream, each) for each in groups[k : k + 2])
        flying = state_in_flight(stream, k)
        lying = always + shards + left + arrived + flying
        if group.on_cpu:
            yield Moment("update on the host", lying, flying, _elements_bytes(stream, group))
        else:
            yield Moment(name := update_of(group), lying, flying, more[name])
        left -= sum(grads.get(path, 0) for path in stream.done[k])
    if own.published:
        yield Moment("publish", always + shards, 0, more["publish"])


def _more(program: jax.stages.Compiled) -> int:
    found = hlo.memory(program)
    return max(0, found.peak_bytes - found.argument_bytes)


def _arrived_bytes(stream: Stream, group: Group) -> int:
    """Of what is brought to the update of a group beside its lanes: gradients in float32, and for an update by the
    host a copy of parameters that have no master.
    """
    grads = sum(4 * math.prod(cut.shape) for cut in group.cuts)
    wide = [cut for cut in _on_device(group) if stream.in_groups.params[cut.path].dtype.itemsize >= 4]
    return grads + group.on_cpu * sum(4 * math.prod(cut.shape) for cut in wide)


def _elements_bytes(stream: Stream, group: Group) -> int:
    """Of a group's pieces of the parameters that rest on the device."""
    return sum(math.prod(cut.shape) * stream.in_groups.params[cut.path].dtype.itemsize for cut in _on_device(group))


def _on_device(group: Group) -> list[Cut]:
    in_files = set(group.params.keys)
    return [cut for cut in group.cuts if cut.path not in in_files]
