"""Every stage on every mesh is the same training run as one device.

The whole product is 64 cells (stage x mesh x accumulation x scan or loop of layers), each compiled for itself: the
quick suite takes a choice in which every pair of values of two parameters occurs; the rest is marked slow.
"""

import itertools

import jax
import numpy as np
import one_device as single
import optax
import pytest
from tiny_decoder import batches, decoder

import jzero
from jzero.models.decoder import next_token_loss

STAGES = (0, 1, 2, 3)
MESHES = ("dp=8", "dp=4,tp=2", "dp=2,tp=4", "node=2,dp=2,tp=2")
ACCUMULATIONS = (1, 4)
SCANS = (True, False)
STEPS = 20
ROWS = 32

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")


def is_quick(stage: int, mesh: str, micro_batches: int, scan: bool) -> bool:
    """An orthogonal choice: stage and mesh run through their product, the two others are functions of both."""
    i, j = STAGES.index(stage), MESHES.index(mesh)
    return (micro_batches == 4, scan) == ((i + j) % 2 == 1, ((i // 2) + j) % 2 == 0)


CELLS = [
    pytest.param(*cell, marks=[] if is_quick(*cell) else pytest.mark.slow)
    for cell in itertools.product(STAGES, MESHES, ACCUMULATIONS, SCANS)
]


def test_the_quick_choice_has_every_pair_of_values():
    quick = [cell for cell in itertools.product(STAGES, MESHES, ACCUMULATIONS, SCANS) if is_quick(*cell)]
    values = (STAGES, MESHES, ACCUMULATIONS, SCANS)
    for a, b in itertools.combinations(range(4), 2):
        assert {(cell[a], cell[b]) for cell in quick} == set(itertools.product(values[a], values[b]))


@pytest.fixture(scope="module")
def data():
    return batches(STEPS, ROWS)


@pytest.fixture(scope="module")
def one_device(data):
    return {scan: single.one_device(decoder(scan=scan), next_token_loss, optax.adamw(1e-3), data) for scan in SCANS}


@pytest.mark.parametrize(("stage", "mesh", "micro_batches", "scan"), CELLS)
def test_gradients_norms_and_losses_equal_one_device(stage, mesh, micro_batches, scan, data, one_device):
    run = jzero.setup(
        decoder(scan=scan),
        next_token_loss,
        single.recording(optax.adamw(1e-3)),
        mesh,
        data[0],
        stage=stage,
        micro_batches=micro_batches,
    )
    single.assert_equal(single.train(run, data), one_device[scan])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axes", [("dp",), ("node",)])
def test_sharding_over_one_of_the_two_axes_equals_one_device(stage, axes, data, one_device):
    run = jzero.setup(
        decoder(), next_token_loss, single.recording(optax.adamw(1e-3)), "node=2,dp=2,tp=2", data[0],
        stage=stage, micro_batches=2, zero=jzero.Zero(axes=axes),
    )  # fmt: skip
    single.assert_equal(single.train(run, data[:5]), cut(one_device[True], 5))


def cut(trace, steps):
    return trace._replace(norms=trace.norms[:steps], losses=trace.losses[:steps])


@pytest.mark.parametrize(
    "options",
    [
        {"zero": jzero.Zero(regather=False)},
        {"zero": jzero.Zero(persist_below=40, replicate=("*/attention/*",))},
    ],
    ids=("kept gathered", "some leaves whole"),
)
def test_what_stays_gathered_or_whole_does_not_change_the_numbers(options, data, one_device):
    run = jzero.setup(
        decoder(), next_token_loss, single.recording(optax.adamw(1e-3)), "dp=4,tp=2", data[0], stage=3, **options
    )
    single.assert_equal(single.train(run, data[:5]), cut(one_device[True], 5))


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_runs_at_every_stage_near_float32(stage, data, one_device):
    run = jzero.setup(
        decoder(dtype="bfloat16"),
        next_token_loss,
        optax.adamw(1e-3),
        "dp=4,tp=2",
        data[0],
        stage=stage,
        micro_batches=2,
        precision=jzero.Precision(params="bfloat16"),
    )
    state, losses = run.init(), []
    for batch in data:
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, one_device[True].losses, rtol=2e-2)


def test_bfloat16_reductions_stay_near_float32_ones(data, one_device):
    low = jzero.Precision(params="bfloat16", grads="bfloat16", reduce="bfloat16")
    run = jzero.setup(
        decoder(dtype="bfloat16"),
        next_token_loss,
        optax.adamw(1e-3),
        "node=2,dp=2,tp=2",
        data[0],
        stage=3,
        micro_batches=2,
        precision=low,
    )
    state, losses = run.init(), []
    for batch in data:
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, one_device[True].losses, rtol=2e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_microbatched_gradient_is_the_gradient_of_the_whole_batch(stage):
    """1 x 8 = 2 x 4 = 8 x 1, with weights that differ over rows."""
    data = batches(1, 8, seed=3)
    norms = []
    for micro_batches in (1, 2, 4):
        run = jzero.setup(
            decoder(layers=1),
            next_token_loss,
            optax.sgd(0.1),
            "dp=2,tp=4",
            data[0],
            stage=stage,
            micro_batches=micro_batches,
        )
        _, metrics = run.step(run.init(), data[0])
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(norms, norms[0], rtol=1e-6)
