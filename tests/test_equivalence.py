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


@pytest.mark.parametrize(
    ("stage", "mesh"),
    [
        pytest.param(*cell, marks=[] if cell in {(3, "dp=4,tp=2"), (1, "dp=8")} else pytest.mark.slow)
        for cell in itertools.product(STAGES, MESHES)
    ],
)
def test_so_it_is_with_layers_gathered_ahead(stage, mesh, data, one_device):
    """As users have it; the cells above scan layers plainly."""
    run = jzero.setup(
        decoder(layers_ahead=1), next_token_loss, single.recording(optax.adamw(1e-3)), mesh, data[0],
        stage=stage, micro_batches=2,
    )  # fmt: skip
    single.assert_equal(single.train(run, data), one_device[True])


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


PARAMETERS = jzero.Precision(params="bfloat16")
EVERYTHING = jzero.Precision(params="bfloat16", grads="bfloat16", reduce="bfloat16")
BF16_RTOL = 2e-2  # of a leaf's norm it is off by 9e-3, of a loss by 2e-3


@pytest.fixture(scope="module")
def learnt(data):
    """One batch over and over, which is learnt by heart: a wrong update shows in the losses."""
    trace = single.one_device(decoder(), next_token_loss, optax.adamw(5e-3), data[:1] * STEPS)
    assert trace.losses[-1] < 0.5 * trace.losses[0]
    return trace


@pytest.mark.parametrize(
    ("stage", "mesh", "precision"),
    [*((stage, "dp=4,tp=2", PARAMETERS) for stage in STAGES), (3, "node=2,dp=2,tp=2", EVERYTHING)],
    ids=[*map(str, STAGES), "gradients and reductions too"],
)
def test_bfloat16_learns_as_float32_on_one_device(stage, mesh, precision, data, learnt):
    """AdamW hides the scale of a gradient, so losses alone would not do."""
    run = jzero.setup(
        decoder(dtype="bfloat16"), next_token_loss, single.recording(optax.adamw(5e-3)), mesh, data[0],
        stage=stage, micro_batches=2, precision=precision,
    )  # fmt: skip
    got = single.train(run, data[:1] * STEPS)
    single.assert_gradients_equal(got, learnt, BF16_RTOL)
    np.testing.assert_allclose(got.norms[0], learnt.norms[0], rtol=BF16_RTOL)
    np.testing.assert_allclose(got.losses, learnt.losses, rtol=BF16_RTOL)


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
