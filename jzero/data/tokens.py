"""Tokens in files: read where they are asked for, never mapped into memory.

A map of a file that shrinks kills the process at the next access.  A read tells: before each one the file's size and
time of change are compared with those at the start, and what has changed is an error that names the file.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jzero.data.errors import ChangedError, DataError, unreadable

KEPT_OPEN = 64  # files of one corpus that stay open; with more of them each read opens its file
CHUNK = 1 << 22  # tokens looked at together

_LLM_C = 20240520  # first 32 bits of a file with the header of llm.c, 1,024 bytes


class TokenArray(Protocol):
    """Tokens that can be cut: a numpy array, or `Tokens`."""

    def __len__(self) -> int:
        """How many."""
        ...

    def __getitem__(self, cut: slice, /) -> Any:
        """Those of a slice without a step, as an integer array."""
        ...


class TokenFile:
    """Little-endian unsigned integers in a file.

    Attributes:
        path: of the file.
        dtype: of its numbers: uint8, uint16 or uint32.
        count: how many there are.
    """

    def __init__(self, path: Path, dtype: str, *, keep_open: bool = True) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._keep_open, self._fd, self._lock = keep_open, None, threading.Lock()
        self._born = identity_of(path)
        size = self._born[0]
        if size % self.dtype.itemsize:
            raise DataError(f"{path}: {size:,} bytes are no whole number of {dtype} tokens; see data.dtype")
        self.count = size // self.dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop - 1, in the file's dtype.

        Raises:
            ChangedError: the file is no longer what it was.
            OSError: it cannot be read.
        """
        if self._keep_open:
            return self._read(self._open_once(), start, stop)
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return self._read(fd, start, stop)
        finally:
            os.close(fd)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(where it begins, tokens) of pieces that make up the file."""
        for start in range(0, self.count, CHUNK):
            yield start, self.read(start, min(start + CHUNK, self.count))

    def _open_once(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._fd)
            return self._fd

    def _read(self, fd: int, start: int, stop: int) -> np.ndarray:
        now = _identity(os.fstat(fd))
        if now != self._born:
            raise self._changed(now[0])
        offset, wanted = start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize
        parts: list[bytes] = []
        while wanted:
            part = os.pread(fd, wanted, offset)  # may give less than it was asked for
            if not part:
                raise self._changed(os.fstat(fd).st_size)
            parts.append(part)
            offset, wanted = offset + len(part), wanted - len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)

    def _changed(self, size: int) -> ChangedError:
        before = self._born[0]
        how = f"had {before:,} bytes and now has {size:,}" if size != before else "was written to"
        return ChangedError(f"{self.path}: changed while it was read: it {how}; the run cannot go on with other data")


def identity_of(path: Path) -> tuple[int, int]:
    """Size and time of change of a file: another one, another content.

    Raises:
        DataError: there is no such file.
    """
    try:
        return _identity(path.stat())
    except OSError as error:
        raise unreadable(path, error) from None


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


class Tokens:
    """The tokens of several files after each other, a separator between two files if there is one.

    Attributes:
        files: in order.
        begins: int64[files], where each begins.
    """

    def __init__(self, files: Sequence[TokenFile], separator: int | None = None) -> None:
        self.files = files
        self._separator = separator
        steps = np.array([f.count + (separator is not None) for f in files], np.int64)
        self.begins = np.cumsum(steps) - steps
        self._len = int(steps.sum()) - (separator is not None)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, cut: slice) -> np.ndarray:
        """Tokens cut.start … cut.stop - 1, int32."""
        start, stop, _ = cut.indices(self._len)
        out = np.full(max(0, stop - start), self._separator or 0, np.int32)
        first, last = np.searchsorted(self.begins, [start, stop], side="right")
        for file, begin in zip(
            self.files[max(0, first - 1) : last], self.begins[max(0, first - 1) : last], strict=True
        ):
            low, high = max(start, int(begin)), min(stop, int(begin) + file.count)
            if low < high:
                out[low - start : high - start] = file.read(low - int(begin), high - int(begin))
        return out


def token_files(paths: Sequence[Path], dtype: str) -> list[TokenFile]:
    """The files, open as long as there are few of them.

    Raises:
        DataError: one is not there, or not a whole number of tokens.
    """
    return [TokenFile(path, dtype, keep_open=len(paths) <= KEPT_OPEN) for path in paths]


def dtype_for(vocab: int) -> str:
    """The smallest of uint16 and uint32 that ids below `vocab` fit in: what the usual writers of token files take."""
    return "uint16" if vocab <= 2**16 else "uint32"


def check_form(file: TokenFile) -> None:
    """Whether the beginning of a file looks like tokens of its dtype.

    Raises:
        DataError: it is empty, has a header, or looks like numbers of the other size.
    """
    if not file.count:
        raise DataError(f"{file.path}: empty")
    head = file.read(0, min(file.count, CHUNK))
    raw = head.tobytes()
    if len(raw) >= 1024 and int.from_bytes(raw[:4], "little") == _LLM_C:
        raise DataError(f"{file.path}: begins with the header of llm.c; cut it off: tail -c +1025 FILE > NEW")
    if file.dtype.itemsize == 2 and head.size % 2 == 0 and head.size >= 64:
        low, high = head[::2], head[1::2]
        if high.max() < 16 <= low.max():  # ids below 2^20 in 32 bits; no text of 16-bit ids is like that
            raise DataError(f"{file.path}: looks like uint32 and would be read as uint16; say data.dtype = uint32")


def scan(file: TokenFile, vocab: int, eos: int | None) -> np.ndarray:
    """Where documents end in a file, after the first to the last `eos`; int64, empty where `eos` is None.

    Reads all of the file, unless its numbers cannot be too large and no `eos` is asked for.

    Raises:
        DataError: a token id that is not below `vocab`.
    """
    if eos is None and np.iinfo(file.dtype).max < vocab:
        return np.zeros(0, np.int64)
    ends: list[np.ndarray] = []
    for start, chunk in file.chunks():
        if chunk.max() >= vocab:
            at = int(np.argmax(chunk >= vocab))
            raise DataError(
                f"{file.path}: token {start + at:,} (from 0) has the id {chunk[at]}, but model.vocab = {vocab}, "
                f"so ids go to {vocab - 1}; read as {file.dtype.name} (data.dtype)"
            )
        if eos is not None:
            ends.append(np.flatnonzero(chunk == eos) + start + 1)
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)
