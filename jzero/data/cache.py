"""Text that is tokenized once: token files in the user's cache directory, named by what they were made of.

The name is a hash of the contents of all files, of the tokenizer and of what else decides the tokens, so nothing stale
is ever found.  A directory appears under its name when it is complete, and not before: several processes may make the
same one at the same time, and one of them wins.  Whatever is there may be deleted at any time between runs.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import platformdirs
from tqdm import tqdm

from jzero.data.errors import DataError, unreadable
from jzero.data.text import Piece
from jzero.data.tokenizer import Encoding
from jzero.data.tokens import TokenFile, dtype_for, identity_of

VERSION = 1  # of the way from text to tokens; another one makes other names
TOKENS, DOCUMENTS = "tokens.bin", "documents.bin"
_BATCH_BYTES = 1 << 23  # of text that the tokenizer's threads share at a time


def directory() -> Path:
    """Where tokenized text is kept (XDG_CACHE_HOME moves it)."""
    return platformdirs.user_cache_path("jzero") / "tokens"


def tokenized(
    files: Sequence[Path], pieces: Iterable[Piece], encoding: Encoding, how: Sequence[str]
) -> tuple[TokenFile, np.ndarray]:
    """The tokens of `pieces`, from the cache or made now, and where its documents begin.

    Args:
        files: that the pieces are read from.
        pieces: read only if they have to be.
        how: what else decides the tokens.

    Returns:
        The tokens, `encoding.eos` between two documents; int64[documents + 1], the last of them their number.

    Raises:
        DataError: what `pieces` raises; a file that changed meanwhile; a damaged directory.
    """
    before = [identity_of(f) for f in files]
    key = json.dumps([VERSION, list(how), encoding.digest, encoding.eos, [_digest(f) for f in files]])
    home = directory() / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    dtype = dtype_for(encoding.size)
    if not home.exists():
        _make(home, pieces, encoding, dtype, sum(size for size, _ in before))
        changed = next((f for f, was in zip(files, before, strict=True) if identity_of(f) != was), None)
        if changed is not None:
            shutil.rmtree(home)
            raise DataError(f"{changed}: changed while it was tokenized; start again when nothing writes to it")
    return _opened(home, dtype)


def _opened(home: Path, dtype: str) -> tuple[TokenFile, np.ndarray]:
    tokens = TokenFile(home / TOKENS, dtype)
    documents = np.fromfile(home / DOCUMENTS, "<i8")
    if not documents.size or documents[-1] != tokens.count:
        raise DataError(f"{home}: is damaged; delete it, and the text is tokenized again")
    return tokens, documents.astype(np.int64)


def _make(home: Path, pieces: Iterable[Piece], encoding: Encoding, dtype: str, nbytes: int) -> None:
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=home.parent, prefix="."))
    try:
        with (
            (unfinished / TOKENS).open("wb") as tokens,
            tqdm(total=nbytes, unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar,
        ):
            documents = _write(tokens, _batched(pieces, bar), encoding, dtype)
            _flush(tokens)
        with (unfinished / DOCUMENTS).open("wb") as file:
            documents.astype("<i8").tofile(file)
            _flush(file)
        try:
            unfinished.rename(home)
        except OSError:
            if not home.exists():  # else another process was quicker, with the same contents
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _batched(pieces: Iterable[Piece], bar: tqdm) -> Iterator[list[Piece]]:
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += piece.nbytes
        if size >= _BATCH_BYTES:
            yield batch
            bar.update(size)
            batch, size = [], 0
    if batch:
        yield batch
    bar.update(size)


def _write(file: BinaryIO, batches: Iterable[list[Piece]], encoding: Encoding, dtype: str) -> np.ndarray:
    """Writes all tokens; where each document begins, and their end."""
    begins, count = list[int](), 0
    for batch in batches:
        parts = list[np.ndarray]()
        for piece, ids in zip(batch, encoding.encode([p.text for p in batch]), strict=True):
            if piece.first:
                if begins and encoding.eos is not None:
                    parts.append(np.array([encoding.eos]))
                    count += 1
                begins.append(count)
            parts.append(ids)
            count += len(ids)
        np.concatenate(parts).astype(np.dtype(dtype).newbyteorder("<")).tofile(file)
    return np.array([*begins, count], np.int64)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise unreadable(path, error) from None
