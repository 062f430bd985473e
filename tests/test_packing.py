"""Packed rows: whole documents, each token predicted once, and every row a function of the documents alone."""

from itertools import pairwise

import numpy as np
import pytest

from jzero import data
from jzero.data import DataError
from jzero.data.packing import Packed, best_fit


def corpus(lengths):
    """Tokens that tell where they stand, and where documents of these lengths begin."""
    documents = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(documents[-1]), documents


def packed(lengths, seq_len):
    tokens, documents = corpus(lengths)
    return Packed.of(tokens, documents[:-1], documents[1:], seq_len)


def some_lengths(seed, count=400, mean=40):
    return np.random.default_rng(seed).geometric(1 / mean, count)


@pytest.mark.parametrize("seq_len", [1, 2, 16, 100, 1000])
def test_every_token_with_a_predecessor_in_its_document_is_predicted_once(seq_len):
    lengths = some_lengths(0)
    rows = packed(lengths, seq_len)
    predicted = []
    for row in (rows[i] for i in range(len(rows))):
        tokens, weights = row["tokens"], row["weights"]
        real = weights == 1
        np.testing.assert_array_equal(tokens[1:][real], tokens[:-1][real] + 1)  # by the token before it
        predicted += tokens[1:][real].tolist()
        assert set(weights) <= {0, 1}
    _, documents = corpus(lengths)
    expected = set(range(documents[-1])) - set(documents.tolist())
    assert len(predicted) == len(expected)
    assert set(predicted) == expected


def test_a_document_that_fits_is_whole_in_one_row_and_begins_at_position_0():
    lengths = some_lengths(1)
    rows, (_, documents) = packed(lengths, 64), corpus(lengths)
    found = {}
    for row in (rows[i] for i in range(len(rows))):
        inputs, segments, positions = row["tokens"][:-1], row["segments"], row["positions"]
        for segment in range(segments.max() + 1):
            here = segments == segment
            assert np.flatnonzero(here).tolist() == list(range(here.argmax(), here.argmax() + here.sum()))
            np.testing.assert_array_equal(positions[here], np.arange(here.sum()))
            targets = row["tokens"][1:][here][row["weights"][here] == 1]
            if len(targets):
                found[int(inputs[here][0])] = [int(inputs[here][0]), *targets.tolist()]
    for begin, end in pairwise(documents):
        if 2 <= end - begin <= 65:
            assert found[int(begin)] == list(range(begin, end))


def test_a_long_document_is_cut_into_full_rows_and_a_rest():
    rows = packed(
        [7, 25, 3], 8
    )  # 25 tokens: 8 + 8 + 8 predictions, with no rest; 7 and 3 do not fit a row of 9 together
    assert [rows[i]["tokens"].tolist() for i in (1, 2, 3)] == [list(range(k, k + 9)) for k in (7, 15, 23)]
    assert all(rows[i]["weights"].all() and not rows[i]["segments"].any() for i in (1, 2, 3))
    assert rows[0]["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0]
    assert rows[0]["weights"].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert rows[0]["segments"].tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    assert rows[0]["positions"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_two_documents_in_a_row_do_not_predict_each_other():
    row = packed([3, 4], 8)[0]
    assert row["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0]
    assert row["weights"].tolist() == [1, 1, 0, 1, 1, 1, 0, 0]
    assert row["segments"].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert {name: x.dtype for name, x in row.items()} == {
        "tokens": np.int32,
        "weights": np.float32,
        "segments": np.int32,
        "positions": np.int32,
    }


def test_packing_depends_on_the_documents_alone_and_rows_on_nothing_before_them():
    first, again = packed(some_lengths(2), 64), packed(some_lengths(2), 64)
    for i in (len(first) - 1, 0, 17):
        for name, x in first[i].items():
            np.testing.assert_array_equal(x, again[i][name])


def test_little_room_is_left_empty():
    lengths = np.clip(np.random.default_rng(3).lognormal(4, 1, 20_000).astype(int), 2, 513)
    rows = best_fit(lengths, 513)
    assert np.bincount(rows, weights=lengths).max() <= 513
    assert lengths.sum() / (513 * (rows.max() + 1)) > 0.98


def test_documents_of_one_token_or_none_have_nothing_to_predict():
    assert len(packed([1, 0, 1], 8)) == 0
    assert packed([1, 2, 0], 8)[0]["weights"].sum() == 1


@pytest.mark.parametrize(("count", "fraction", "held"), [(100, 0.05, 5), (10, 0.1, 1), (7, 0.5, 4), (50, 0.0, 0)])
def test_whole_documents_are_held_out_spread_over_the_corpus(count, fraction, held):
    tokens, documents = corpus([5] * count)
    train, held_out = data.split_documents(tokens, documents, 16, fraction)

    def begins(part):
        return {int(part.starts[i]) // 5 for i in range(len(part.starts))}

    assert len(begins(held_out)) == held
    assert begins(train) | begins(held_out) == set(range(count))
    assert not begins(train) & begins(held_out)
    if held > 1:
        assert max(np.diff(sorted(begins(held_out)))) <= count / held + 1


def test_too_few_documents_to_hold_any_out_are_refused():
    tokens, documents = corpus([50, 50, 50])
    with pytest.raises(DataError, match="held-out part of 3 documents has nothing to predict"):
        data.split_documents(tokens, documents, 16, 0.05)
    with pytest.raises(DataError, match="training part of 2 documents"):
        data.split_documents(*corpus([1, 1]), 16, 0.0)


def test_packed_batches_are_in_an_order_and_are_read_by_rows():
    rows = packed(some_lengths(4, 4000), 64)
    whole = list(data.batches(rows, 8, seed=1, count=60))
    assert whole[0].keys() == data.shapes(8, 64, "documents").keys()
    for name, shape in data.shapes(8, 64, "documents").items():
        assert (whole[0][name].shape, whole[0][name].dtype) == (shape.shape, shape.dtype)
    parts = [list(data.batches(rows, 8, seed=1, first=50 * 8, count=10, rows=slice(p, p + 2))) for p in (0, 2, 4, 6)]
    for name in whole[0]:
        joined = np.concatenate([[b[name] for b in part] for part in parts], axis=1)
        np.testing.assert_array_equal(joined, [b[name] for b in whole[50:]])
    last = list(data.EvalBatches(rows, 8))[-1]
    assert last["weights"][len(rows) % 8 or 8 :].sum() == 0
    assert (
        sum(b["weights"].sum() for b in data.EvalBatches(rows, 8)) == (np.maximum(some_lengths(4, 4000), 1) - 1).sum()
    )
