"""Documents out of text and JSONL files, in pieces of bounded size; what is broken is named by file and place."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jzero.data.errors import DataError

PIECE_BYTES = 1 << 20  # of text that is tokenized in one go


class Piece(NamedTuple):
    """A document, or a part of one that is too long to be tokenized in one go.

    Attributes:
        first: it begins a document.
        text: of the piece.
        nbytes: read for it.
    """

    first: bool
    text: str
    nbytes: int


def text_pieces(files: Sequence[Path]) -> Iterator[Piece]:
    """Each file as a document.

    A file larger than `PIECE_BYTES` is cut at the ends of lines, where a line that does not begin with white space
    follows: tokenizers do not join tokens across such a place.

    Raises:
        DataError: a file is not UTF-8; names the byte.
    """
    for path in files:
        first, offset, left = True, 0, b""
        with path.open("rb") as file:
            while block := file.read(PIECE_BYTES):
                left += block
                cut = _cut(left)
                if cut:
                    yield Piece(first, _decoded(left[:cut], path, offset), cut)
                    first, offset, left = False, offset + cut, left[cut:]
        if left or first:
            yield Piece(first, _decoded(left, path, offset), len(left))


def _cut(data: bytes) -> int:
    """After the last line that a line without leading white space follows; 0 if there is none."""
    at = len(data) - 1
    while (at := data.rfind(b"\n", 0, at)) >= 0:
        if not data[at + 1 : at + 2].isspace():
            return at + 1
    return 0


def _decoded(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {offset + error.start:,} is not UTF-8; a tokenizer needs text (without one, data are bytes)"
        ) from None


def jsonl_pieces(files: Sequence[Path], key: str) -> Iterator[Piece]:
    """Each line's text under `key` as a document; empty lines are none.

    Raises:
        DataError: a line is not a JSON object, or has no text under `key`; names file and line.
    """
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Piece(True, _text_of(line, key, f"{path}, line {number}"), len(line))


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg}, column {error.colno}") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where}: {str(error).partition(';')[0]}") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: must be an object with the key {key!r} (data.text_key), not {_kind(value)}")
    if key not in value:
        there = ", ".join(map(repr, list(value)[:8])) or "none"
        raise DataError(f"{where}: has no key {key!r} (data.text_key); its keys: {there}")
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {key!r} must be text, not {_kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {key!r} has half a surrogate pair, {text[error.start]!a}") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "text"}
    return names.get(type(value), "a number")
