"""The data: disjoint parts, and an order that is a function of the seed and the position in the stream alone."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jzero import data
from jzero.data import DataError


@pytest.fixture
def windows():
    """A corpus whose tokens tell where they stand: 1,000 windows of 4 + 1 tokens."""
    return data.Windows(np.arange(4001) % 251, np.arange(0, 4000, 4), seq_len=4)


def corpus_tokens(path, **source):
    corpus = data.open_corpus(data.Source(path=str(path), **source), vocab=256)
    return bytes(corpus.tokens[: len(corpus.tokens)].astype(np.uint8))


def tokens(iterator):
    return [batch["tokens"] for batch in iterator]


def one_step(windows, step, **kwargs):
    return next(data.batches(windows, 8, seed=1, first=step * 8, count=1, **kwargs))["tokens"]


def test_a_batch_is_a_host_array_of_int32(windows):
    batch = one_step(windows, 0)
    assert isinstance(batch, np.ndarray)
    assert (batch.shape, batch.dtype) == ((8, 5), np.int32)


def test_the_order_is_a_function_of_seed_and_position(windows):
    whole = tokens(data.batches(windows, 8, seed=1, count=300))
    for step in (0, 1, 124, 125, 299):  # an epoch has 125 batches
        np.testing.assert_array_equal(one_step(windows, step), whole[step])


def small_mixture():
    small = data.Windows(np.arange(10_000, 10_093), np.arange(0, 92, 4), 4)  # 23 sequences
    return data.Mixture([data.Windows(np.arange(157), np.arange(0, 156, 4), 4), small], [0.6, 0.4])  # 39 and 23


STREAMS = {"windows": lambda: data.Windows(np.arange(151), np.arange(0, 148, 4), 4), "mixture": small_mixture}  # 37


@pytest.mark.parametrize("stream", STREAMS)
def test_a_run_split_after_any_step_reads_what_the_unsplit_one_reads(stream):
    samples = STREAMS[stream]()
    whole = tokens(data.batches(samples, 4, seed=1, count=30))  # 120 samples: more than three epochs of 37
    for k in range(31):
        before = tokens(data.batches(samples, 4, seed=1, count=k))
        after = tokens(data.batches(samples, 4, seed=1, first=4 * k, count=30 - k))
        np.testing.assert_array_equal(np.array(before + after), whole)


def starts_and_ids(samples, sessions, rows=None):
    """First tokens of what sessions of (batch size, batches) read one after the other, and the ids said for them.

    Args:
        rows: batch size -> the rows of each process.
    """
    starts, ids, position = [], [], 0
    for batch_size, count in sessions:
        of_processes = [slice(None)] if rows is None else rows(batch_size)
        read = [
            tokens(data.batches(samples, batch_size, seed=1, first=position, count=count, rows=r)) for r in of_processes
        ]
        starts += [int(row[0]) for batch in zip(*read, strict=True) for part in batch for row in part]
        ids += data.sample_ids(samples, seed=1, first=position, count=batch_size * count)
        position += batch_size * count
    return starts, ids


def halves(batch_size):
    return [np.arange(p, batch_size, 2) for p in range(2)]


SESSIONS = [(8, 5), (2, 3), (2, 7), (12, 4), (6, 1)]  # shrink, resume again, grow, shrink: 114 samples


@pytest.mark.parametrize("rows", [None, halves], ids=["one process", "two processes"])
@pytest.mark.parametrize("stream", STREAMS)
def test_no_sample_is_lost_and_none_read_twice_whatever_the_batch_size_becomes(stream, rows):
    samples = STREAMS[stream]()
    unsplit, ids = starts_and_ids(samples, [(1, 114)])
    split, split_ids = starts_and_ids(samples, SESSIONS, rows)
    assert split_ids == ids
    assert sorted(split) == sorted(unsplit)
    if rows is None:
        assert split == unsplit
    parts = samples.parts if isinstance(samples, data.Mixture) else [samples]
    assert [int(parts[source][index]["tokens"][0]) for source, index in ids] == unsplit
    for source, part in enumerate(parts):  # every epoch of every source has every sample once
        mine = [index for s, index in ids if s == source]
        for begin in range(0, len(mine) - len(part) + 1, len(part)):
            assert sorted(mine[begin : begin + len(part)]) == list(range(len(part)))
        assert len(set(mine[len(mine) // len(part) * len(part) :])) == len(mine) % len(part)


def test_ids_are_known_without_reading_and_far_along_the_stream():
    class Unread(data.Windows):
        def __getitem__(self, index):
            raise AssertionError("read")

    samples = Unread(np.zeros(41, np.uint8), np.arange(10) * 4, 4)
    far = data.sample_ids(samples, seed=0, first=10**12, count=10)
    assert sorted(far) == [(0, i) for i in range(10)]
    assert data.sample_ids(samples, seed=0, count=0) == []


def test_two_interpreters_read_the_same_order(tmp_path):
    program = (
        "import sys, hashlib, numpy as np\nfrom jzero import data\n"
        "w = data.Windows(np.arange(4001) % 251, np.arange(0, 4000, 4), 4)\n"
        "b = [x['tokens'] for x in data.batches(w, 8, seed=1, count=20)]\n"
        "sys.stdout.write(hashlib.sha256(np.array(b).tobytes()).hexdigest())"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in "ab"]
    assert runs[0].stdout == runs[1].stdout != ""


def test_an_epoch_has_every_window_once_and_the_next_has_another_order(windows):
    def starts(first, last):
        return [
            int(w[0]) for b in tokens(data.batches(numbered, 8, seed=1, first=8 * first, count=last - first)) for w in b
        ]

    numbered = data.Windows(np.arange(4001), windows.starts, 4)
    first, second = starts(0, 125), starts(125, 250)
    assert sorted(first) == sorted(second) == list(range(0, 4000, 4))
    assert first != second
    assert first != sorted(first)


def test_seeds_share_no_epoch(windows):
    # grain seeds epoch e with seed + e: without hashing, epoch 1 of seed 0 would be epoch 0 of seed 1.
    second_epoch = tokens(data.batches(windows, 8, seed=0, first=125 * 8, count=10))
    first_epoch = tokens(data.batches(windows, 8, seed=1, count=10))
    assert not np.array_equal(second_epoch, first_epoch)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_rows_of_several_processes_make_up_the_same_batch(windows, processes):
    each = 8 // processes
    parts = [one_step(windows, 77, rows=slice(p * each, (p + 1) * each)) for p in range(processes)]
    np.testing.assert_array_equal(np.concatenate(parts), one_step(windows, 77))


def test_batches_are_read_ahead_off_the_main_thread():
    seen = []

    class Recorded(data.Windows):
        def __getitem__(self, index):
            seen.append(threading.current_thread())
            return super().__getitem__(index)

    it = data.batches(Recorded(np.zeros(41, np.uint8), np.arange(10) * 4, 4), 2, seed=0, count=100, prefetch=3)
    next(it)
    deadline = time.monotonic() + 10
    while len(seen) < 2 * 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(seen) == 2 * 4  # the batch handed out and three more
    assert threading.main_thread() not in seen


@pytest.mark.parametrize(("size", "fraction"), [(100_003, 0.05), (5_000, 0.2), (997, 0.5), (9_999, 0.0)])
def test_no_byte_is_both_trained_on_and_held_out(size, fraction):
    train, held_out = data.split_windows(np.zeros(size, np.uint8), 16, fraction)

    def covered(windows):
        return np.concatenate([np.arange(s, s + 17) for s in windows.starts] or [np.zeros(0, int)])

    assert not set(covered(train)) & set(covered(held_out))
    assert max([*covered(train), *covered(held_out)]) < size
    # every byte but the first of each piece is predicted at most once, and nearly all are
    predicted = np.concatenate([covered(w).reshape(-1, 17)[:, 1:].ravel() for w in (train, held_out) if len(w)])
    assert len(set(predicted)) == len(predicted) > 0.9 * size
    assert abs(16 * len(held_out) / size - fraction) < 0.02


def test_windows_hold_the_bytes_of_the_corpus():
    corpus = np.random.default_rng(0).integers(0, 256, 5_000).astype(np.uint8)
    train, _ = data.split_windows(corpus, 32, 0.1)
    for index in (0, 1, len(train) - 1):
        start = train.starts[index]
        np.testing.assert_array_equal(train[index]["tokens"], corpus[start : start + 33])


def test_evaluation_is_the_same_every_time_spread_out_and_without_repetition():
    numbered = data.Windows(np.arange(4001), np.arange(0, 4000, 4), 4)
    first, again = data.EvalBatches(numbered, 8, 5), data.EvalBatches(numbered, 8, 5)
    np.testing.assert_array_equal(tokens(first), tokens(again))
    np.testing.assert_array_equal(tokens(first), tokens(first))
    starts = [int(w[0]) for b in tokens(first) for w in b]
    assert len(set(starts)) == 40
    assert max(starts) - min(starts) > 3800
    assert len(data.EvalBatches(numbered, 8, 10_000)) == 125


def test_rows_of_evaluation_batches_make_up_the_batch(windows):
    whole = data.EvalBatches(windows, 8, 2)
    parts = [data.EvalBatches(windows, 8, 2, rows=r) for r in (slice(0, 4), slice(4, 8))]
    np.testing.assert_array_equal(np.concatenate([tokens(p) for p in parts], axis=1), tokens(whole))


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    files = data.files_of(None)
    names = {f.name for f in files}
    assert {"argparse.py", "ast.py", "decoder.py"} <= names
    assert all(f.suffix == ".py" for f in files)
    assert not any({"test", "site-packages"} & set(f.parts) for f in files)
    assert files == data.files_of(None)
    assert sum(f.stat().st_size for f in files) > 5e6


def test_a_directory_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path):
    for name, text in {"b.txt": "B", "a/z.txt": "Z", "a/y.md": "Y", ".git/x.txt": "no", "c/.h.txt": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert corpus_tokens(tmp_path) == b"Y\0Z\0B"
    assert corpus_tokens(tmp_path, glob="**/*.txt") == b"Z\0B"
    assert corpus_tokens(tmp_path / "b.txt") == b"B"


def test_missing_and_empty_data_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"data.path = /no/such: no such file"):
        data.files_of("/no/such")
    with pytest.raises(DataError, match="no file matches"):
        data.files_of(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty"):
        corpus_tokens(tmp_path / "empty")
    (tmp_path / "also").touch()
    with pytest.raises(DataError, match="all 2 files"):
        corpus_tokens(tmp_path)


@pytest.mark.parametrize("size", [1, 127, 128])
def test_fewer_tokens_than_one_sequence_are_refused_with_the_counts(size):
    with pytest.raises(DataError, match=rf"^{size} tokens are fewer than .* = 129$"):
        data.split_windows(np.zeros(size, np.uint8), 128, 0.05)


def test_a_part_without_a_sequence_is_refused():
    with pytest.raises(DataError, match=r"held-out part of 200 tokens"):
        data.split_windows(np.zeros(200, np.uint8), 128, 0.05)
    with pytest.raises(DataError, match=r"training part of 200 tokens"):
        data.split_windows(np.zeros(200, np.uint8), 128, 0.9)
    train, held_out = data.split_windows(np.zeros(129, np.uint8), 128, 0.0)
    assert (len(train), len(held_out)) == (1, 0)
    assert len(tokens(data.batches(train, 4, seed=0, count=3))) == 3


@pytest.mark.parametrize(("batch_size", "count"), [(8, None), (7, None), (999, None), (1001, 1), (2000, 3), (300, 4)])
def test_evaluation_over_all_has_every_sequence_once_and_fills_up_with_weight_0(batch_size, count):
    numbered = data.Windows(np.arange(4001), np.arange(0, 4000, 4), 4)
    evals = data.EvalBatches(numbered, batch_size, count)
    assert (evals.sequences, evals.total, len(evals)) == (1000, 1000, -(-1000 // batch_size))
    rows = [row for b in evals for row in zip(b["tokens"], b["weights"], strict=True)]
    assert len(rows) == len(evals) * batch_size
    assert [int(row[0]) for row, weights in rows if weights.all()] == list(range(0, 4000, 4))
    assert not any(weights.any() for _, weights in rows[1000:])


def test_a_cap_on_evaluation_is_a_cap(windows):
    evals = data.EvalBatches(windows, 8, 5)
    assert (evals.sequences, evals.total, len(evals)) == (40, 1000, 5)
    assert len(data.EvalBatches(data.Windows(np.zeros(9), np.zeros(0, int), 4), 8)) == 0


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.999, 0.001), (1.0,)])
def test_a_mixture_gives_each_source_its_part_of_every_stretch(weights):
    parts = [data.Windows(np.arange(4001), np.arange(0, 4000, 4), 4) for _ in weights]
    mixture = data.Mixture(parts, weights)
    picks = [mixture.pick(k) for k in range(3000)]
    assert [mixture.pick(k) for k in (17, 2999, 0)] == [picks[17], picks[2999], picks[0]]
    for source, weight in enumerate(weights):
        mine = [k for k, (s, _) in enumerate(picks) if s == source]
        assert [picks[k][1] for k in mine] == list(range(len(mine)))  # its samples in order, none left out
        count = np.cumsum([s == source for s, _ in picks])
        assert np.abs(count - weight * np.arange(1, 3001)).max() < len(weights)


def test_a_source_of_a_mixture_repeats_nothing_before_its_epoch_ends():
    small = data.Windows(np.arange(10_000, 10_401), np.arange(0, 400, 4), 4)  # 100 sequences
    large = data.Windows(np.arange(4001), np.arange(0, 4000, 4), 4)
    mixture = data.Mixture([large, small], [0.75, 0.25])
    starts = [int(w[0]) for b in tokens(data.batches(mixture, 8, seed=3, count=125)) for w in b]
    from_small = [s for s in starts if s >= 10_000]
    assert len(from_small) == 250
    assert sorted(from_small[:100]) == sorted(from_small[100:200]) == list(range(10_000, 10_400, 4))
    assert from_small[:100] != from_small[100:200]
    assert len(set(starts) - set(from_small)) == 750
    assert starts[:8] != [int(w[0]) for b in tokens(data.batches(mixture, 8, seed=4, count=1)) for w in b]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_mixture_is_read_by_rows_and_from_any_step(windows, processes):
    mixture = data.Mixture([windows, data.Windows(np.arange(500), np.arange(0, 400, 4), 4)], [0.6, 0.4])
    whole = tokens(data.batches(mixture, 8, seed=1, count=50))
    rows = [np.arange(p, 8, processes) for p in range(processes)]  # rows need not lie next to each other
    parts = [tokens(data.batches(mixture, 8, seed=1, first=40 * 8, count=10, rows=r)) for r in rows]
    for r, part in zip(rows, parts, strict=True):
        np.testing.assert_array_equal(part, np.array(whole)[40:, r])


def test_weights_that_do_not_sum_to_1_are_refused_with_the_sum(windows):
    with pytest.raises(DataError, match=r"0.5 \+ 0.4 sum to 0.9, not to 1"):
        data.Mixture([windows, windows], [0.5, 0.4])


@pytest.mark.parametrize(
    ("path", "glob", "words"), [("a" * 300, "*", "name too long"), (".", "/*", "data.glob = /\\*")]
)
def test_paths_and_patterns_that_cannot_be_are_refused(path, glob, words):
    with pytest.raises(DataError, match=words):
        data.files_of(path, glob)
