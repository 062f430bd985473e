"""What a table of byte bigrams reaches on the default data: a model must be clearly below that to prove anything.

Counts of the training part, one added to each, against the held-out part; nats per byte.

    python examples/benchmarks/byte_bigrams.py
"""

import numpy as np

from jzero import data
from jzero.config import load


def main() -> None:
    settings = load([]).data
    windows, held_out = data.split(data.read(data.files_of(None)), settings.seq_len, settings.eval_fraction)
    counts = np.ones((256, 256))
    for window in windows:
        np.add.at(counts, (window[:-1], window[1:]), 1)
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    losses = [nats[window[:-1], window[1:]].mean() for window in held_out]
    print(f"{np.mean(losses):.3f} nats per byte over {len(held_out):,} held-out windows of {settings.seq_len} bytes")


if __name__ == "__main__":
    main()
