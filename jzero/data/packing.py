"""Rows that hold whole documents: packing with boundaries, as a pure function of the documents' lengths.

A row has seq_len + 1 places.  A document that fits takes as many places as it has tokens, and its first token is
predicted by nothing, so its loss is that of the document alone.  A longer one is cut into pieces that overlap by one
token, a full row each; what is left over is packed like a document, and attention and positions begin anew with each
piece.  Every token with a predecessor in its document is predicted once per epoch, wherever the cuts are.

Which row a document goes to: the open row with the least room that it fits in, the one opened last among equals, else
a new row (best fit; Johnson et al. 1974).  Ding et al. 2024 pack the same way, sorted by length; here documents keep
their order, and about a percent of the places stays empty for lengths as they are in text.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Self

import numpy as np

from jzero.data.errors import DataError
from jzero.data.tokens import TokenArray


@dataclass(frozen=True)
class Packed:
    """Rows of documents out of one stream: what grain calls a random access source.

    Attributes:
        tokens: all of the corpus.
        starts: int64[pieces], where each begins, in the order of rows.
        lengths: int64[pieces], tokens of each.
        firsts: int64[rows + 1], the first piece of each row, and the number of pieces.
        seq_len: predicted tokens of a row.
    """

    tokens: TokenArray
    starts: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray
    seq_len: int

    @classmethod
    def of(cls, tokens: TokenArray, begins: np.ndarray, ends: np.ndarray, seq_len: int) -> Self:
        """The rows of the documents tokens[begins[i] : ends[i]]; those of one token have nothing to predict.

        Args:
            begins, ends: int64[documents].
        """
        counts = np.maximum(0, -(-(ends - begins - 1) // seq_len))  # pieces of each document
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(begins, counts) + within * seq_len
        lengths = np.minimum(np.repeat(ends, counts) - starts, seq_len + 1)
        rows = best_fit(lengths, seq_len + 1)
        order = np.argsort(rows, kind="stable")
        firsts = np.concatenate([[0], np.cumsum(np.bincount(rows))]) if len(rows) else np.zeros(1, np.int64)
        return cls(tokens, starts[order], lengths[order], firsts.astype(np.int64), seq_len)

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`.

        Returns:
            "tokens" int32[seq_len + 1]; "weights" float32[seq_len], 1 for a target of the same piece as its input;
            "segments" int32[seq_len], the number of each input's piece in the row, from 0; "positions"
            int32[seq_len], of each input in its piece.  Padding is a segment of its own.
        """
        size = self.seq_len + 1
        tokens, weights = np.zeros(size, np.int32), np.zeros(size, np.float32)
        segments, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        at, number = 0, 0
        for number, piece in enumerate(range(self.firsts[index], self.firsts[index + 1]), start=1):
            start, length = int(self.starts[piece]), int(self.lengths[piece])
            here = slice(at, at + length)
            tokens[here] = self.tokens[start : start + length]
            weights[at : at + length - 1] = 1.0
            segments[here], positions[here] = number - 1, np.arange(length)
            at += length
        segments[at:], positions[at:] = number, np.arange(size - at)
        inputs = slice(0, self.seq_len)
        return {
            "tokens": tokens,
            "weights": weights[inputs],
            "segments": segments[inputs],
            "positions": positions[inputs],
        }


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, int64[pieces]; rows are numbered in the order in which they are opened.

    Args:
        lengths: of the pieces, at least 2 and at most `capacity`.
    """
    rows = np.zeros(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms: list[int] = []  # those that some row has, ascending
    opened = 0
    for i, length in enumerate(lengths.tolist()):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room, opened = opened, capacity, opened + 1
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(at)
        rows[i] = row
        room -= length
        if room >= 2:  # a piece needs an input and a target
            if not with_room[room]:
                insort(rooms, room)
            with_room[room].append(row)
    return rows


def split_documents(
    tokens: TokenArray, documents: np.ndarray, seq_len: int, eval_fraction: float
) -> tuple[Packed, Packed]:
    """(training, held-out) rows of a corpus; whole documents are held out, evenly spread over it.

    Args:
        tokens: of the whole corpus.
        documents: int64[count + 1], where each begins, and the end of the last.
        seq_len: predicted tokens of a row.
        eval_fraction: part of the documents that is held out; 0 for none.

    Raises:
        DataError: one of the two parts has nothing to predict.
    """
    begins, ends = documents[:-1], documents[1:]
    marks = np.floor(np.arange(len(begins) + 1) * eval_fraction + 0.5)
    chosen = np.diff(marks) > 0
    train, held_out = (Packed.of(tokens, begins[pick], ends[pick], seq_len) for pick in (~chosen, chosen))
    for name, part in (("training", train), ("held-out", held_out)):
        if not len(part) and (name == "training" or eval_fraction):
            raise DataError(
                f"the {name} part of {len(begins):,} documents has nothing to predict: data.eval_fraction = "
                f"{eval_fraction}; whole documents are held out (data.packing = none cuts anywhere)"
            )
    return train, held_out
