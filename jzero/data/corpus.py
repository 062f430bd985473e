"""A corpus: what a path holds, as one stream of tokens with the places where documents begin."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jzero.data.cache import tokenized
from jzero.data.errors import DataError
from jzero.data.files import Format, files_of, format_of
from jzero.data.text import jsonl_pieces, text_pieces
from jzero.data.tokenizer import Encoding, encoding_of, eos_id
from jzero.data.tokens import TokenArray, TokenFile, Tokens, check_form, dtype_for, scan, token_files

LOOKED_AT = 1 << 16  # first bytes of a file that tell whether it is text


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from.

    Attributes:
        path: a file, or a directory; None for the sources of Python's standard library.
        glob: which files of a directory.
        format: of the files; "auto" goes by the ends of their names.
        text_key: where the text is in an object of JSONL.
        dtype: of token files; "auto" is uint16 where the vocabulary fits, else uint32.
        weight: part of the samples that come from here.
        key: the setting that names the path, for messages.
    """

    path: str | None = None
    glob: str = "**/*"
    format: Format | Literal["auto"] = "auto"
    text_key: str = "text"
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    weight: float = 1.0
    key: str = "data.path"

    @property
    def name(self) -> str:
        """For people."""
        return "the standard library" if self.path is None else self.path


@dataclass(frozen=True)
class Corpus:
    """A stream of tokens.

    Attributes:
        tokens: all of it.
        documents: int64[count + 1], where each document begins, and the end of the last; None where nothing says it.
        name: for people.
        unit: what a token is: "bytes" or "tokens".
    """

    tokens: TokenArray
    documents: np.ndarray | None
    name: str
    unit: str


def open_corpus(
    source: Source, *, vocab: int, tokenizer: str | None = None, eos: str | int | None = None, documents: bool = False
) -> Corpus:
    """The corpus of a source, checked against the vocabulary.

    Text is tokenized here, or found in the cache; token files are read once, for ids that are too large.

    Args:
        vocab: ids must be below it.
        tokenizer: path of a tokenizer.json; None reads text as bytes.
        eos: name or id of the end-of-document token.
        documents: their places are needed.

    Raises:
        DataError: what is wrong, with file and place.
    """
    files = files_of(source.path, source.glob, source.key)
    kind = format_of(files) if source.format == "auto" else source.format
    if kind == "tokens":
        number = eos_id(eos, vocab) if tokenizer is None else encoding_of(tokenizer, eos, vocab).eos
        return _from_token_files(files, source, vocab, number, documents=documents)
    encoding = encoding_of(tokenizer, eos, vocab)
    if sum(TokenFile(f, "uint8").count for f in files) == 0:
        raise DataError(f"no data: {files[0] if len(files) == 1 else f'all {len(files)} files'} empty")
    if kind == "text" and tokenizer is None:
        return _from_bytes(files, source, encoding)
    pieces = text_pieces(files) if kind == "text" else jsonl_pieces(files, source.text_key)
    file, begins = tokenized(files, pieces, encoding, [kind, source.text_key if kind == "jsonl" else ""])
    if not file.count:
        raise DataError(f"{source.key} = {source.path}: no document in it has a token")
    return Corpus(Tokens([file]), begins, source.name, "bytes" if tokenizer is None else "tokens")


def _from_bytes(files: Sequence[Path], source: Source, encoding: Encoding) -> Corpus:
    opened = token_files(files, "uint8")
    for file in opened:
        if not file.read(0, min(file.count, LOOKED_AT)).all():
            raise DataError(
                f"{file.path}: holds zero bytes, so it is no text; token files are bare numbers in a .bin, "
                f"or name data.format"
            )
    tokens = Tokens(opened, encoding.eos)
    return Corpus(tokens, np.append(tokens.begins, len(tokens)), source.name, "bytes")


def _from_token_files(paths: Sequence[Path], source: Source, vocab: int, eos: int | None, *, documents: bool) -> Corpus:
    if documents and eos is None:
        raise DataError(
            f"{source.key} = {source.path}: where documents of token files end is told by data.eos; name it"
        )
    files = token_files(paths, dtype_for(vocab) if source.dtype == "auto" else source.dtype)
    for file in files if source.dtype == "auto" else ():
        check_form(file)
    ends = [scan(file, vocab, eos if documents else None) for file in files]
    tokens = Tokens(files)
    if not len(tokens):
        raise DataError(f"{source.key} = {source.path}: empty")
    if not documents:
        return Corpus(tokens, None, source.name, "tokens")
    # A document ends with its file as well: what follows is in another one by no more than chance.
    edges = [tokens.begins, *(end + begin for end, begin in zip(ends, tokens.begins, strict=True)), [len(tokens)]]
    return Corpus(tokens, np.unique(np.concatenate(edges)), source.name, "tokens")
