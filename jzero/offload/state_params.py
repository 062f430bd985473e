"""The parameters of a train state, trained and frozen, by path."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.step import TrainState
from jzero.zero import Path


def params_of(state: TrainState) -> dict[Path, Any]:
    """Path -> what the state has there."""
    return {**flatten_dict(state.params), **flatten_dict(state.frozen)}


def with_params(state: TrainState, values: Mapping[Any, Any]) -> TrainState:
    """The state with some values in the places of its parameters."""

    def changed(tree: Any) -> Any:
        flat: dict[Path, Any] = flatten_dict(tree)
        return unflatten_dict({path: values.get(path, x) for path, x in flat.items()})

    return replace(state, params=changed(state.params), frozen=changed(state.frozen)) if values else state


def without_params(state: TrainState, paths: Iterable[Path]) -> TrainState:
    """The state with nothing in their places."""
    return with_params(state, dict.fromkeys(paths))
