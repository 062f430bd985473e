"""Whatever a Variable type does to its value, it does to the value in use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import jzero

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="the mesh is for 8 devices")

WIDTH = 16


class Positive(nnx.Param):
    """A parameter that is read as its softplus, as Flax advises: by a type that overloads `get_value`."""

    def get_value(self, **how):
        return jax.nn.softplus(super().get_value(**how))

    @property
    def doubled(self):
        return 2 * self.get_value()


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = Positive(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH)
        self.scale = Positive(jnp.ones((WIDTH,)))

    def __call__(self, x):
        return jnp.tanh(x @ self.w - x @ self.w.T * 0.5) * self.scale[...] + self.scale.doubled * self.w[0]


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stack = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(rngs)
        self.last = Layer(rngs)

    def __call__(self, x):
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
        return self.last(x)


def squares(model, batch):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2), batch["x"].shape[0]


@pytest.fixture(scope="module")
def batch():
    x, y = np.random.default_rng(0).normal(size=(2, 16, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_type_that_overloads_get_value_trains_as_on_one_device(stage, batch):
    graphdef, params = nnx.split(Net(), nnx.Param)
    wanted_loss, grads = jax.value_and_grad(lambda p: squares(nnx.merge(graphdef, p), batch)[0] / 16)(params)

    run = jzero.setup(Net, squares, optax.sgd(1.0), jzero.make_mesh("dp=8", jax.devices()[:8]), batch, stage=stage)
    start = run.init()
    before = {path: np.asarray(x) for path, x in flatten_dict(start.params).items()}
    assert float(run.evaluate(start, batch)["loss"]) == pytest.approx(float(wanted_loss), rel=1e-6)
    end, metrics = run.step(start, batch)

    assert float(metrics["loss"]) == pytest.approx(float(wanted_loss), rel=1e-6)
    for path, grad in nnx.to_flat_state(grads):
        moved = before[path] - np.asarray(flatten_dict(end.params)[path])
        np.testing.assert_allclose(moved, grad.get_raw_value(), rtol=1e-4, atol=1e-6)


def test_part_of_a_state_that_was_used_up_is_refused(batch):
    run = jzero.setup(Net, squares, optax.sgd(1.0), jzero.make_mesh("dp=8", jax.devices()[:8]), batch, stage=3)
    old = run.init()
    new, _ = run.step(old, batch)
    mixed = dataclasses.replace(new, params=old.params)
    for call in (lambda: run.step(mixed, batch), lambda: run.evaluate(mixed, batch), lambda: run.model(mixed)):
        with pytest.raises(ValueError, match="was given to an earlier step"):
            call()
