"""Text to token ids: as bytes, or by a `tokenizer.json` of the tokenizers library."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jzero.data.errors import DataError, unreadable

BYTES = 256
SEPARATOR = 0  # between two documents of bytes: a byte that text does not use


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens.

    Attributes:
        name: for people.
        size: ids are below it.
        eos: id that stands between two documents; None for none.
        digest: of all that decides the ids.
        encode: several texts -> their ids, integer arrays.
    """

    name: str
    size: int
    eos: int | None
    digest: str
    encode: Callable[[Sequence[str]], list[np.ndarray]]


def encoding_of(tokenizer: str | None, eos: str | int | None, vocab: int) -> Encoding:
    """The encoding that the settings data.tokenizer and data.eos name.

    Args:
        tokenizer: path of a tokenizer.json; None for bytes.
        eos: name or id of the end-of-document token; None: the byte 0, and none with a tokenizer.
        vocab: what the model has room for.

    Raises:
        DataError: no such file, not a tokenizer.json, more ids than `vocab`, or an `eos` that it does not have.
    """
    return _bytes(eos, vocab) if tokenizer is None else _tokenizer(tokenizer, eos, vocab)


def eos_id(eos: str | int | None, vocab: int) -> int | None:
    """`eos` as an id where there are no names; None stays None.

    Raises:
        DataError: a name, or an id that is not below `vocab`.
    """
    number = _number(eos)
    if eos is not None and number is None:
        raise DataError(f"data.eos = {eos}: a name needs data.tokenizer; give the id")
    if number is not None and not 0 <= number < vocab:
        raise DataError(f"data.eos = {eos}: ids go from 0 to model.vocab - 1 = {vocab - 1}")
    return number


def _number(eos: str | int | None) -> int | None:
    return int(eos) if isinstance(eos, int) or (isinstance(eos, str) and eos.isdecimal()) else None


def _bytes(eos: str | int | None, vocab: int) -> Encoding:
    if vocab < BYTES:
        raise DataError(
            f"model.vocab = {vocab}: text without a tokenizer is read as bytes, which have {BYTES} values; "
            f"set model.vocab to at least {BYTES}, or name data.tokenizer"
        )
    number = eos_id(eos, vocab)
    number = SEPARATOR if number is None else number
    return Encoding(
        name="bytes",
        size=max(BYTES, number + 1),
        eos=number,
        digest="bytes",
        encode=lambda texts: [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts],
    )


def _tokenizer(path: str, eos: str | int | None, vocab: int) -> Encoding:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise unreadable(f"data.tokenizer = {path}", error) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # noqa: BLE001 (the library raises nothing more special)
        raise DataError(f"data.tokenizer = {path}: not a tokenizer.json: {' '.join(str(error).split())}") from None
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 0 < size <= vocab:
        raise DataError(
            f"data.tokenizer = {path}: has {size} token ids, and model.vocab = {vocab}; "
            f"set model.vocab to {size} or more"
        )
    # Files carry what their last user asked for; a corpus is neither cut nor filled up, and text that spells a special
    # token, such as the end of a document, is text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return Encoding(
        name=f"tokenizer {path}",
        size=size,
        eos=_eos_of(tokenizer, path, eos, size),
        digest=hashlib.blake2b(raw, digest_size=16).hexdigest() + f" tokenizers {tokenizers.__version__}",
        encode=functools.partial(_encode, tokenizer, path),
    )


def _encode(tokenizer: Any, path: str, texts: Sequence[str]) -> list[np.ndarray]:
    try:
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    except Exception as error:  # noqa: BLE001 (the library raises no narrower one)
        raise DataError(f"data.tokenizer = {path}: cannot encode the text: {error}") from None
    return [np.asarray(e.ids, np.uint32) for e in encoded]


def _eos_of(tokenizer: Any, path: str, eos: str | int | None, size: int) -> int | None:
    if eos is None:
        return None
    number = _number(eos)
    found = tokenizer.token_to_id(str(eos)) if number is None else number
    if found is None or not 0 <= found < size:
        special = ", ".join(token.content for token in list(tokenizer.get_added_tokens_decoder().values())[:8])
        raise DataError(
            f"data.eos = {eos}: not a token of {path}, whose ids go to {size - 1}; "
            f"its special tokens: {special or 'none'}"
        )
    return found
