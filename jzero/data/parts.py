"""The two parts of every source, and what a run makes of several sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import grain

from jzero.data.corpus import Corpus, Source, open_corpus
from jzero.data.errors import ChangedError, DataError
from jzero.data.order import EvalBatches, Mixture, Samples
from jzero.data.packing import Packed, split_documents
from jzero.data.windows import Windows, split_windows


@dataclass(frozen=True)
class Part:
    """What one source gives.

    Attributes:
        corpus: the source.
        train, held_out: its samples.
    """

    corpus: Corpus
    train: Windows | Packed
    held_out: Windows | Packed


def split_corpus(
    corpus: Corpus, seq_len: int, eval_fraction: float, packing: Literal["none", "documents"] = "none"
) -> Part:
    """The two parts of a corpus, in windows or in rows of documents.

    Raises:
        DataError: one of them has nothing to predict; names the corpus.
    """
    try:
        if packing == "none":
            return Part(corpus, *split_windows(corpus.tokens, seq_len, eval_fraction))
        if corpus.documents is None:
            raise DataError("nothing says where its documents begin")
        return Part(corpus, *split_documents(corpus.tokens, corpus.documents, seq_len, eval_fraction))
    except DataError as error:
        raise DataError(f"{corpus.name}: {error}") from None


def open_parts(
    sources: Sequence[Source],
    *,
    vocab: int,
    seq_len: int,
    eval_fraction: float,
    tokenizer: str | None = None,
    eos: str | int | None = None,
    packing: Literal["none", "documents"] = "none",
) -> list[Part]:
    """The two parts of every source; arguments as in `open_corpus` and `split_corpus`.

    Raises:
        DataError: what is wrong with the first source that cannot be trained on.
    """
    with_documents = packing == "documents"
    try:
        corpora = [
            open_corpus(source, vocab=vocab, tokenizer=tokenizer, eos=eos, documents=with_documents)
            for source in sources
        ]
    except (FileNotFoundError, PermissionError, ChangedError) as error:  # listed, and then gone or not to be read
        raise DataError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    return [split_corpus(corpus, seq_len, eval_fraction, packing) for corpus in corpora]


def describe(parts: Sequence[Part], evals: EvalBatches) -> list[str]:
    """Each source in a line, and how much of the held-out part is evaluated."""
    lines = [
        f"data: {part.corpus.name}: {len(part.train):,} sequences of {part.train.seq_len} {part.corpus.unit}, "
        f"{len(part.held_out):,} more held out"
        for part in parts
    ]
    if evals.sequences < evals.total:
        lines.append(f"evaluation: {evals.sequences:,} of {evals.total:,} held-out sequences (data.eval_batches)")
    elif evals.total:
        lines.append(f"evaluation: all {evals.total:,} held-out sequences")
    return lines


def all_training(parts: Sequence[Part], weights: Sequence[float]) -> Samples | Mixture:
    """What is trained on: the one source, or the mixture of all.

    Raises:
        DataError: the weights do not sum to 1.
    """
    return parts[0].train if len(parts) == 1 else Mixture([part.train for part in parts], weights)


def all_held_out(parts: Sequence[Part]) -> Samples:
    """The held-out parts of all sources after each other; weights are of training alone."""
    filled = [part.held_out for part in parts if len(part.held_out)]
    if len(filled) < 2:
        return filled[0] if filled else parts[0].held_out
    return cast("Samples", grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in filled]))
