"""Evaluation: exact whatever its parts are, and no parameter whole for longer than a part needs it."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_decoder import batches, decoder

import jzero
from jzero import hlo
from jzero.mesh import data_size
from jzero.models.decoder import next_token_loss

PARTS = 4


def make_run(stage=3, **changes):
    rows = PARTS * data_size(jzero.make_mesh(None))
    (batch,) = batches(1, rows)
    run = jzero.setup(
        decoder(**changes), next_token_loss, optax.adam(1e-3), None, batch, stage=stage, micro_batches=PARTS
    )
    return run, batch


@pytest.mark.parametrize("scan", [True, False])
def test_parameters_are_gathered_for_each_part_and_not_kept_whole_for_all(scan):
    run, _ = make_run(scan=scan)
    with jax.set_mesh(run.mesh):
        program = run._evaluate.lower(run.abstract_state, run._abstract_batch, PARTS).compile()
    gathers = [c for c in hlo.collectives(program, run.mesh) if c.kind == "all-gather"]
    assert len(gathers) >= 9
    assert {c.trips % PARTS for c in gathers} == {0}


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_is_that_of_the_sequences_one_by_one(stage):
    run, batch = make_run(stage)
    state = run.init()
    result = run.evaluate(state, run.put(batch))
    model, sums = run.model(state), nnx.jit(next_token_loss)
    single = [sums(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(len(batch["tokens"]))]
    losses, weights = (np.array([float(s[i]) for s in single]) for i in (0, 1))
    assert float(result["weight"]) == weights.sum()
    np.testing.assert_allclose(float(result["loss"]), losses.sum() / weights.sum(), rtol=2e-6)
