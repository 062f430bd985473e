"""What jzero cannot run is refused before a step runs, with the culprit, the place and the remedy.

Everything here fails in `setup`, which makes no array, but for batches and states that are only seen later.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import one_device as single
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
D = 8
HERE = r"test_refusals\.py:\d+"


def batch(rows: int = 8) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, D), np.float32), "y": np.zeros((rows, D), np.float32)}


def squares(model, batch):
    error = model(batch["x"]) - batch["y"]
    return jnp.sum(error * error), error.size


class Net(nnx.Module):
    """Its forward pass is `call`."""

    def __init__(self, call):
        self.linear = nnx.Linear(D, D, rngs=nnx.Rngs(0))
        self.bias = nnx.Param(jnp.zeros(D))
        self.mean = nnx.Variable(jnp.zeros(()))
        self.call = call

    def __call__(self, x):
        return self.call(self, x)


def net(call=lambda net, x: net.linear(x) + net.bias):
    return lambda: Net(call)


def setup(model_fn=None, loss_fn=squares, mesh="dp4", rows=8, **kwargs):
    on = single.mesh(mesh) if isinstance(mesh, str) else mesh
    return jzero.setup(model_fn or net(), loss_fn, optax.sgd(0.1), on, kwargs.pop("batch", batch(rows)), **kwargs)


def refused(*words, error=ValueError):
    """In one error, these patterns in this order."""
    return pytest.raises(error, match=re.compile(".*".join(words), re.DOTALL))


# Sharding constraints in the model


def constrain(spec):
    return net(lambda net, x: jax.lax.with_sharding_constraint(net.linear(x), spec))


@pytest.mark.parametrize("spec", [P("dp"), P(("node", "dp")), P(None, "node")])
def test_a_constraint_over_data_parallel_axes(spec):
    words = ("sharding constraint", HERE, "'node', 'dp'", "constrain over 'tp' alone")
    with refused(*words, error=jzero.UnsupportedModelError):
        setup(constrain(spec), mesh="node2dp2")


@pytest.mark.parametrize("place", [jax.lax.with_sharding_constraint, jax.device_put])
def test_a_constraint_that_names_its_mesh(place):
    sharding = NamedSharding(single.mesh(), P("dp"))
    with refused("sharding constraint", HERE, "constrain over 'tp' alone", error=jzero.UnsupportedModelError):
        setup(net(lambda net, x: place(net.linear(x), sharding)), rows=32)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_constraint_over_tp_alone_works(stage):
    run, plain = (setup(m, mesh="dp2tp2", stage=stage) for m in (constrain(P(None, "tp")), net()))
    losses = [float(r.step(r.init(), batch())[1]["loss"]) for r in (run, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


# Stacked layers


class Stacked(nnx.Module):
    def __init__(self, layer):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))(nnx.Rngs(0).split(4))
        self.layer = layer

    def __call__(self, x):
        return nnx.scan(self.layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def in_branch(layer, x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(layer(x)), lambda x: x, x)


def stacked(layer):
    return lambda: Stacked(layer)


def penalised(model, batch):
    total, weight = squares(model, batch)
    return total + weight * jnp.sum(model.layers.kernel[...] ** 2), weight


def penalised_raw(model, batch):
    total, weight = squares(model, batch)
    return total + weight * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))), weight


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stacked_parameter_read_in_a_branch_of_the_layer_loop(stage):
    with refused(
        "'layers/(bias|kernel)'", r"\(4, 8", "cond", HERE, "zero.replicate", error=jzero.UnsupportedModelError
    ):
        setup(stacked(in_branch), stage=stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stacked_parameter_that_something_takes_raw(stage):
    with refused("'layers/", "stacked", HERE, "zero.replicate", error=jzero.UnsupportedModelError):
        setup(stacked(lambda layer, x: layer(x)), penalised_raw, stage=stage)


def test_a_stacked_parameter_that_is_read_whole():
    with refused("'layers/kernel'", r"\(4, 8, 8\)", HERE, "zero.replicate", error=jzero.UnsupportedModelError):
        setup(stacked(lambda layer, x: layer(x)), penalised, stage=3)


@pytest.mark.parametrize("loss_fn", [squares, penalised, penalised_raw])
def test_the_remedy_that_is_named_works_and_lower_stages_need_none(loss_fn):
    losses = []
    for stage, zero in ((0, jzero.Zero()), (1, jzero.Zero()), (3, jzero.Zero(replicate=("layers/*",)))):
        run = setup(stacked(in_branch), loss_fn, stage=stage, zero=zero)
        state, first = run.step(run.init(), batch())
        losses.append([float(first["loss"]), float(run.step(state, batch())[1]["loss"])])
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)


# What a loss returns


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda s, n: s / n, ["an array of shape \\(\\)", "mean over a batch"]),
        (lambda s, n: [s, n], ["returned a list"]),
        (lambda s, n: (s, n, {}, {}), ["a tuple of 4"]),
        (lambda s, n: (s * jnp.ones(2), n), ["'loss' has the shape \\(2,\\)", "sum it"]),
        (lambda s, n: (s, n * jnp.ones((2, 1))), ["'weight' has the shape \\(2, 1\\)"]),
        (lambda s, n: (s, n, s), ["third value is an array"]),
        (lambda s, n: (s, n, {"loss": s}), ["names .'loss'., which metrics have anyway"]),
        (lambda s, n: (s, n, {"grad_norm": s}), ["names .'grad_norm'., which metrics have anyway"]),
        (lambda s, n: (s, n, {"hits": jnp.ones(3)}), ["'hits' has the shape \\(3,\\)"]),
        (lambda s, n: (s, n, {"nested": {"a": s}}), ["'nested' is a dict"]),
        (lambda s, n: (s + 1j, n), ["'loss' is an array of shape \\(\\) and dtype complex64"]),
        (lambda s, n: (s, None), ["'weight' is a NoneType"]),
    ],
)
def test_a_loss_that_is_not_sums(result, words):
    def loss_fn(model, batch):
        return result(*squares(model, batch))

    with refused("loss_fn", HERE, "sum of losses, weight", *words, error=TypeError):
        setup(loss_fn=loss_fn)


def test_an_error_of_the_users_own_stays_as_it_is():
    with refused("dot_general requires contracting dimensions", error=TypeError):
        setup(net(lambda net, x: net.linear(x[:, :3])))


# Batches


@pytest.mark.parametrize(("rows", "micro_batches"), [(6, 1), (8, 3), (0, 1), (4, 2)])
def test_a_batch_that_does_not_divide(rows, micro_batches):
    product = f"4 x {micro_batches} = {4 * micro_batches}"
    with refused(f"batch of {rows}", "node x dp = 4", f"{micro_batches} microbatches", product):
        setup(rows=rows, micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("leaf", "shown"),
    [(np.float32(1), "none"), (1.0, "none"), ("text", "none"), (np.ones((4, 2)), "4"), ([[1.0]] * 8, "none")],
)
def test_a_batch_whose_leaves_have_no_common_first_dim(leaf, shown):
    with refused("same first dim", f"'extra'.*: {shown}"):
        setup(batch=batch() | {"extra": leaf})


def test_a_batch_that_divides_by_the_devices_but_not_by_the_microbatches_of_the_run():
    run = setup(micro_batches=2)
    with refused("batch of 4", "4 x 2 = 8"):
        run.step(run.init(), batch(4))


def test_nested_batches_of_any_dtype_are_taken():
    nested = (batch(), [{"wide": np.ones((8, D)), "tokens": np.arange(8), "none": None}])

    def loss_fn(model, batch):
        first, (second,) = batch
        total, weight = squares(model, first)
        assert second["wide"].dtype == jnp.float32
        assert second["tokens"].dtype == jnp.int32
        return total + jnp.sum(model(second["wide"])) + jnp.sum(second["tokens"]), weight

    run = setup(loss_fn=loss_fn, batch=nested)
    state, metrics = run.step(run.init(), nested)
    wanted = loss_fn(Net(net()().call), jax.tree.map(jnp.asarray, nested))
    np.testing.assert_allclose(metrics["loss"], wanted[0] / wanted[1], rtol=1e-5)
    run.evaluate(state, nested)


# Models


def test_a_linen_module_is_told_how_to_be_wrapped():
    with refused("Dense", r"ToNNX\(module, rngs=nnx.Rngs\(0\)\).lazy_init\(example_input\)", error=TypeError):
        setup(lambda: linen.Dense(D))


def test_a_wrapped_linen_module_without_parameters_yet():
    with refused("no floating-point parameter", "lazy_init"):
        setup(lambda: nnx.bridge.ToNNX(linen.Dense(D), rngs=nnx.Rngs(0)))


def test_a_model_instead_of_a_function_that_makes_one():
    with refused("model_fn is a Net", "lambda", error=TypeError):
        setup(net()())


def test_a_filter_that_selects_nothing():
    with refused("trainable=.*LoRAParam", "no floating-point parameter"):
        setup(trainable=nnx.LoRAParam)


def test_a_model_function_that_makes_another_model_each_time():
    sizes = iter((D, 2 * D, 3 * D))
    with refused("model_fn", "another model", "'bias'", r"\(8,\) and then \(16,\)"):
        setup(lambda: nnx.Linear(D, next(sizes), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": jnp.ones(D)}, ["holds a dict", "its own nnx.Param"]),
        (jnp.ones(D, jnp.complex64), ["complex64", "two parameters"]),
    ],
)
def test_a_parameter_that_is_not_one_real_array(value, words):
    class Model(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(value)

    with refused("'weight'", *words, error=jzero.UnsupportedModelError):
        setup(Model)


def assign(net, x):
    net.bias[...] = jnp.ones(D)
    return net.linear(x) + net.bias


def assign_whole(net, x):
    net.bias.set_value(jnp.ones(D))
    return net.linear(x) + net.bias


def update(net, x):
    nnx.update(net, jax.tree.map(lambda p: 0.9 * p, nnx.state(net, nnx.Param)))
    return net.linear(x) + net.bias


def replace(net, x):
    net.bias = nnx.Param(jnp.ones(D))
    return net.linear(x) + net.bias


def normalise(net, x):
    return nnx.WeightNorm(net.linear, use_scale=False, rngs=nnx.Rngs(0))(x)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (assign, ["'bias'", HERE + r" \(assign\)"]),
        (assign_whole, ["'bias'", HERE + r" \(assign_whole\)"]),
        (normalise, ["'linear/kernel'", HERE]),
        (update, ["'bias'|'linear/bias'"]),
        (replace, ["'bias'"]),
    ],
)
def test_a_parameter_that_the_loss_assigns_to(call, words, stage):
    with refused(
        *words, "parameters change by the optimizer alone", "nnx.BatchStat", error=jzero.UnsupportedModelError
    ):
        setup(net(call), stage=stage)


def reshape_state(net, x):
    net.mean.set_value(jnp.mean(x, 0))
    return net.linear(x)


def delete_state(net, x):
    del net.mean
    return net.linear(x)


@pytest.mark.parametrize(
    ("call", "words"),
    [(reshape_state, [r"shape \(\) before", r"\(8,\) after"]), (delete_state, ["is deleted"])],
)
def test_state_that_cannot_be_carried_to_the_next_step(call, words):
    with refused("'mean'", *words, error=jzero.UnsupportedModelError):
        setup(net(call))


# Annotations


def annotated(names, shape=(D, D)):
    class Model(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(shape), out_sharding=names)

        def __call__(self, x):
            return x @ self.weight[:, :D]

    return Model


@pytest.mark.parametrize(
    ("names", "shape", "words"),
    [
        ((None, "model"), (D, D), ["'model'", "no axis of the mesh", "logical"]),
        (("dp", None), (D, D), ["data-parallel axis 'dp'", "'tp'"]),
        ((None, ("node", "tp")), (D, D), ["data-parallel axis 'node'"]),
        ((None, "tp"), (D, D + 1), ["dim 1 of size 9", "tp=2"]),
        (("tp", "tp"), (D, D), ["'tp' is named twice"]),
        ((None, None, "tp"), (D, D), ["3 axes", "one per dim"]),
    ],
)
def test_an_annotation_that_cannot_be_followed(names, shape, words):
    with refused("'weight'", re.escape(str(shape)), *words):
        setup(annotated(names, shape), mesh="dp2tp2")


# Settings


@pytest.mark.parametrize("stage", [4, -1, "3", None])
def test_a_stage_that_is_none(stage):
    with refused(f"stage {stage!r}", "0, 1, 2, 3"):
        setup(stage=stage)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "bool"])
@pytest.mark.parametrize("name", ["params", "grads", "reduce"])
def test_a_precision_that_is_no_floating_dtype(name, dtype):
    with refused(f"precision.{name}='{dtype}'", "bfloat16"):
        jzero.Precision(**{name: dtype})


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"micro_batches": 0}, ["micro_batches=0"]),
        ({"micro_batches": 2.0}, ["micro_batches=2.0", "whole number"]),
        ({"clip_norm": 0.0}, ["clip_norm=0.0", "positive"]),
        ({"clip_norm": float("nan")}, ["clip_norm=nan"]),
    ],
)
def test_numbers_that_make_no_sense(kwargs, words):
    with refused(*words):
        setup(**kwargs)


def test_a_pattern_that_matches_nothing():
    with refused("zero.replicate", "'linear/kernels'", "linear/kernel"):
        setup(zero=jzero.Zero(replicate=("linear/kernels",)))


def test_a_pattern_that_is_no_tuple_and_an_axis_that_zero_cannot_use():
    with refused("zero.replicate", "'linear'", error=TypeError):
        jzero.Zero(replicate="linear")
    with refused("zero.axes", "'tp'", "'node', 'dp'"):
        jzero.Zero(axes=("tp",))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: Mesh(d, ("data",)), ["'data'", "'node', 'dp', 'tp'", "make_mesh"]),
        (lambda d: Mesh(d.reshape(4, 1), ("dp", "tp")), ["'dp', 'tp'", "make_mesh"]),
        (
            lambda d: Mesh(d.reshape(1, 4, 1), ("node", "dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 3),
            ["Explicit", "Auto"],
        ),
    ],
)
def test_a_mesh_that_jzero_cannot_use(make, words):
    with refused(*words):
        setup(mesh=make(np.array(jax.devices()[:4])))


# Train states


def test_a_train_state_that_a_step_has_used_up():
    run = setup()
    state = run.init()
    run.step(state, batch())
    for again in (run.step, run.evaluate):
        with refused("earlier step", "use what step returned"):
            again(state, batch())


def test_optimizer_state_that_follows_no_parameter_is_noted():
    big = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def loss_fn(model, batch):
        return jnp.sum(model(batch) ** 2), batch.shape[0]

    def made(tx, stage):
        return jzero.setup(lambda: nnx.clone(big), loss_fn, tx, single.mesh("dp4"), jnp.ones((8, 64)), stage=stage)

    (note,) = made(optax.flatten(optax.adam(1e-3)), 3).notes
    assert "2 arrays of the optimizer state, 33,280 bytes, have the shape of no parameter" in note
    assert made(optax.flatten(optax.adam(1e-3)), 0).notes == ()
    assert made(optax.adam(1e-3), 3).notes == ()
