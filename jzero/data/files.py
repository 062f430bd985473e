"""Which files a corpus is made of, and what they hold."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jzero.data.errors import DataError, unreadable

Format = Literal["text", "jsonl", "tokens"]

SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".bin": "tokens"}  # all others are text
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def standard_library() -> list[Path]:
    """Python's own library: every .py file of it, without its tests and without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [f for f in _files(root, "**/*.py") if NOT_LIBRARY.isdisjoint(f.relative_to(root).parts)]


def files_of(path: str | None, glob: str = "**/*", key: str = "data.path") -> list[Path]:
    """The files a corpus is made of, in the order in which they are read.

    Args:
        path: a file, or a directory; None for the sources of Python's standard library.
        glob: which files of a directory; hidden ones never belong to it.
        key: the setting that names `path`, for the message of an error.

    Raises:
        DataError: there is no such path, or no such file in it.
    """
    if path is None:
        files, where = standard_library(), "the standard library of this Python"
    else:
        root, where = Path(path), f"{key} = {path}"
        try:
            root.stat()
        except OSError as error:
            raise unreadable(where, error) from None
        files = _files(root, glob) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{where}: no file matches {glob if path else '*.py'}")
    return files


def _files(root: Path, glob: str) -> list[Path]:
    try:
        found = [f for f in root.glob(glob) if f.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"data.glob = {glob}: {error}") from None
    shown = [f for f in found if not any(part.startswith(".") for part in f.relative_to(root).parts)]
    return sorted(shown, key=lambda f: f.relative_to(root).as_posix())


def format_of(files: Sequence[Path]) -> Format:
    """What the files hold, by the ends of their names: .bin, .jsonl or .ndjson, anything else is text.

    Raises:
        DataError: they are of several kinds.
    """
    kinds: dict[Format, Path] = {SUFFIXES.get(f.suffix.lower(), "text"): f for f in files}
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} ({f})" for kind, f in sorted(kinds.items()))
        raise DataError(f"one corpus of several formats: {shown}; choose by data.glob, or say data.format")
    return next(iter(kinds))
