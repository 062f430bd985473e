"""What a table of byte bigrams reaches on the default data: a model must be clearly below that to prove anything.

Counts of the training part, one added to each, against the held-out part; nats per byte.

    python examples/benchmarks/byte_bigrams.py
"""

import numpy as np

from jzero import data
from jzero.config import load


def main() -> None:
    settings = load([]).data
    corpus = data.open_corpus(data.Source(), vocab=256)
    windows, held_out = data.split_windows(corpus.tokens, settings.seq_len, settings.eval_fraction)
    counts = np.ones((256, 256))
    for i in range(len(windows)):
        window = windows[i]["tokens"]
        np.add.at(counts, (window[:-1], window[1:]), 1)
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    rows = [held_out[i]["tokens"] for i in range(len(held_out))]
    losses = [nats[row[:-1], row[1:]].mean() for row in rows]
    print(f"{np.mean(losses):.3f} nats per byte over {len(held_out):,} held-out windows of {settings.seq_len} bytes")


if __name__ == "__main__":
    main()
