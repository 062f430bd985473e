"""An average of the weights: its formula, where it rests, and what evaluating it gives, on one device and on shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device as single
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from tiny_decoder import batches, decoder

import jzero
from jzero.models.decoder import next_token_loss
from jzero.optim import WithMaster, average_of, averaged

DECAY, STEPS = 0.3, 7
SGD = optax.sgd(0.3, momentum=0.5)  # does not blow up the rounding of a gradient's smallest elements, as Adam does


# ---- the formula ----------------------------------------------------------------------------------------------------


def test_the_average_follows_the_weights_by_hand():
    tx = averaged(optax.sgd(1.0), 0.3)
    params = {"w": jnp.float32(8.0)}
    state = tx.init(params)
    assert float(state.average["w"]) == 8.0
    average = 8.0
    for k, grad in enumerate([1.0, 2.0, -4.0, 0.5]):
        updates, state = tx.update({"w": jnp.float32(grad)}, state, params)
        params = optax.apply_updates(params, updates)
        d = [1 / 10, 2 / 11, 3 / 12, 0.3][k]  # (1 + k) / (10 + k), until the decay is lower
        average = d * average + (1 - d) * float(params["w"])
        assert float(state.average["w"]) == pytest.approx(average, rel=1e-6)
        assert int(state.updates) == k + 1


def test_training_is_the_same_beside_an_average():
    params, grads = {"w": jnp.float32([[1.0, 2.0]])}, {"w": jnp.float32([[0.5, -3.0]])}
    with_it, without = averaged(optax.adam(0.1), 0.9), optax.adam(0.1)
    updates, state = with_it.update(grads, with_it.init(params), params)
    plain, inner = without.update(grads, without.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, (updates, state.inner), (plain, inner))


def test_an_average_of_narrow_parameters_is_float32():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    state = averaged(optax.sgd(1.0), 0.9).init(params)
    assert state.average["w"].dtype == "float32"


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1])
def test_a_decay_that_cannot_be_is_refused(decay):
    with pytest.raises(ValueError, match=f"decay={decay} of the average must be above 0 and below 1"):
        averaged(optax.sgd(1.0), decay)


@pytest.mark.parametrize(
    ("tx", "number"), [(optax.sgd(0.1), "no"), (averaged(averaged(optax.sgd(0.1), 0.5), 0.5), "2")]
)
def test_a_state_must_hold_one_average(tx, number):
    state = tx.init({"w": jnp.ones(2)})
    if number == "2":
        state = (state, state.inner)
    with pytest.raises(ValueError, match=rf"holds {number} averages .* tx=jzero.averaged\(tx, decay\)"):
        average_of(state)


# ---- on shards ------------------------------------------------------------------------------------------------------

eight = pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of dp4 x tp2 needs 8 devices")


def run_of(stage, tx=None, **options):
    mesh = jzero.make_mesh("dp=4,tp=2", jax.devices()[:8])
    tx = tx or averaged(SGD, DECAY)
    return jzero.setup(
        decoder(**options.pop("sizes", {})), next_token_loss, tx, mesh, batches(1, 16)[0],
        stage=stage, micro_batches=2, **options,
    )  # fmt: skip


@functools.cache
def data():
    good = batches(STEPS + 1, 16)
    bad = {**good[3], "weights": np.full_like(good[3]["weights"], np.nan)}
    return [*good[:3], bad, *good[4:]]


@functools.cache
def on_one_device():
    """(weights, average, its loss on the last batch), in plain JAX; the bad batch is left out."""
    with nnx.use_eager_sharding(False):
        graphdef, params = nnx.split(decoder()())

    @jax.jit
    def loss(params, batch):
        total, weight = next_token_loss(nnx.merge(graphdef, params), batch)
        return total / weight

    state, average = SGD.init(params), params
    step = jax.jit(lambda params, state, batch: SGD.update(jax.grad(loss)(params, batch), state, params))
    steps = [batch for k, batch in enumerate(data()[:-1]) if k != 3]
    for k, batch in enumerate(steps):
        updates, state = step(params, state, batch)
        params = optax.apply_updates(params, updates)
        d = min(DECAY, (1 + k) / (10 + k))
        average = jax.tree.map(lambda a, x, d=d: d * a + (1 - d) * x, average, params)
    return *(single.arrays(nnx.to_pure_dict(x)) for x in (params, average)), float(loss(average, data()[-1]))


@eight
@pytest.mark.parametrize("stage", range(4))
def test_an_average_on_shards_is_the_average_on_one_device_and_evaluates_exactly(stage):
    run = run_of(stage)
    state = run.init()
    for batch in data()[:-1]:
        state, _ = run.step(state, batch)
    assert int(state.skipped) == 1
    weights, average, loss = on_one_device()
    got = run.averaged(state)
    for path, value in single.arrays(got.params).items():
        np.testing.assert_allclose(value, average[path], rtol=1e-4, atol=1e-6, err_msg=str(path))
        assert not np.allclose(value, weights[path], rtol=1e-5, atol=1e-6)
    assert float(run.evaluate(got, data()[-1])["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(run.evaluate(state, data()[-1])["loss"]) != pytest.approx(loss, rel=1e-4)
    placed = jax.tree.map(lambda x: x.sharding.spec, got.params)
    assert normal(placed) == normal(run.specs.params)  # at rest: at stage 3 nobody holds a whole copy


def normal(specs):
    """Without trailing Nones, which say nothing."""
    return {
        path: tuple(spec)[: max((i + 1 for i, entry in enumerate(spec) if entry is not None), default=0)]
        for path, spec in flatten_dict(specs, is_leaf=lambda _, x: isinstance(x, P)).items()
    }


@eight
@pytest.mark.parametrize("stage", range(4))
def test_the_average_rests_where_m_and_v_and_the_master_do(stage):
    tx = averaged(optax.adamw(1e-2), DECAY)
    run = run_of(stage, tx, sizes={"dtype": "bfloat16"}, precision=jzero.Precision(params="bfloat16"))
    specs = run.specs.opt_state
    assert isinstance(specs, WithMaster)
    (adam,) = [x for x in specs.inner.inner if hasattr(x, "mu")]
    assert average_of(specs) == specs.master == adam.mu == adam.nu
    held = run.abstract_state.opt_state
    assert {x.dtype for x in jax.tree.leaves((average_of(held), held.master))} == {jnp.dtype("float32")}
    kernel = average_of(specs)["layers"]["mlp"]["up"]["kernel"]
    assert ("dp" in kernel) == (stage > 0)


@eight
@pytest.mark.parametrize("stage", [1, 3])
def test_in_bfloat16_the_average_is_of_the_masters_and_is_rounded_at_rest(stage):
    run = run_of(
        stage, averaged(optax.sgd(1e-3), 0.5), sizes={"dtype": "bfloat16"}, precision=jzero.Precision(params="bfloat16")
    )
    state = run.init()
    before = single.arrays(state.opt_state.master)
    state, _ = run.step(state, data()[0])
    after, average = single.arrays(state.opt_state.master), single.arrays(average_of(state.opt_state))
    for path in before:
        np.testing.assert_allclose(average[path], 0.1 * before[path] + 0.9 * after[path], rtol=1e-6, atol=1e-9)
    at_rest = single.arrays(run.averaged(state).params)
    for path, value in at_rest.items():
        np.testing.assert_array_equal(value, average[path].astype(jnp.bfloat16))


@eight
def test_what_shares_its_arrays_with_a_state_that_was_used_up_is_refused():
    run = run_of(3)
    state = run.init()
    average = run.averaged(state)
    run.step(state, data()[0])
    with pytest.raises(ValueError, match="given to an earlier step"):
        run.evaluate(average, data()[0])
    with pytest.raises(ValueError, match="given to an earlier step"):
        run.averaged(state)


@eight
def test_a_run_without_an_average_says_how_to_have_one():
    run = run_of(0, optax.sgd(0.1))
    with pytest.raises(ValueError, match="holds no averages"):
        run.averaged(run.init())
