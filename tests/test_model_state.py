"""What a model holds beside parameters, evaluation, and steps whose gradient is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import one_device as single
import optax
import pytest
from flax import nnx

import jzero

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
D, ROWS = 8, 32


def batches(count: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {name: rng.normal(size=(ROWS, D)).astype(np.float32) for name in "xy"} | {"weight": np.ones(ROWS, np.float32)}
        for _ in range(count)
    ]


def squares(model, batch):
    """Every row has a weight: the tokens that count in it."""
    error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"])


class Net(nnx.Module):
    """Dropout and batch norm round a tensor-parallel layer."""

    def __init__(self, rngs, rate=0.5, remat=False):
        init = nnx.with_partitioning(nnx.initializers.normal(0.3), (None, "tp"))
        self.up = nnx.Linear(D, 2 * D, use_bias=False, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * D, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        def hidden(net, x):
            return net.dropout(jnp.tanh(net.norm(net.up(x))))

        return self.down((nnx.remat(hidden) if self.remat else hidden)(self, x))


def net(**kwargs):
    return lambda: Net(nnx.Rngs(0), **kwargs)


def setup(model_fn=None, tx=None, mesh="dp4", **kwargs):
    return jzero.setup(model_fn or net(), squares, tx or optax.adamw(1e-2), single.mesh(mesh), batches()[0], **kwargs)


def bits(tree) -> list[bytes]:
    def host(x):
        return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return [host(x).tobytes() for x in jax.tree.leaves(tree)]


# Dropout


class Mask(nnx.Module):
    """Its output is its dropout mask."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones((D, 2 * D)), out_sharding=(None, "tp"))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.ones_like(x) @ self.scale) > 0


def mask_sums(model, batch):
    """The mask of every row, as a number of 16 bits among the sums."""
    codes = jnp.sum(model(batch["x"]) * 2.0 ** jnp.arange(2 * D), axis=-1)
    rows = {f"row{row}": jnp.sum(jnp.where(batch["row"] == row, codes, 0)) for row in range(ROWS)}
    return 0.0 * jnp.sum(model.scale[...]), jnp.float32(1), rows


def masks(mesh: str, devices: int, steps: int = 1, micro_batches: int = 1) -> list[list[int]]:
    batch = {"x": np.ones((ROWS, D), np.float32), "row": np.arange(ROWS)}
    where = jzero.make_mesh(mesh, jax.devices()[:devices])
    run = jzero.setup(lambda: Mask(nnx.Rngs(0)), mask_sums, optax.sgd(0.0), where, batch, micro_batches=micro_batches)
    state, found = run.init(), []
    for _ in range(steps):
        state, metrics = run.step(state, batch)
        found.append([int(metrics[f"row{row}"]) for row in range(ROWS)])
    return found


def test_dropout_masks_differ_over_data_parallel_devices_microbatches_and_steps():
    found = np.array(masks("node=2,dp=2", 4, steps=2, micro_batches=2))
    assert len(set(found.ravel())) == 2 * ROWS
    assert ((found > 0) & (found < 2 ** (2 * D) - 1)).all()


def test_dropout_masks_agree_over_tp():
    assert masks("dp=2,tp=2", 4) == masks("dp=2", 2)


def test_dropout_is_the_same_with_and_without_remat():
    found = []
    for remat in (False, True):
        run = setup(net(remat=remat), tx=single.recording(optax.sgd(0.1)), stage=3, micro_batches=2)
        found.append(single.train(run, batches()))
    single.assert_equal(found[1], found[0], rtol=1e-6)


# Batch statistics, keys, counters


@pytest.mark.parametrize(("mesh", "stage", "micro_batches"), [("dp4", 1, 2), ("dp2tp2", 3, 2)])
def test_batch_statistics_are_the_average_of_one_device_on_each_slice(mesh, stage, micro_batches):
    tx = optax.sgd(0.1)
    run = setup(tx=single.recording(tx), mesh=mesh, stage=stage, micro_batches=micro_batches)
    devices = run.mesh.shape["node"] * run.mesh.shape["dp"]
    got = single.train(run, batches())
    wanted = single.one_device(net(), squares, tx, batches(), devices=devices, micro_batches=micro_batches)
    single.assert_equal(got, wanted)
    for path in (("norm", "mean"), ("norm", "var")):
        assert (wanted.state[path] != single.arrays(run.init().model_state)[path]).all()
        np.testing.assert_allclose(got.state[path], wanted.state[path], rtol=1e-5, atol=1e-7)


