"""The step of a run whose optimizer runs in groups: gradients, then one group after the other, then the way to rest.

While group k is updated, group k + 1 is on its way in and group k - 1 on its way out; a fourth waits until the first
has left.  So what the optimizer keeps takes no more of the device than three groups, whatever the model's size.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.offload.arriving import Arrive
from jzero.offload.grads_memory import Memory
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.param_files import ParamFiles
from jzero.offload.pieces import Pieces, leaves_of
from jzero.offload.tiers import Arrived, Left, Tier
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


IN_FLIGHT = 3  # groups on the way in, at work and on the way out


@dataclass
class Flow:
    """What of the optimizer's state was under way between rest and update, as the stream counts it.

    Attributes:
        groups: the most at a time; nbytes, the most of them on one device.
        in_flight: now.
    """

    groups: int = 0
    nbytes: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)

    def begins(self, group: int, nbytes: int) -> None:
        """A group leaves its place of rest."""
        self.in_flight[group] = nbytes
        self.groups = max(self.groups, len(self.in_flight))
        self.nbytes = max(self.nbytes, sum(self.in_flight.values()))

    def ends(self, group: int) -> None:
        """A group is back at rest."""
        del self.in_flight[group]


class UnderWay:
    """The groups of one update that are between rest and update; at its end, however it ends, nothing is."""

    def __init__(self, flow: Flow) -> None:
        """None yet.

        Args:
            flow: is told of each.
        """
        self._flow, self._coming, self._leaving = flow, list[Arrived](), dict[int, list[Left]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            while self._leaving and error is None:
                self._first_is_gone()
        finally:
            # Else a thread would still write what the next state has in the same place.
            for wait in (*self._coming, *itertools.chain(*self._leaving.values())):
                with contextlib.suppress(Exception):  # the first error has been raised
                    wait()
            self._flow.in_flight.clear()

    def begins(self, group: int, nbytes: int) -> None:
        """A group is fetched, when there is room for it beside the one at work."""
        while len(self._leaving) >= IN_FLIGHT - 1:
            self._first_is_gone()
        self._flow.begins(group, nbytes)
        self._coming.clear()  # what came before has arrived

    def comes(self, arrived: Arrived) -> None:
        """Something of the group that is fetched."""
        self._coming.append(arrived)

    def leaves(self, group: int, left: Left) -> None:
        """Something of a group is on its way to rest."""
        self._leaving.setdefault(group, []).append(left)

    def _first_is_gone(self) -> None:
        """Waits for the group that left first."""
        group = next(iter(self._leaving))
        for left in self._leaving[group]:
            left()
        del self._leaving[group]
        self._flow.ends(group)


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
        """(parameters with their new pieces, new pieces of the state, scalars after the update)."""
        ...

    def settle(self, pieces: Sequence[jax.Array]) -> list[Any]:
        """Pieces of the state on the device, where the update will run."""
        ...


@dataclass(frozen=True)
class Group:
    """One group.

    Attributes:
        cuts: its pieces.
        nbytes: of state on one device, and device_bytes of those that the update takes there.
        tier: where it rests.
        in_files, param_tier: pieces of parameters that come and go with it, and where they rest.
        arrive: brings its pieces of the gradients (`arriving.py`).
        updater: how it is updated.
    """

    cuts: tuple[Cut, ...]
    nbytes: int
    device_bytes: int
    tier: Tier
    in_files: tuple[Cut, ...]
    param_tier: Tier
    arrive: Arrive
    updater: Updater


@dataclass(frozen=True)
class Stream:
    """The step.

    Attributes:
        optimizer: what its state consists of.
        groups: in the order in which they are updated.
        gradients: jitted `gradients_step`.
        publish: jitted `publish_step`; None where no parameter moves.
        memory: for gradients that rest on the host.
        files: of parameters.
        flow: what was under way.
    """

    optimizer: InGroups
    groups: Sequence[Group]
    gradients: Any
    publish: Any
    memory: Memory
    files: ParamFiles
    flow: Flow = field(default_factory=Flow)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step; the parameters and the optimizer state of `state` are used up."""
        before = self.files.entered(dataclasses.replace(state, opt_state=()))
        after, found, shards, free = self.gradients(before, batch, self.memory.take())
        in_turn(found.metrics)
        self.files.finished(found.metrics)
        params, published = flatten_dict(state.params), self.optimizer.published
        updating = {**params, **dict(zip(published, shards, strict=True))}
        grads = dict(zip(self.optimizer.layouts, found.grads, strict=True))
        self.memory.keep([*free, {path: grads[path] for path in self.optimizer.hosted}])
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
        files = {path: updating.pop(path) for path in self.files.layers if path in updating}
        leaves, treedef = leaves_of(opt_state), jax.tree.structure(self.optimizer.opt_state)
        none = self.optimizer.numbers(None)
        before = after = Scalars([leaves[i] for i in none], found.loss, found.finite, {})
        last = {cut.path: k for k, group in enumerate(self.groups) for cut in group.cuts}
        places, places_in_files = self._places, self._places_in_files
        rest: list[list[Any]] = [[None] * len(getattr(leaf, "parts", ())) for leaf in leaves]
        params_at_rest = {path: [*x.parts] for path, x in files.items()}

        def fetch(k: int, under_way: UnderWay) -> Any:
            group = self.groups[k]
            under_way.begins(k, group.device_bytes)
            arrived = group.tier.fetch(k, [leaves[i].parts[j] for i, j in places[k]])
            under_way.comes(arrived)
            params = group.param_tier.fetch(k, [files[path].parts[j] for path, j in places_in_files[k]])
            under_way.comes(params)
            return group.updater.bring(group.arrive(grads, found.factors), updating), arrived, params

        with UnderWay(self.flow) as under_way:
            arriving = fetch(0, under_way)
            for k, group in enumerate(self.groups):
                brought, pieces, params = arriving[0], arriving[1](), arriving[2]()
                if k + 1 < len(self.groups):
                    arriving = fetch(k + 1, under_way)
                given = {**updating, **dict(zip((cut.path for cut in group.in_files), params, strict=True))}
                new, pieces, after = group.updater.update(brought, given, pieces, before)
                stored, left = group.param_tier.store(k, [new.pop(cut.path) for cut in group.in_files])
                under_way.leaves(k, left)
                for (path, j), part in zip(places_in_files[k], stored, strict=True):
                    params_at_rest[path][j] = part
                updating |= new
                for path in (cut.path for cut in group.cuts if last[cut.path] == k):
                    del grads[path]
                stored, left = group.tier.store(k, pieces)
                under_way.leaves(k, left)
                del brought, new, pieces, params, given
                for (i, j), part in zip(places[k], stored, strict=True):
                    rest[i][j] = part
        for i, x in zip(none, after.shared, strict=True):
            leaves[i] = x
        updating |= {path: Pieces(x.whole, x.cuts, params_at_rest[path]) for path, x in files.items()}
        state = [Pieces(x.whole, x.cuts, parts) if parts else x for x, parts in zip(leaves, rest, strict=True)]
        return treedef.unflatten(state), after.report

    @functools.cached_property
    def _places(self) -> list[list[tuple[int, int]]]:
        """(leaf, piece of it) of everything in each group, in the order of its cuts."""
        return _numbered([[i for i, _ in self.optimizer.cuts(group.cuts)] for group in self.groups])

    @functools.cached_property
    def _places_in_files(self) -> list[list[tuple[Path, int]]]:
        """(parameter, piece of it) of those in files."""
        return _numbered([[cut.path for cut in group.in_files] for group in self.groups])


def _numbered(groups: Sequence[Sequence[Any]]) -> list[list[tuple[Any, int]]]:
    """Each key with how many times it was there before."""
    counted: dict[Any, int] = {}
    numbered: list[list[tuple[Any, int]]] = []
    for keys in groups:
        numbered.append([(key, counted.get(key, 0)) for key in keys])
        counted |= {key: counted.get(key, 0) + 1 for key in keys}
    return numbered
