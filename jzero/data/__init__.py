"""Batches out of text, JSONL and token files, in an order that is a function of the seed alone.

A *corpus* is a stream of tokens and the places where its documents begin.  What is read decides the documents: a text
file is one, a line of JSONL is one, in a token file one ends after each end-of-document token (`eos`).  Between two
documents of text stands `eos`; text as bytes has the byte 0 for it, which text does not use.

A *sample* is a row of seq_len predicted tokens, and there are two ways to cut a corpus into samples:

- windows (`windows.py`): the stream in pieces of seq_len + 1 tokens, whatever documents they hold.
- packed rows (`packing.py`): each row holds whole documents, and no token sees another document.

Both predict every token at most once per epoch, and both hold a part of every corpus out: windows the end of each of
at most 64 equal spans, packed rows whole documents, evenly spread.  Held out means held out by position.  Text that
repeats itself is in both parts: some of the standard library's held-out windows stand verbatim in the training part
(code pages, boilerplate), and a model's loss is lower there.  Compare models on one split with each other, not with
results on other text.

Training reads an endless stream of samples (`order.py`): epochs, each a permutation of all samples drawn from
(seed, epoch), or a mixture of several such streams by weight.  Nothing else enters: not the batch size, not the mesh,
not the number of processes, not what was read before.  A batch is the next batch_size samples.  Reading can start after
any number of samples, and a process reads some rows of every batch only.
"""

from jzero.data.corpus import Corpus, Source, open_corpus
from jzero.data.errors import ChangedError, DataError
from jzero.data.files import files_of, standard_library
from jzero.data.order import Batch, EvalBatches, Mixture, batches, sample_ids, shapes
from jzero.data.packing import Packed, split_documents
from jzero.data.parts import Part, all_held_out, all_training, describe, open_parts, split_corpus
from jzero.data.windows import Windows, split_windows

__all__ = [
    "Batch",
    "ChangedError",
    "Corpus",
    "DataError",
    "EvalBatches",
    "Mixture",
    "Packed",
    "Part",
    "Source",
    "Windows",
    "all_held_out",
    "all_training",
    "batches",
    "describe",
    "files_of",
    "open_corpus",
    "open_parts",
    "sample_ids",
    "shapes",
    "split_corpus",
    "split_documents",
    "split_windows",
    "standard_library",
]
