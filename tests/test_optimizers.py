"""Optimizers of every kind train the same on shards as on one device, at every stage.

The reference is no jzero at all: one device, the model, the loss and optax, written out.  AdamW hides a gradient that
is eight times too large, so the gradients of the first step are compared leaf by leaf, not losses alone.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import one_device as single
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P

import jzero
from jzero.optim import WithMaster

if jax.device_count() < 8:
    pytest.skip(f"a mesh of dp4 x tp2 needs 8 devices, here are {jax.device_count()}", allow_module_level=True)
MESH = jzero.make_mesh("dp=4,tp=2", jax.devices()[:8])

STEPS, ROWS = 20, 16
V, D, F, LAYERS, CLASSES = 40, 16, 24, 3, 7  # nothing divides the classes' bias
UNSTACKED = {nnx.PARTITION_NAME: None}
CLIP_NORM = 0.1  # below the gradient's norm


def split(*spec: str | None, scale: float = 0.3) -> nnx.Initializer:
    return nnx.with_partitioning(nnx.initializers.normal(scale), spec, eager_sharding=False)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, F, use_bias=False, kernel_init=split(None, "tp"), rngs=rngs)
        self.down = nnx.Linear(F, D, use_bias=False, kernel_init=split("tp", None), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Classifier(nnx.Module):
    """A table, layers that are stacked and scanned, and a head with a bias."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        keys = jax.random.split(rngs.params(), LAYERS)
        self.table = nnx.Embed(V, D, embedding_init=split(None, "tp", scale=1.0), rngs=rngs)
        self.layers = nnx.vmap(lambda key: Block(nnx.Rngs(key)), transform_metadata=UNSTACKED)(keys)
        self.head = nnx.Linear(D, CLASSES, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        body = nnx.remat(lambda block, x: block(x), policy=jzero.remat_policy("none"), prevent_cse=False)
        scan = nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=UNSTACKED)
        return self.head(scan(self.layers, self.table(ids)))


def classifier(dtype: str = "float32") -> Classifier:
    model = Classifier(nnx.Rngs(params=0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model, nnx.Param)))
    return model


def loss_of(model: Classifier, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["ids"]), batch["labels"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def the_batch() -> dict[str, np.ndarray]:
    """One batch for all steps; weights differ from device to device, so a mean of means is not the mean."""
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, V, ROWS, dtype=np.int32), rng.integers(0, CLASSES, ROWS, dtype=np.int32)
    return {"ids": ids, "labels": labels, "weights": np.linspace(0, 1, ROWS, dtype=np.float32)}


# ---- training -------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What to train with; `make` takes the parameters as layers read them."""

    make: Callable[[Any], optax.GradientTransformation]
    clip_norm: float | None = None


def named(name: str, lr: float, **settings: Any) -> Callable[[Any], optax.GradientTransformation]:
    return lambda per_layer: jzero.make_optimizer(name, lr, per_layer, **settings)


# Learning rates at which training is stable, so that rounding is not amplified from step to step.
CASES = {
    "adamw": Case(named("adamw", 2e-3)),
    "lion": Case(named("lion", 1e-3)),
    "adafactor": Case(named("adafactor", 3e-3)),
    "sgd": Case(named("sgd", 0.01)),
    "muon": Case(named("muon", 2e-3)),
    "averaged": Case(lambda per_layer: jzero.averaged(named("sgd", 0.005, nesterov=True)(per_layer), 0.9)),
    "factored adafactor": Case(lambda _: optax.adafactor(3e-3, min_dim_size_to_factor=8)),
    "clipped": Case(named("sgd", 0.1), CLIP_NORM),
}


def per_layer_by_hand() -> Any:
    params = nnx.to_pure_dict(nnx.state(classifier(), nnx.Param))
    return params | {"layers": jax.tree.map(lambda x: x[0], params["layers"])}


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim >= 2 else "vector", params)


# Transformations round others, and those that look at all parameters at once or ask for the loss.
WRAPPED = {
    "chain": Case(lambda _: optax.chain(optax.clip_by_global_norm(0.2), optax.adam(2e-3), optax.ema(0.9))),
    "masked": Case(lambda _: optax.chain(optax.masked(optax.scale_by_adam(), is_matrix), optax.scale(-2e-3))),
    "partition": Case(lambda _: optax.partition({"matrix": optax.lion(1e-3), "vector": optax.adam(2e-3)}, by_rank)),
    "MultiSteps": Case(lambda _: optax.MultiSteps(optax.adam(2e-3), 3).gradient_transformation()),
    "inject_hyperparams": Case(lambda _: optax.inject_hyperparams(optax.adamw)(lambda k: 2e-3 / (k + 1))),
    "apply_if_finite": Case(lambda _: optax.apply_if_finite(optax.adam(2e-3), 3)),
    "lamb": Case(lambda _: optax.lamb(3e-3)),
    "sm3": Case(lambda _: optax.sm3(0.02)),
    "polyak_sgd": Case(lambda _: optax.polyak_sgd(0.05)),
    "reduce_on_plateau": Case(lambda _: optax.chain(optax.adam(2e-3), optax.contrib.reduce_on_plateau(patience=1))),
    "schedule_free": Case(lambda _: optax.contrib.schedule_free_adamw(1e-2)),
}


