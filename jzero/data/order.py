"""Which samples are in which batch: a function of the seed and the position in an endless stream, and reading ahead."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

import grain
import jax
import numpy as np

from jzero.data.errors import DataError

Batch = Mapping[str, np.ndarray]
Rows = slice | np.ndarray

ALL = slice(None)
_SUM_TOLERANCE = 1e-6


class Samples(Protocol):
    """Rows that can be read in any order: `Windows`, `Packed`, or anything of the kind."""

    def __len__(self) -> int:
        """How many."""
        ...

    def __getitem__(self, index: int) -> Any:
        """One row, a dict of arrays."""
        ...


@dataclass(frozen=True)
class Mixture:
    """Several sets of samples, of which each gives a part of every stretch of the stream.

    Of the first n samples of the stream, source i has weights[i] * n, up to a difference of less than the number of
    sources, and it goes through its own epochs: it repeats nothing before it has given everything.

    Attributes:
        parts: the sources.
        weights: of each; they sum to 1.

    Raises:
        DataError: the weights do not sum to 1; shows the sum.
    """

    parts: Sequence[Samples]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        total = math.fsum(self.weights)
        if abs(total - 1) > _SUM_TOLERANCE:
            raise DataError(
                f"data.mixture: the weights {' + '.join(map(str, self.weights))} sum to {total:g}, not to 1"
            )

    def pick(self, k: int) -> tuple[int, int]:
        """(source, how many samples it gave before) of sample k of the stream.

        A source takes its part, evenly spread, of what the sources before it have left; grain's mix is made the same
        way, of weights that it rounds.
        """
        before, after, left = k, k + 1, Fraction(1)
        total = sum(map(Fraction, self.weights))
        exact = [Fraction(weight) / total for weight in self.weights]
        for source, weight in enumerate(exact[:-1]):
            rest = (left - weight) / left
            before_rest, after_rest = math.floor(before * rest), math.floor(after * rest)
            if after_rest == before_rest:
                return source, before - before_rest
            before, after, left = before_rest, after_rest, left - weight
        return len(exact) - 1, before


def batches(
    samples: Samples | Mixture,
    batch_size: int,
    *,
    seed: int,
    first: int = 0,
    count: int,
    rows: Rows = ALL,
    prefetch: int = 4,
) -> Iterator[Batch]:
    """The next batches of training after a position in the stream, read ahead by a thread of grain's.

    Batch k holds the samples first + k * batch_size … of the stream.  So reading goes on where it stopped, at the very
    next sample, also with another batch size.

    Args:
        samples: the training part.
        batch_size: sequences per step over all processes.
        seed: of the order; two seeds have no epoch in common.
        first: samples of the stream that were trained on before.
        count: how many batches.
        rows: which rows of every batch to read; a process of several reads its own.
        prefetch: batches read ahead.

    Returns:
        An iterator over dicts of host arrays: "tokens" int32[rows of the batch, seq_len + 1], and what else samples
        have.
    """
    parts = samples.parts if isinstance(samples, Mixture) else [samples]
    order = _Order(samples, seed)
    numbers = np.arange(batch_size)[rows].tolist()

    def batch(k: int) -> Batch:
        ids = [order[first + k * batch_size + row] for row in numbers]
        return _stacked([parts[source][index] for source, index in ids])

    return _ahead(grain.MapDataset.range(count).map(batch), prefetch)


def sample_ids(samples: Samples | Mixture, *, seed: int, first: int = 0, count: int) -> list[tuple[int, int]]:
    """Which samples stand at the positions first … first + count - 1 of the stream; reads none of them.

    Args:
        samples, seed: as for `batches`, whose batch k holds the samples of k * batch_size positions after its `first`.

    Returns:
        (source of the mixture, else 0; index of the sample in it) of each position.
    """
    order = _Order(samples, seed)
    return [order[k] for k in range(first, first + count)]


class EvalBatches:
    """Batches of the held-out part, always the same, no sample twice; read ahead each time they are gone through.

    The last one is filled up with rows of weight 0, so sums of losses over sums of weights are exact.

    Args:
        samples: the held-out part.
        batch_size: sequences per batch over all processes.
        count: at most so many batches, of samples evenly spread over the part; None for all of it.
        rows: which rows of every batch to read.
        prefetch: batches read ahead.

    Attributes:
        total: samples of the held-out part.
        sequences: samples that the batches hold.
    """

    def __init__(
        self, samples: Samples, batch_size: int, count: int | None = None, rows: Rows = ALL, prefetch: int = 4
    ) -> None:
        self.total = len(samples)
        whole = -(-self.total // batch_size)
        if count is None or count >= whole:
            chosen = np.arange(self.total)
        else:
            chosen = np.linspace(0, self.total, count * batch_size, endpoint=False).astype(np.int64)
        self.sequences = len(chosen)
        padded = np.full(-(-len(chosen) // batch_size) * batch_size, -1)
        padded[: len(chosen)] = chosen
        self._samples, self._prefetch = samples, prefetch
        self._chosen = padded.reshape(-1, batch_size)[:, rows].tolist()

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Batch]:
        return _ahead(grain.MapDataset.range(len(self)).map(self._batch), self._prefetch)

    def _batch(self, number: int) -> Batch:
        return _stacked([self._weighted(index) for index in self._chosen[number]])

    def _weighted(self, index: int) -> Batch:
        sample = self._samples[max(0, index)]
        weights = sample.get("weights", np.ones(len(sample["tokens"]) - 1, np.float32))
        if index < 0:
            return {name: np.zeros_like(x) for name, x in {**sample, "weights": weights}.items()}
        return {**sample, "weights": weights}


def shapes(batch_size: int, seq_len: int, packing: Literal["none", "documents"]) -> dict[str, jax.ShapeDtypeStruct]:
    """What a training batch over all processes is made of."""
    inputs = (batch_size, seq_len)
    shapes = {"tokens": jax.ShapeDtypeStruct((batch_size, seq_len + 1), np.int32)}
    if packing == "documents":
        shapes["weights"] = jax.ShapeDtypeStruct(inputs, np.float32)
        shapes |= {name: jax.ShapeDtypeStruct(inputs, np.int32) for name in ("segments", "positions")}
    return shapes


class _Order:
    """The endless stream: position -> (source, index of a sample in it)."""

    def __init__(self, samples: Samples | Mixture, seed: int) -> None:
        if isinstance(samples, Mixture):
            self._pick: Callable[[int], tuple[int, int]] = samples.pick
            self._epochs = [_shuffled(len(part), f"{seed} of source {i}") for i, part in enumerate(samples.parts)]
        else:
            self._pick = lambda k: (0, k)
            self._epochs = [_shuffled(len(samples), str(seed))]

    def __getitem__(self, k: int) -> tuple[int, int]:
        source, before = self._pick(k)
        return source, int(self._epochs[source][before])


def _shuffled(count: int, seed: str) -> Any:
    """Permutations of range(count), one after the other, without an end, by index."""
    # grain seeds epoch e with seed + e; hashing keeps epoch 1 of seed 0 apart from epoch 0 of seed 1.
    seed_32 = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest())
    return grain.MapDataset.range(count).shuffle(seed=seed_32).repeat()


def _stacked(samples: Sequence[Batch]) -> Batch:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _ahead(dataset: grain.MapDataset[Batch], prefetch: int) -> Iterator[Batch]:
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))
