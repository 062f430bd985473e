"""The step of a run whose optimizer runs in groups: gradients, then one group after the other, then the way to rest.

While group k is updated, group k + 1 is on its way in and group k - 1 on its way out; a fourth waits until the first
has left.  So what the optimizer keeps takes no more of the device than three groups, whatever the model's size.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.pieces import Pieces, leaves_of
from jzero.offload.tiers import Left, Tier
from jzero.pace import in_turn
from jzero.step import Found, Metrics, TrainState

IN_FLIGHT = 3  # groups on the way in, at work and on the way out


@dataclass
class Flow:
    """What of the optimizer's state was under way between rest and update, as the stream counts it.

    Attributes:
        groups: the most at a time, and bytes of one device in them.
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


@dataclass(frozen=True)
class Group:
    """One group.

    Attributes:
        cuts: its pieces.
        nbytes: of state on one device.
        tier: where it rests.
        update: (gradients, parameters, pieces, state of no parameter, found) -> (parameters with new pieces, new
            pieces, state of no parameter, scalars to log).
    """

    cuts: tuple[Cut, ...]
    nbytes: int
    tier: Tier
    update: Callable[..., Any]


@dataclass(frozen=True)
class Stream:
    """The step.

    Attributes:
        optimizer: what its state consists of.
        groups: in the order in which they are updated.
        gradients: jitted `gradients_step`.
        publish: jitted `publish_step`; None where no parameter moves.
        flow: what was under way.
    """

    optimizer: InGroups
    groups: Sequence[Group]
    gradients: Any
    publish: Any
    flow: Flow = field(default_factory=Flow)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step; the parameters and the optimizer state of `state` are used up."""
        after, found, shards = self.gradients(dataclasses.replace(state, opt_state=()), batch)
        in_turn(found.metrics)
        params, published = flatten_dict(state.params), self.optimizer.published
        updating = {**params, **dict(zip(published, shards, strict=True))}
        del shards
        opt_state, report = self._update(found, updating, state.opt_state)
        if published:
            whole = self.publish([updating[path] for path in published], [params[path] for path in published])
            updating |= dict(zip(published, in_turn(whole), strict=True))
        after = dataclasses.replace(after, params=unflatten_dict(updating), frozen=state.frozen, opt_state=opt_state)
        return after, {**found.metrics, **report}

    def _update(self, found: Found, updating: dict[Any, Any], opt_state: Any) -> tuple[Any, Mapping[str, Any]]:
        """All groups, one after the other; `updating` gets the new parameters."""
        leaves, treedef = leaves_of(opt_state), jax.tree.structure(self.optimizer.opt_state)
        none = self.optimizer.numbers(None)
        shared = after_shared = [leaves[i] for i in none]
        grads = dict(zip(self.optimizer.layouts, found.grads, strict=True))
        found.grads.clear()
        last = {cut.path: k for k, group in enumerate(self.groups) for cut in group.cuts}
        places = self._places()
        rest: list[list[Any]] = [[None] * len(getattr(leaf, "parts", ())) for leaf in leaves]
        leaving: deque[tuple[int, Left]] = deque()
        report: Mapping[str, Any] = {}

        def fetch(k: int) -> Any:
            while len(self.flow.in_flight) >= IN_FLIGHT:
                self._gone(leaving)
            self.flow.begins(k, self.groups[k].nbytes)
            return self.groups[k].tier.fetch(k, [leaves[i].parts[j] for i, j in places[k]])

        arriving = fetch(0)
        for k, group in enumerate(self.groups):
            pieces = arriving()
            if k + 1 < len(self.groups):
                arriving = fetch(k + 1)
            paths = [cut.path for cut in group.cuts]
            new, pieces, after_shared, report = group.update(
                [grads[path] for path in paths], [updating[path] for path in paths], pieces, shared, found
            )
            updating |= dict(zip(paths, new, strict=True))
            for path in paths:
                if last[path] == k:
                    del grads[path]
            stored, left = group.tier.store(k, pieces)
            del new, pieces
            leaving.append((k, left))
            for (i, j), part in zip(places[k], stored, strict=True):
                rest[i][j] = part
        while leaving:
            self._gone(leaving)
        for i, x in zip(none, after_shared, strict=True):
            leaves[i] = x
        after = [Pieces(x.whole, x.cuts, parts) if parts else x for x, parts in zip(leaves, rest, strict=True)]
        return treedef.unflatten(after), report

    def _gone(self, leaving: deque[tuple[int, Left]]) -> None:
        """Waits for the group that left first."""
        k, left = leaving.popleft()
        left()
        self.flow.ends(k)

    def _places(self) -> list[list[tuple[int, int]]]:
        """(leaf, piece of it) of everything in each group, in the order of its cuts."""
        counted: dict[int, int] = {}
        places: list[list[tuple[int, int]]] = []
        for group in self.groups:
            numbers = [i for i, _ in self.optimizer.cuts(group.cuts)]
            places.append([(i, counted.get(i, 0)) for i in numbers])
            counted |= {i: counted.get(i, 0) + 1 for i in numbers}
        return places
