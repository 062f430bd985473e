"""An offloaded update is that of the optimizer as it is, whatever the optimizer looks at, keeps, or has no need of."""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_decoder import batches
from tiny_stack import stack
from trained import Trained, devices
from trained import train as train_run

import jzero
from jzero.models.decoder import next_token_loss
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.on_cpu import chunk_count
from jzero.offload.pieces import is_pieces, leaves_of

STEPS, ROWS = 3, 8
GROUP = 9_000  # bytes: less than some parameters have, so there are pieces

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")


@pytest.fixture(scope="module")
def data():
    return batches(STEPS, ROWS)


def run_of(data, tx: Any, mesh: str = "dp=1", precision: Any = None, **settings: Any) -> jzero.Run:
    return jzero.setup(
        stack(),
        next_token_loss,
        tx,
        jzero.make_mesh(mesh, devices(mesh)),
        data[0],
        stage=3,
        precision=precision or jzero.Precision(),
        offload=dataclasses.replace(jzero.Offload(group_size=GROUP), **settings),
    )


def train(data, tx: Any, **settings: Any) -> Trained:
    return train_run(run_of(data, tx, **settings), data)


def in_groups(run: jzero.Run) -> InGroups:
    assert run.stream is not None
    return run.stream.in_groups


def cuts(run: jzero.Run) -> list[Cut]:
    assert run.stream is not None
    return [cut for group in run.stream.groups for cut in group.cuts]


def same_training(one: Trained, other: Trained) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-6)
    for path, x in other.params.items():
        np.testing.assert_allclose(one.params[path], x, rtol=1e-4, atol=1e-6, err_msg=str(path))


def matrices_of_layers(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 3, params)


def over_its_size(update: Any, _: Any) -> Any:
    return update / update.size


BY_RANK = optax.adamw(1e-2, weight_decay=1.0, mask=matrices_of_layers)
BY_SIZE = optax.chain(optax.trace(0.9), optax.stateless_with_tree_map(over_its_size), optax.scale(-100.0))


@pytest.mark.parametrize("update", ["device", "cpu"])
def test_an_optimizer_that_asks_for_ranks_trains_the_same_in_pieces(update, data):
    offloaded = train(data, BY_RANK, optimizer="host", update=update)
    same_training(offloaded, train(data, BY_RANK))
    groups = in_groups(offloaded.run)
    assert groups.placewise == groups.params.keys()  # and is cut all the same
    assert any(not cut.whole for cut in cuts(offloaded.run))


def test_an_optimizer_that_asks_for_sizes_gets_whole_parameters(data):
    offloaded = train(data, BY_SIZE, optimizer="host")
    same_training(offloaded, train(data, BY_SIZE))
    assert all(cut.whole for cut in cuts(offloaded.run))


def test_the_cpu_refuses_an_optimizer_that_asks_for_sizes(data):
    with pytest.raises(
        ValueError, match=r"offload.update = cpu: tx does not take parameter '.*' .* looks at its shape"
    ):
        run_of(data, BY_SIZE, optimizer="host", update="cpu")


def by_all_sizes(updates: Any, state: Any, _params: Any = None) -> Any:
    total = sum(x.size for x in jax.tree.leaves(updates))
    return jax.tree.map(lambda u: u / total, updates), state


def only_its_own_shape(updates: Any, state: Any, _params: Any = None) -> Any:
    if {x.shape for x in jax.tree.leaves(updates)} != {(2, 32), (2, 32, 64), (2, 64, 32), (96, 32)}:
        raise ValueError("these are not the parameters of the model")
    return updates, state


