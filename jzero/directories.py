"""What is written is there whole or not at all, or is refused before."""

import os
from pathlib import Path


def obstacle(path: Path) -> str | None:
    """Why nothing can be written in a directory `path`, made where it is missing; None if nothing stands in the way.

    Makes nothing.
    """
    try:
        broken = next((p for p in (path, *path.parents) if p.is_symlink() and not p.exists()), None)
        there = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        return error.strerror
    if broken:
        return f"{broken} is a link to what is not there"
    if not there.is_dir():
        return f"{there} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} is not writable"
    return None


def write_whole(path: Path, data: bytes) -> None:
    """Replaces what is at `path`; killed at any moment, it leaves the old or the new."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
