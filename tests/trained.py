"""A training and what it left behind, which proofs of offload compare bit for bit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jzero
from jzero.offload.at_rest import on_device
from jzero.offload.state_params import params_of
from jzero.zero import shard_bytes


class Trained(NamedTuple):
    """What a training left behind.

    Attributes:
        losses, norms: of each step.
        evaluated: losses of what was evaluated after the first step.
        params: path -> array after the last step, frozen ones too.
        run, state: to go on with.
    """

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    params: dict[Any, np.ndarray]
    run: jzero.Run
    state: jzero.TrainState


def train(run: jzero.Run, batches: Sequence[Any], evaluate: Sequence[Any] = ()) -> Trained:
    """A training of a new state; steps are not waited for, one after the other."""
    state, seen, evaluated = run.init(), [], []
    for number, batch in enumerate(batches):
        if number == 1:
            evaluated = [run.evaluate(state, rows)["loss"] for rows in evaluate]
        state, metrics = run.step(state, batch)
        seen.append(metrics)
    losses, norms = ([float(metrics[name]) for metrics in seen] for name in ("loss", "grad_norm"))
    return Trained(losses, norms, list(map(float, evaluated)), arrays(state), run, state)


def arrays(state: jzero.TrainState) -> dict[Any, np.ndarray]:
    """Path -> parameter, wherever it rests."""
    return {path: np.asarray(on_device(x)) for path, x in params_of(state).items()}


def assert_same_bits(one: Trained, other: Trained) -> None:
    """Losses, norms and parameters are equal."""
    assert (one.losses, one.norms, one.evaluated) == (other.losses, other.norms, other.evaluated)
    for path, x in other.params.items():
        np.testing.assert_array_equal(one.params[path], x, err_msg=str(path))


def devices(axes: str) -> list[jax.Device]:
    """One for a mesh of one, else all."""
    return jax.devices()[:1] if axes == "dp=1" else jax.devices()


def held(memory_kind: str) -> int:
    """Bytes that all arrays of this process have on one device, in one of its memories."""
    return sum(shard_bytes(x) for x in jax.live_arrays() if x.sharding.memory_kind == memory_kind)


def watched(run: jzero.Run, seen: Callable[[], object]) -> Callable[[jzero.TrainState, Any], Any]:
    """The step of a run, which calls back whenever a group is to be updated."""
    assert run.stream is not None
    groups = [dataclasses.replace(group, updater=_Watching(group.updater, seen)) for group in run.stream.groups]
    return dataclasses.replace(run.stream, groups=groups)


class _Watching:
    """An updater that says when it begins."""

    def __init__(self, updater: Any, seen: Callable[[], object]) -> None:
        self._updater, self._seen = updater, seen

    def update(self, *arguments: Any) -> Any:
        self._seen()
        return self._updater.update(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)
