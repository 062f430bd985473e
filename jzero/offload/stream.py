"""The step of a run whose optimizer runs in groups: gradients, then one group after the other, then the way to rest.

While group k is updated, group k + 1 is on its way in and group k - 1 on its way out; a fourth waits until the first
has left.  So what the optimizer keeps takes no more of the device than three groups, whatever the model's size.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.offload.arriving import Arrive
from jzero.offload.grads_memory import Memory
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.lanes import Lane, gathered
from jzero.offload.param_reads import ParamReads
from jzero.offload.pieces import leaves_of
from jzero.offload.tiers import Arrived
from jzero.offload.under_way import Flow, UnderWay
from jzero.pace import in_turn
from jzero.step import Found, Metrics, TrainState
from jzero.zero import Path


class Scalars(NamedTuple):
    """What the update of a group takes and gives beside its own arrays.

    Attributes:
        shared: optimizer state that is of no parameter.
        loss, finite: as of `step.Found`.
        report: scalars to log.
    """

    shared: list[Any]
    loss: jax.Array
    finite: jax.Array
    report: Mapping[str, Any]


class Updater(Protocol):
    """How one group is updated, and where."""

    def bring(self, grads: Sequence[jax.Array], params: Mapping[Path, Any]) -> Any:
        """Begins to bring what the update needs beside the state, when the state begins to come.

        Args:
            grads: pieces of the gradients, on the device.
        """
        ...

    def update(
        self,
        brought: Any,
        params: Mapping[Path, Any],
        state: Sequence[Any],
        scalars: Scalars,
    ) -> tuple[dict[Path, Any], list[Any], Scalars]:
        """(parameters with their new pieces, new pieces of the state, scalars after the update).

        Scalars that the host has computed are NumPy's, the same in every process.
        """
        ...

    def settle(self, pieces: Sequence[jax.Array]) -> list[Any]:
        """Pieces of the state on the device, where the update will run."""
        ...


@dataclass(frozen=True)
class Group:
    """One group.

    Attributes:
        cuts: its pieces.
        state: its lane of the optimizer's state, and params that of parameters in files.
        on_cpu: whether the host updates it, so that neither lane comes to the device.
        arrive: brings its pieces of the gradients (`arriving.py`).
        updater: how it is updated.
    """

    cuts: tuple[Cut, ...]
    state: Lane
    params: Lane
    on_cpu: bool
    arrive: Arrive
    updater: Updater

    @property
    def device_bytes(self) -> int:
        """Bytes that come to one device for the update, from wherever they rest."""
        away = (lane.nbytes for lane in (self.state, self.params) if lane.tier.name != "device")
        return 0 if self.on_cpu else sum(away)


@dataclass(frozen=True)
class Stream:
    """The step.

    Attributes:
        in_groups: what the optimizer's state consists of.
        groups: in the order in which they are updated.
        gradients: jitted `gradients_step`.
        publish: jitted `publish_step`; None where no parameter moves.
        memory: for gradients that rest on the host.
        reads: of parameters in files.
        flow: what was under way.
    """

    in_groups: InGroups
    groups: Sequence[Group]
    gradients: Any
    publish: Any
    memory: Memory
    reads: ParamReads
    flow: Flow = field(default_factory=Flow)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step; the parameters and the optimizer state of `state` are used up.

        Raises:
            ValueError: what `state` has in files was overwritten.
            TierError: what rests in files cannot be read or written.
        """
        before = self.reads.entered(dataclasses.replace(state, opt_state=()))
        after, found, shards, free = self.gradients(before, batch, self.memory.take())
        in_turn(found.metrics)
        self.reads.finished(found.metrics)
        params, published = flatten_dict(state.params), self.in_groups.published
        updating = {**params, **dict(zip(published, shards, strict=True))}
        grads = dict(zip(self.in_groups.layouts, found.grads, strict=True))
        self.memory.keep([*free, {path: grads[path] for path in self.in_groups.hosted}])
        found.grads.clear()
        del shards
        opt_state, report = self._update(found, grads, updating, state.opt_state)
        if published:
            whole = self.publish([updating[path] for path in published], [params[path] for path in published])
            updating |= dict(zip(published, in_turn(whole), strict=True))
        after = dataclasses.replace(after, params=unflatten_dict(updating), frozen=state.frozen, opt_state=opt_state)
        return after, {**found.metrics, **report}

    def _update(
        self, found: Found, grads: dict[Path, Any], updating: dict[Any, Any], opt_state: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        """All groups, one after the other; `grads` is used up, `updating` gets the new parameters."""
        leaves, shared = dict(enumerate(leaves_of(opt_state))), self.in_groups.numbers(None)
        resting = leaves | {path: updating.pop(path) for path in self.reads.layers if path in updating}
        before = after = Scalars([leaves[i] for i in shared], found.loss, found.finite, {})
        stored: list[tuple[Lane, list[Any]]] = []

        def fetch(k: int) -> tuple[Any, Arrived, Arrived]:
            group = self.groups[k]
            under_way.begins(k, group.device_bytes)
            state, params = (under_way.comes(lane.fetch(resting)) for lane in (group.state, group.params))
            return group.updater.bring(group.arrive(grads, found.factors), updating), state, params

        def store(k: int, lane: Lane, arrays: Sequence[Any]) -> None:
            parts, left = lane.store(arrays)
            under_way.leaves(k, left)
            stored.append((lane, parts))

        with UnderWay(self.flow) as under_way:
            coming = fetch(0)
            for k, group in enumerate(self.groups):
                brought, pieces, params = coming[0], coming[1](), coming[2]()
                if k + 1 < len(self.groups):
                    coming = fetch(k + 1)
                given = {**updating, **dict(zip(group.params.keys, params, strict=True))}
                new, pieces, after = group.updater.update(brought, given, pieces, before)
                store(k, group.params, [new.pop(path) for path in group.params.keys])
                store(k, group.state, pieces)
                updating |= new
                for path in self.done[k]:
                    del grads[path]
                del brought, new, pieces, params, given
        all_devices = functools.partial(_on_all, found.loss.sharding)
        rest = leaves | dict(zip(shared, map(all_devices, after.shared), strict=True)) | gathered(stored)
        updating |= {path: rest.pop(path) for path in self.reads.layers if path in rest}
        return jax.tree.unflatten(jax.tree.structure(self.in_groups.opt_state), list(rest.values())), {
            name: all_devices(x) for name, x in after.report.items()
        }

    @functools.cached_property
    def done(self) -> list[list[Path]]:
        """The parameters of which each group has the last piece."""
        last = {cut.path: k for k, group in enumerate(self.groups) for cut in group.cuts}
        return [[path for path, of in last.items() if of == k] for k, _ in enumerate(self.groups)]


def _on_all(sharding: jax.sharding.Sharding, x: Any) -> jax.Array:
    """A scalar on all devices; `jax.device_put` would ask the other processes whether theirs is the same."""
    return x if isinstance(x, jax.Array) else jax.make_array_from_callback(x.shape, sharding, lambda _: x)