class OwnState(nnx.Module):
    """State of the user's own: a key that is split at each call, counters, a flag, 16-bit floats, a table."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(D))
        self.key = nnx.Variable(jax.random.key(0))
        self.positive = nnx.Variable(jnp.zeros((), jnp.int32))
        self.called = nnx.Variable(jnp.array(False))
        self.mean = nnx.Variable(jnp.zeros((), jnp.float32))
        self.table = jnp.linspace(0, 1, D) / 3

    def __call__(self, x):
        self.key[...], now = jax.random.split(self.key[...])
        self.positive[...] += jnp.sum(x > 0)
        self.called[...] = True
        self.mean[...] = jnp.mean(x).astype(jnp.bfloat16)
        return x * self.scale + self.table + jax.random.normal(now, x.shape)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_state_of_the_users_own_moves_on_and_agrees_over_devices(micro_batches):
    run = setup(OwnState, tx=optax.sgd(0.0), micro_batches=micro_batches)
    batch, state = batches()[0], run.init()
    table = np.asarray(state.model_state["table"])
    losses, keys = [], [bits(state.model_state["key"])]
    for _ in range(3):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
        keys.append(bits(state.model_state["key"]))
    assert len(set(losses)) == 3, "the noise of every step is another"
    assert len({k for step in keys for k in step}) == 4
    held = state.model_state
    assert held["mean"].dtype == jnp.float32
    assert held["positive"].dtype == jnp.int32
    assert held["called"].dtype == jnp.bool_
    assert bool(held["called"])
    # Integers cannot be averaged: they are those of the first device, on all devices.
    first = int((batch["x"][: ROWS // 4] > 0).sum())
    assert [int(shard.data) for shard in held["positive"].addressable_shards] == [3 * first] * 4
    np.testing.assert_array_equal(held["table"], table)


# Evaluation


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_changes_nothing(stage):
    run = setup(stage=stage)
    a, b = batches()
    state, _ = run.step(run.init(), a)
    before = bits(state)
    run.evaluate(state, b)
    assert bits(state) == before
    with_evaluation, _ = run.step(state, b)
    state, _ = run.step(run.init(), a)
    without, _ = run.step(state, b)
    assert bits(with_evaluation) == bits(without)


def test_evaluation_uses_running_averages_and_no_dropout():
    run = setup(stage=3)
    state, _ = run.step(run.init(), batches()[0])
    model = run.model(state)
    model.eval()
    total, weight = squares(model, batches()[1])
    got = [float(run.evaluate(state, batches()[1])["loss"]) for _ in range(2)]
    assert got[0] == got[1]
    np.testing.assert_allclose(got[0], total / weight, rtol=1e-5)


class Bias(nnx.Module):
    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(D))

    def __call__(self, x):
        return x + self.bias


@pytest.mark.parametrize("stage", [0, 3])
def test_an_evaluation_over_batches_of_1_and_9_tokens_counts_tokens(stage):
    run = setup(Bias, stage=stage)
    state, sums = run.init(), {"loss": 0.0, "weight": 0.0}
    for loss_sum, rows in ((2.0, 1), (90.0, 9)):
        weight = np.zeros(16, np.float32)
        weight[-rows:] = 1  # devices without any weight, too
        x = np.full((16, D), np.sqrt(loss_sum / rows), np.float32)
        metrics = run.evaluate(state, {"x": x, "y": np.zeros_like(x), "weight": weight})
        assert metrics["weight"] == rows
        sums["loss"] += float(metrics["loss"] * metrics["weight"])
        sums["weight"] += float(metrics["weight"])
    np.testing.assert_allclose(sums["loss"] / sums["weight"], 9.2, rtol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("mesh", ["dp4", "node2dp2"])
def test_uneven_weights_are_exact_over_devices_and_microbatches(mesh, micro_batches):
    weight = np.repeat(np.array([11, 0, 0, 0, 101, 3, 1, 0], np.float32), ROWS // 8)
    uneven = [batch | {"weight": weight} for batch in batches()]
    tx = optax.sgd(0.1)
    run = setup(Bias, tx=single.recording(tx), mesh=mesh, micro_batches=micro_batches)
    single.assert_equal(single.train(run, uneven), single.one_device(Bias, squares, tx, uneven))


# Gradients that are not finite, and clipping


def poisoned(row: int, value: float = np.inf) -> dict[str, np.ndarray]:
    batch = {name: array.copy() for name, array in batches()[1].items()}
    batch["x"][row, 0] = value
    return batch


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_with_an_infinite_row_on_one_device_changes_nothing(stage):
    schedule = optax.linear_schedule(1e-1, 0.0, 3)
    run = setup(tx=optax.adamw(schedule), stage=stage, micro_batches=2, clip_norm=0.5)
    good = batches()[0]
    state, _ = run.step(run.init(), good)
    before = bits((state.params, state.opt_state, state.model_state))
    counted = []
    for batch in (poisoned(ROWS - 1), poisoned(0, np.nan)):
        state, metrics = run.step(state, batch)
        assert not np.isfinite(metrics["grad_norm"])
        assert bits((state.params, state.opt_state, state.model_state)) == before
        counted.append([int(x) for x in (state.step, state.skipped, state.skipped_in_row)])
    state, metrics = run.step(state, good)
    counted.append([int(x) for x in (state.step, metrics["skipped"], metrics["skipped_in_row"])])
    assert counted == [[2, 1, 1], [3, 2, 2], [4, 2, 0]]
    # The schedule has not moved on either: what follows is what would have followed.
    straight, _ = run.step(run.init(), good)
    straight, _ = run.step(straight, good)
    assert bits((state.params, state.opt_state, state.model_state)) == bits(
        (straight.params, straight.opt_state, straight.model_state)
    )


def test_a_batch_without_weight_is_skipped():
    run = setup()
    state = run.init()
    before = bits(state.params)
    state, metrics = run.step(state, batches()[0] | {"weight": np.zeros(ROWS, np.float32)})
    assert bits(state.params) == before
    assert int(metrics["skipped"]) == 1


@pytest.mark.parametrize(("mesh", "stage", "micro_batches"), [("dp4", 2, 2), ("node2dp2", 1, 1), ("dp2tp2", 3, 1)])
def test_the_gradient_is_clipped_once_and_its_norm_is_reported_before(mesh, stage, micro_batches):
    class Plain(nnx.Module):
        def __init__(self):
            init = nnx.with_partitioning(nnx.initializers.normal(0.3), (None, "tp"))
            self.up = nnx.Linear(D, 2 * D, kernel_init=init, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(2 * D, D, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    clip = 1e-3
    wanted = single.one_device(Plain, squares, optax.sgd(1.0), batches(1))
    run = setup(Plain, tx=optax.sgd(1.0), mesh=mesh, stage=stage, micro_batches=micro_batches, clip_norm=clip)
    state = run.init()
    before = single.arrays(state.params)
    state, metrics = run.step(state, batches()[0])
    np.testing.assert_allclose(metrics["grad_norm"], wanted.norms[0], rtol=1e-5)
    after = single.arrays(state.params)
    for path, grad in wanted.grads.items():
        moved, clipped = before[path] - after[path], grad * clip / wanted.norms[0]
        # The difference of parameters of size 1 is as exact as those.
        np.testing.assert_allclose(moved, clipped, rtol=1e-3, atol=2e-7, err_msg=str(path))


def test_a_gradient_of_zero_is_not_clipped_to_nan():
    run = setup(Bias, tx=optax.sgd(1.0), clip_norm=1.0)
    batch = batches()[0]
    state, metrics = run.step(run.init(), batch | {"y": batch["x"]})
    assert metrics["grad_norm"] == 0
    assert int(metrics["skipped"]) == 0
    assert np.isfinite(np.asarray(state.params["bias"])).all()
