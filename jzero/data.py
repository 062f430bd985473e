"""Text as bytes: an order of sequences that is a function of (seed, step) alone.

The corpus is the concatenation of its files, in the order of their paths, with a zero byte between two files.  It is
cut into equal spans, at most 64; the last `eval_fraction` of each span is held out, so evaluation sees text from
everywhere and no byte is in both parts.  A sequence is a window of seq_len + 1 bytes; windows of one piece overlap by
one byte, so that every byte is predicted once per epoch and no more.

Held out means held out by position.  Text that repeats itself is in both parts: some of the standard library's
held-out windows stand verbatim in the training part (code pages, boilerplate), and a model's loss is lower there.
Compare models on this split with each other, not with results on other text.

Batch k of training holds the samples k * batch_size … of an endless stream of epochs, each epoch a permutation of all
windows drawn from (seed, epoch).  Nothing else enters: not the mesh, not the number of processes, not the batches read
before.  Reading can start at any step, and a process may read some rows of every batch only.
"""

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grain
import numpy as np

SPANS = 64  # pieces the held-out part is spread over; fewer when the corpus is small
SEPARATOR = b"\0"  # between two files: a byte that text does not use
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

Batch = Mapping[str, np.ndarray]


class DataError(ValueError):
    """Data that cannot be trained on; the message names the path and the counts."""


def standard_library() -> list[Path]:
    """Python's own library: every .py file of it, without its tests and without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [f for f in _files(root, "**/*.py") if NOT_LIBRARY.isdisjoint(f.relative_to(root).parts)]


def files_of(path: str | None, glob: str = "**/*") -> list[Path]:
    """The files a corpus is made of, in the order in which they are read.

    Args:
        path: a file, or a directory; None for the sources of Python's standard library.
        glob: which files of a directory; hidden ones never belong to it.

    Raises:
        DataError: there is no such path, or no such file in it.
    """
    if path is None:
        files, where = standard_library(), "the standard library of this Python"
    else:
        root, where = Path(path), f"data.path = {path}"
        try:
            root.stat()
        except OSError as error:
            raise DataError(f"{where}: {str(error.strerror).lower()}") from None
        files = _files(root, glob) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{where}: no file matches {glob if path else '*.py'}")
    return files


def _files(root: Path, glob: str) -> list[Path]:
    try:
        found = [f for f in root.glob(glob) if f.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"data.glob = {glob}: {error}") from None
    shown = [f for f in found if not any(part.startswith(".") for part in f.relative_to(root).parts)]
    return sorted(shown, key=lambda f: f.relative_to(root).as_posix())


def read(files: list[Path]) -> np.ndarray:
    """The bytes of all files, uint8[n], a zero byte between two files; one file alone is mapped and not read.

    Raises:
        DataError: a file cannot be read, or there is not one byte in all of them.
    """
    try:
        if sum(f.stat().st_size for f in files) == 0:
            raise DataError(f"no data: {files[0] if len(files) == 1 else f'all {len(files)} files'} empty")
        if len(files) == 1:
            return np.memmap(files[0], np.uint8, mode="r")
        return np.frombuffer(SEPARATOR.join(f.read_bytes() for f in files), np.uint8)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None


@dataclass(frozen=True)
class Windows:
    """Sequences of `seq_len` + 1 tokens out of one array: what grain calls a random access source.

    Attributes:
        tokens: uint8[n], all of the corpus.
        starts: int64[count], where each window begins.
        seq_len: predicted tokens of a window.
    """

    tokens: np.ndarray
    starts: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`, int32[seq_len + 1]."""
        start = self.starts[index]
        return self.tokens[start : start + self.seq_len + 1].astype(np.int32)


def split(tokens: np.ndarray, seq_len: int, eval_fraction: float) -> tuple[Windows, Windows]:
    """(training, held-out) windows of a corpus; they share no byte.

    Args:
        tokens: uint8[n].
        seq_len: predicted tokens of a window.
        eval_fraction: part of each span that is held out; 0 for none.

    Raises:
        DataError: fewer tokens than one sequence needs, in all or in one of the two parts.
    """
    if len(tokens) < seq_len + 1:
        raise DataError(f"{len(tokens)} tokens are fewer than one sequence, data.seq_len + 1 = {seq_len + 1}")
    # A span is cut short by up to one window at the end of each part: spans of 100 windows lose little by it.
    spans = int(np.clip(len(tokens) // (100 * seq_len), 1, SPANS))
    edges = np.linspace(0, len(tokens), spans + 1).astype(np.int64)
    cuts = edges[1:] - (np.diff(edges) * eval_fraction).astype(np.int64)
    train, held_out = _windows(tokens, edges[:-1], cuts, seq_len), _windows(tokens, cuts, edges[1:], seq_len)
    for name, part in (("training", train), ("held-out", held_out)):
        if not len(part) and (name == "training" or eval_fraction):
            raise DataError(
                f"the {name} part of {len(tokens)} tokens has none of the {seq_len + 1} tokens of one sequence: "
                f"data.eval_fraction = {eval_fraction}, data.seq_len = {seq_len}"
            )
    return train, held_out


def _windows(tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray, seq_len: int) -> Windows:
    pieces = [np.arange(b, e - seq_len, seq_len, dtype=np.int64) for b, e in zip(begins, ends, strict=True)]
    return Windows(tokens, np.concatenate(pieces), seq_len)


def batches(
    windows: Windows,
    batch_size: int,
    *,
    seed: int,
    start: int = 0,
    stop: int,
    rows: slice = slice(None),
    prefetch: int = 4,
) -> Iterator[Batch]:
    """Training batches start … stop - 1, read ahead by a thread of grain's.

    Args:
        windows: the training part.
        batch_size: sequences per step over all processes.
        seed: of the order; two seeds have no epoch in common.
        start: first step; the batches are those a reader from step 0 would meet there.
        stop: step after the last.
        rows: which rows of every batch to read; a process of several reads its own.
        prefetch: batches read ahead.

    Returns:
        An iterator over {"tokens": int32[rows of the batch, seq_len + 1]}, host arrays.
    """
    # grain seeds epoch e with seed + e; hashing keeps epoch 1 of seed 0 apart from epoch 0 of seed 1.
    seed_32 = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest())
    samples = grain.MapDataset.source(windows).shuffle(seed=seed_32).repeat()
    numbers = range(batch_size)[rows]

    def batch(step: int) -> Batch:
        return {"tokens": np.stack([cast("np.ndarray", samples[step * batch_size + row]) for row in numbers])}

    return _ahead(grain.MapDataset.range(start, stop).map(batch), prefetch)


def eval_batches(windows: Windows, batch_size: int, count: int, rows: slice = slice(None)) -> list[Batch]:
    """At most `count` batches of the held-out part, always the same, spread evenly over it; no window twice.

    Raises:
        DataError: the held-out part has fewer windows than one batch.
    """
    if len(windows) < batch_size:
        raise DataError(
            f"the held-out part has {len(windows)} sequences, fewer than batch_size = {batch_size}: "
            f"raise data.eval_fraction, lower batch_size, or set data.eval_fraction to 0 to do without evaluation"
        )
    count = min(count, len(windows) // batch_size)
    chosen = (
        np.linspace(0, len(windows), count * batch_size, endpoint=False).astype(np.int64).reshape(count, batch_size)
    )
    return [{"tokens": np.stack([windows[i] for i in row[rows]])} for row in chosen]


def _ahead(dataset: grain.MapDataset[Batch], prefetch: int) -> Iterator[Batch]:
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))
