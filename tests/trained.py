"""A training and what it left behind, which proofs of offload compare bit for bit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict

import jzero
from jzero.offload.at_rest import on_device


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
    params = flatten_dict(state.params) | flatten_dict(state.frozen)
    return {path: np.asarray(on_device(x)) for path, x in params.items()}


def assert_same_bits(one: Trained, other: Trained) -> None:
    """Losses, norms and parameters are equal."""
    assert (one.losses, one.norms, one.evaluated) == (other.losses, other.norms, other.evaluated)
    for path, x in other.params.items():
        np.testing.assert_array_equal(one.params[path], x, err_msg=str(path))


def devices(axes: str) -> list[jax.Device]:
    """One for a mesh of one, else all."""
    return jax.devices()[:1] if axes == "dp=1" else jax.devices()
