"""The learning rate of each step, by table; what a plateau and a skipped step do to it, on every mesh and stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from tiny_decoder import batches, decoder

import jzero
from jzero.models.decoder import next_token_loss
from jzero.schedules import by_learning_rate, make_schedule

HALF = 0.55  # cosine, half-way from 1 to 0.1


@pytest.mark.parametrize(
    ("kind", "warmup_steps", "steps", "expected"),
    [
        # Step 0 already moves; the last step of the warm-up is at the peak; the minimum is reached after the last step.
        ("linear", 4, 13, [0.25, 0.5, 0.75, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1]),
        ("constant", 4, 6, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", 2, 6, [0.5, 1.0, 1.0, HALF + 0.45 * 0.5**0.5, HALF, HALF - 0.45 * 0.5**0.5, 0.1, 0.1, 0.1]),
        # No warm-up, and one of a single step, start at the peak.
        ("linear", 0, 3, [1.0, 0.7, 0.4, 0.1, 0.1]),
        ("linear", 1, 4, [1.0, 1.0, 0.7, 0.4, 0.1, 0.1]),
        ("constant", 0, 2, [1.0, 1.0, 1.0]),
        ("constant", 1, 2, [1.0, 1.0, 1.0]),
        # A warm-up that takes all steps ends at the peak and stays there.
        *[(kind, 4, 4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]) for kind in ("linear", "cosine", "constant")],
        ("cosine", 1, 1, [1.0, 1.0, 1.0]),
        ("linear", 0, 1, [1.0, 0.1, 0.1]),
    ],
)
def test_the_learning_rate_of_each_step(kind, warmup_steps, steps, expected):
    schedule = make_schedule(kind, 2.0, warmup_steps, steps, 0.1)
    got = [float(schedule(k)) for k in range(len(expected))]
    np.testing.assert_allclose(got, 2.0 * np.array(expected), rtol=1e-6)


def test_the_last_ratio_may_be_0_and_1():
    assert float(make_schedule("cosine", 1.0, 0, 4, 0.0)(4)) == pytest.approx(0, abs=1e-7)
    assert [float(make_schedule("linear", 1.0, 0, 4, 1.0)(k)) for k in range(6)] == [1.0] * 6


@pytest.mark.parametrize(
    ("kind", "warmup_steps", "message"),
    [
        ("cosin", 0, "schedule 'cosin' is not one of constant, linear, cosine"),
        ("linear", 11, "warmup_steps=11 must be between 0 and steps=10"),
        ("linear", -1, "warmup_steps=-1 must be between 0 and steps=10"),
    ],
)
def test_a_schedule_that_cannot_be_is_an_error_that_names_the_value(kind, warmup_steps, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(kind, 1.0, warmup_steps, 10)


# ---- applied --------------------------------------------------------------------------------------------------------


def test_the_rate_that_was_applied_is_in_the_state():
    tx = by_learning_rate(make_schedule("linear", 1.0, 2, 4, 0.0))
    params = {"w": jnp.float32(8.0)}
    state = tx.init(params)
    for k, lr in enumerate([0.5, 1.0, 1.0, 0.5, 0.0, 0.0]):
        updates, state = tx.update({"w": jnp.float32(3.0)}, state, params)
        assert (int(state.updates), float(state.learning_rate)) == (k + 1, lr)
        assert float(updates["w"]) == -3.0 * lr


def test_a_plateau_of_the_mean_loss_over_windows_lowers_the_rate_down_to_the_floor():
    plateau = optax.contrib.reduce_on_plateau(0.5, 2, accumulation_size=2, min_scale=0.2)
    tx = by_learning_rate(4.0, plateau)
    state = tx.init({"w": jnp.zeros(2, jnp.bfloat16)})
    losses = [[3.0, 1.0], [2.5, 1.5], [1.0, 3.0], [1.0, 1.0], *[[9.0, 9.0]] * 6]
    # The lowest mean is 2, then 1; two windows in a row without a lower one halve the rate at the end of the second.
    expected = [[4, 4], [4, 4], [4, 2], [2, 2], [2, 2], [2, 1], [1, 1], [1, 0.8], [0.8, 0.8], [0.8, 0.8]]
    for window, rates in zip(losses, expected, strict=True):
        for loss, lr in zip(window, rates, strict=True):
            updates, state = tx.update({"w": jnp.ones(2)}, state, value=jnp.float32(loss))
            assert float(state.learning_rate) == pytest.approx(lr)
            np.testing.assert_array_equal(updates["w"], -state.learning_rate)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}


SCHEDULE = make_schedule("linear", 1e-2, 2, 6, 0.0)


def rates_of(run: jzero.Run, data: list) -> list[float]:
    state, rates = run.init(), []
    for batch in data:
        state, metrics = run.step(state, batch)
        rates.append(float(metrics["lr"]))
    return rates


def with_bad(data: list, *steps: int) -> list:
    """Batches of which some have a weight that is not finite."""
    bad = [{**batch, "weights": np.full_like(batch["weights"], np.nan)} for batch in data]
    return [bad[k] if k in steps else batch for k, batch in enumerate(data)]


def test_the_schedule_stands_still_on_skipped_steps():
    data = with_bad(batches(7, 4), 0, 2, 3)
    mesh = jzero.make_mesh("dp=2", jax.devices()[:2])
    run = jzero.setup(decoder(), next_token_loss, jzero.make_optimizer("adamw", SCHEDULE), mesh, data[1])
    first, second, third, fourth = (float(SCHEDULE(k)) for k in range(4))
    assert first < second == third > fourth
    # A step that is skipped reports the rate of the update before it; the first of all, that of the first update.
    assert rates_of(run, data) == pytest.approx([first, first, first, first, second, third, fourth])


@pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of 8 devices")
@pytest.mark.parametrize("stage", range(4))
def test_a_plateau_is_the_same_on_shards_under_accumulation_and_over_skipped_steps(stage):
    """The loss that decides is the exact mean over devices and microbatches, whatever their weights."""
    data = with_bad(batches(1, 16) * 12, 4)

    def make(per_layer):
        plateau = optax.contrib.reduce_on_plateau(0.5, 1, accumulation_size=2)
        return jzero.make_optimizer("sgd", 40.0, per_layer, plateau=plateau)  # too high a rate: losses go up and down

    run = jzero.setup(
        decoder(), next_token_loss, make, jzero.make_mesh("dp=4,tp=2", jax.devices()[:8]), data[0],
        stage=stage, micro_batches=2, clip_norm=1.0,
    )  # fmt: skip
    state, seen = run.init(), []
    for batch in data:
        state, metrics = run.step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["lr"])))
    lr, best, window, expected = 40.0, np.inf, [], []
    for loss, _ in seen:
        window += [loss] if np.isfinite(loss) else []
        if len(window) == 2:
            lowest = np.mean(window)
            lr, best, window = (lr, lowest, []) if lowest < (1 - 1e-4) * best else (lr / 2, best, [])
        expected.append(lr)
    assert [lr for _, lr in seen] == pytest.approx(expected)
    assert len(set(expected)) > 1
