"""The stream of a corpus in windows of equal size; windows of one piece overlap by one token."""

from dataclasses import dataclass

import numpy as np

from jzero.data.errors import DataError
from jzero.data.tokens import TokenArray

SPANS = 64  # pieces the held-out part is spread over; fewer when the corpus is small


@dataclass(frozen=True)
class Windows:
    """Sequences of `seq_len` + 1 tokens out of one stream: what grain calls a random access source.

    Attributes:
        tokens: all of the corpus.
        starts: int64[count], where each window begins.
        seq_len: predicted tokens of a window.
    """

    tokens: TokenArray
    starts: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Window `index`: "tokens" int32[seq_len + 1]."""
        start = int(self.starts[index])
        return {"tokens": self.tokens[start : start + self.seq_len + 1].astype(np.int32, copy=False)}


def split_windows(tokens: TokenArray, seq_len: int, eval_fraction: float) -> tuple[Windows, Windows]:
    """(training, held-out) windows of a corpus; they share no token.

    The stream is cut into equal spans, at most 64; the last `eval_fraction` of each is held out, so evaluation sees
    text from everywhere.

    Args:
        tokens: of the whole corpus.
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


def _windows(tokens: TokenArray, begins: np.ndarray, ends: np.ndarray, seq_len: int) -> Windows:
    pieces = [np.arange(b, e - seq_len, seq_len, dtype=np.int64) for b, e in zip(begins, ends, strict=True)]
    return Windows(tokens, np.concatenate(pieces), seq_len)
