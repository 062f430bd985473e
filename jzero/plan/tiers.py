"""Where what a run keeps from step to step rests, by class and tier."""

import math
from typing import Any

import jax

import jzero
from jzero.zero import shard_bytes

# Class of an optimizer's array by the name under which optax, or jzero, keeps it.
_OPTIMIZER = {"master": "master", "mu": "m", "trace": "m", "nu": "v", "average": "average of the weights"}


def tiers_of(run: jzero.Run) -> dict[str, int]:
    """Bytes of one device's part of the train state, counters included, by where they rest, with what gradients take of
    host memory.
    """
    tiers = {"device": sum(map(shard_bytes, counters(run.abstract_state))), "host": run.host_grads_bytes()}
    for found in run.tier_bytes().values():
        for tier, nbytes in found.items():
            tiers[tier] = tiers.get(tier, 0) + nbytes
    return tiers


def elsewhere_of(run: jzero.Run) -> dict[str, dict[str, int]]:
    """Class -> tier -> bytes that rest outside of the device."""
    rest = run.tier_bytes()
    found = {
        name: {tier: nbytes for tier, nbytes in rest[key].items() if tier != "device"}
        for name, key in (("parameters", "params"), ("frozen", "frozen"))
    }
    found["gradients"] = {"host": nbytes} if (nbytes := run.host_grads_bytes()) else {}
    if run.stream is None:
        return found
    classes = [class_of(path) for path, _ in jax.tree.leaves_with_path(run.abstract_state.opt_state)]
    leaves = jax.tree.leaves(run.abstract_state.opt_state)
    for group in (group for group in run.stream.groups if group.state.tier.name != "device"):
        for i, cut in run.stream.in_groups.cuts(group.cuts):
            tiers, nbytes = found.setdefault(classes[i], {}), math.prod(cut.shape) * leaves[i].dtype.itemsize
            tiers[group.state.tier.name] = tiers.get(group.state.tier.name, 0) + nbytes
    return found


def class_of(path: tuple[Any, ...]) -> str:
    """The class of an array of the optimizer state."""
    names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
    return next((_OPTIMIZER[name] for name in names if name in _OPTIMIZER), "other optimizer state")


def counters(state: jzero.TrainState) -> tuple[Any, ...]:
    """Those of a train state, which no class has."""
    return state.step, state.skipped, state.skipped_in_row
