"""Evaluation: exact whatever its parts are, and no parameter whole for longer than a part needs it."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_decoder import VOCAB, batches, decoder

import jzero
from jzero import data, hlo
from jzero.loop import evaluate
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
    weights = dataclasses.replace(run.abstract_state, opt_state=())
    with jax.set_mesh(run.mesh):
        program = run._evaluate.lower(weights, run.abstract_batch, PARTS).compile()
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


SEQ_LEN = 16


def alone(model, documents):
    """Sums of losses and weights of sequences, each in a row of its own and without a word of documents."""
    sums = nnx.jit(next_token_loss)
    rows = [np.zeros((2, 1, SEQ_LEN + 1)) for _ in documents]
    for row, document in zip(rows, documents, strict=True):
        row[0, 0, : len(document)], row[1, 0, 1 : len(document)] = document, 1
    batches = [{"tokens": r[0].astype(np.int32), "weights": r[1, :, 1:].astype(np.float32)} for r in rows]
    return np.array([[float(x) for x in sums(model, batch)] for batch in batches]).sum(axis=0)


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_a_held_out_split_that_fills_no_batch_has_the_loss_of_its_sequences_alone(packing):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, SEQ_LEN + 2, 70)
    documents = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.integers(0, VOCAB, documents[-1])
    if packing == "documents":
        samples = data.Packed.of(tokens, documents[:-1], documents[1:], SEQ_LEN)
        sequences = np.split(tokens, documents[1:-1])
    else:
        samples = data.Windows(tokens, np.arange(0, len(tokens) - SEQ_LEN, SEQ_LEN), SEQ_LEN)
        sequences = [samples[i]["tokens"] for i in range(len(samples))]
    batch_size = 2 * data_size(jzero.make_mesh(None))
    batch = data.shapes(batch_size, SEQ_LEN, packing)
    run = jzero.setup(decoder(), next_token_loss, optax.adam(1e-3), None, batch, stage=3, micro_batches=2)
    evals = data.EvalBatches(samples, batch_size)
    assert len(samples) % batch_size
    assert len(evals) > 1
    state = run.init()
    mean, weight = evaluate(run, state, evals)
    loss_alone, weight_alone = alone(run.model(state), sequences)
    predicted = (lengths - 1).sum() if packing == "documents" else len(samples) * SEQ_LEN
    assert weight == weight_alone == predicted
    np.testing.assert_allclose(mean, loss_alone / weight_alone, rtol=2e-6)