@functools.cache
def on_one_device(name: str) -> single.Trace:
    case = (CASES | WRAPPED)[name]
    return single.one_device(
        classifier, loss_of, case.make(per_layer_by_hand()), [the_batch()] * STEPS, clip_norm=case.clip_norm
    )


def on_shards(name: str, stage: int) -> single.Trace:
    case, batch = (CASES | WRAPPED)[name], the_batch()
    run = jzero.setup(
        classifier, loss_of, lambda per_layer: single.recording(case.make(per_layer)), MESH, batch,
        stage=stage, micro_batches=2, clip_norm=case.clip_norm,
    )  # fmt: skip
    return single.train(run, [batch] * STEPS)


def check(name: str, stage: int) -> None:
    got, wanted = on_shards(name, stage), on_one_device(name)
    single.assert_equal(got, wanted)
    assert wanted.losses[-1] < 0.9 * wanted.losses[0]  # losses that stand still would agree whatever happens


@pytest.mark.parametrize("name", CASES)
def test_training_on_shards_is_training_on_one_device(name):
    check(name, stage=3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_training_on_shards_is_training_on_one_device_at_the_other_stages(name, stage):
    check(name, stage)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_optimizer_trains_as_on_one_device(name):
    check(name, stage=3)


# ---- what the state holds -------------------------------------------------------------------------------------------


def run_of(stage: int, tx: Any, params: str | None, born: str = "float32") -> jzero.Run:
    precision = jzero.Precision(params=params)
    model_fn = functools.partial(classifier, born)
    return jzero.setup(model_fn, loss_of, tx, MESH, the_batch(), stage=stage, precision=precision)


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("params", "born"), [("bfloat16", "float32"), (None, "bfloat16"), ("float32", "bfloat16")])
def test_moments_and_master_are_float32_whatever_parameters_are(stage, params, born):
    state = run_of(stage, optax.adamw(1e-3), params, born).abstract_state
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(params or born)}
    held = [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    parts = 2 if params == "float32" else 3  # m, v, and the master of what is narrower
    assert len(held) == parts * len(jax.tree.leaves(state.params))
    assert {x.dtype for x in held} == {jnp.dtype("float32")}


@pytest.mark.parametrize("params", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "factored adafactor", "muon", "averaged"])
def test_the_state_is_the_same_tree_at_every_stage_and_only_its_specs_differ(name, params):
    runs = [run_of(stage, CASES[name].make, params) for stage in range(4)]
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), run.abstract_state) for run in runs]
    assert shapes[0] == shapes[1] == shapes[2] == shapes[3]
    specs = [by_path(run.specs.opt_state) for run in runs]
    assert specs[0] != specs[1] == specs[2] == specs[3]
    at_rest = [by_path(run.specs.params) for run in runs]
    assert at_rest[0] == at_rest[1] == at_rest[2] != at_rest[3]
    assert by_path(runs[1].specs.grads) == at_rest[0]
    assert by_path(runs[2].specs.grads) == at_rest[3]


def test_in_bfloat16_a_master_is_born_unrounded_and_steps_below_a_rounding_add_up():
    run = run_of(3, optax.chain(optax.sgd(1e-4), optax.contrib.reduce_on_plateau(patience=100)), "bfloat16")
    born = flatten_dict(nnx.to_pure_dict(nnx.state(classifier())))
    state, losses = run.init(), []
    assert isinstance(state.opt_state, WithMaster)
    start = jax.device_get(flatten_dict(state.opt_state.master))
    for path, value in born.items():  # rounded to bfloat16 it would be off by 2e-3
        np.testing.assert_allclose(start[path], value, rtol=1e-5, err_msg=str(path))
    for _ in range(STEPS):
        state, metrics = run.step(state, the_batch())
        losses.append(float(metrics["loss"]))
    kernel = ("layers", "up", "kernel")
    master, at_rest = (jax.device_get(flatten_dict(x)[kernel]) for x in (state.opt_state.master, state.params))
    np.testing.assert_array_equal(at_rest, master.astype(jnp.bfloat16))
    # Each step is far below half of a bfloat16's last place of nearly every element, so without a master it is lost.
    assert np.mean(master != start[kernel]) > 0.99
    assert np.mean(at_rest == start[kernel].astype(jnp.bfloat16)) > 0.5
    (plateau,) = [x for x in state.opt_state.inner if hasattr(x, "best_value")]
    assert float(plateau.best_value) == min(losses)  # who asks for the loss gets it