@pytest.mark.parametrize(
    "update",
    [
        by_all_sizes,
        only_its_own_shape,
        lambda updates, state, _=None: (updates, state + sum(x.size for x in jax.tree.leaves(updates))),
        lambda updates, state, _=None: (jax.tree.map(lambda u: u * jnp.ones_like(u).sum(), updates), state),
    ],
    ids=["of all", "with an error", "for its state", "in an operation"],
)
def test_however_an_optimizer_asks_for_sizes_it_is_seen(update, data):
    tx = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    groups = in_groups(run_of(data, tx, "dp=4,tp=2", optimizer="host"))
    assert groups.by_shape
    assert groups.by_shape | groups.placewise == groups.params.keys()


CUT = {
    "adamw": optax.adamw(1e-3, weight_decay=0.1),
    "adamw with m in 16 bits": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "lion": lambda per_layer: jzero.make_optimizer("lion", optax.linear_schedule(1e-3, 1e-4, 9), per_layer),
    "sgd": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "averaged": lambda per_layer: jzero.averaged(jzero.make_optimizer("adamw", 1e-3, per_layer), 0.9),
    "adamw with rates in its state": optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-3, 9)),
    "amsgrad": optax.amsgrad(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
}


@pytest.mark.parametrize("update", ["device", "cpu"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CUT)
def test_what_takes_each_element_by_itself_is_cut(name, precision, update, data):
    where = {"optimizer": "host", "update": update}
    groups = in_groups(run_of(data, CUT[name], "dp=4,tp=2", jzero.Precision(params=precision), **where))
    assert groups.placewise == groups.params.keys()


def test_state_of_16_bits_is_updated_on_the_cpu_as_on_the_device(data):
    tx = optax.adamw(1e-2, mu_dtype=jnp.bfloat16)
    on_cpu = train(data, tx, optimizer="host", update="cpu")
    assert jnp.dtype(jnp.bfloat16) in {x.dtype for x in jax.tree.leaves(on_cpu.run.abstract_state.opt_state)}
    same_training(on_cpu, train(data, tx, optimizer="device"))


@pytest.mark.parametrize("tx", [optax.sgd(1e-2), optax.adafactor(1e-2)], ids=["sgd", "adafactor"])
def test_gradients_come_in_groups_for_an_optimizer_that_keeps_little(tx, data):
    run = run_of(data, tx, optimizer="host", group_size=5_000)
    assert run.stream is not None
    groups = run.stream.groups
    assert len(groups) > 3
    whole = [4 * x.size for path, x in in_groups(run).params.items() if path not in in_groups(run).placewise]
    assert max(sum(4 * math.prod(cut.shape) for cut in group.cuts) for group in groups) <= max(5_000, *whole, 0)


@pytest.mark.parametrize(("params", "own"), [("none", 0), ("host", 4)])
def test_a_group_is_as_large_as_all_that_comes_for_it(params, own, data):
    adamw = optax.adamw(1e-3)
    run = run_of(data, adamw, optimizer="host", params=params, min_param_bytes=0)
    elements = [sum(math.prod(cut.shape) for cut in group.cuts) for group in (run.stream.groups if run.stream else [])]
    assert GROUP / 2 < max(elements) * (4 + 8 + own) <= GROUP  # a gradient, m and v, and the parameter


def test_the_state_stays_in_its_chunks_when_the_cores_change(data, monkeypatch):
    def cores(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)

    tx, settings = optax.adamw(1e-2), {"optimizer": "host", "update": "cpu"}
    one = train(data, tx, **settings)
    cores(3 * jax.device_count())
    chunk_count.cache_clear()
    try:
        run = run_of(data, tx, **settings)
        state = run.init()
        cores(5 * jax.device_count())
        state, metrics = run.step(state, data[0])
        losses = [float(metrics["loss"]), float(run.step(state, data[1])[1]["loss"])]
        np.testing.assert_allclose(losses, one.losses[:2], rtol=1e-6)
        parts = [part for leaf in leaves_of(state.opt_state) if is_pieces(leaf) for part in leaf.parts]
        assert max(len(chunks) for part in parts for chunks in part) == 3
    finally:
        chunk_count.cache_clear()
