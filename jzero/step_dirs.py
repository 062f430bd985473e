"""The directories of steps: which there are, and how one goes or makes room."""

import contextlib
import itertools
import re
import shutil
import time
from pathlib import Path

UNFINISHED = ".orbax-checkpoint-tmp"  # in the names that Orbax writes under
GONE = f"{UNFINISHED}-removed"  # so that what is left of a step is cleaned up with the rest
_TRIES = 20  # a tenth of a second apart


def named(directory: Path) -> list[Path]:
    """All that has the name of a step, files too."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name)]


def numbers(directory: Path) -> list[int]:
    """Of the complete steps, ascending."""
    return sorted(int(path.name) for path in named(directory) if path.is_dir())


def check_writable(directory: Path) -> None:
    """Makes `directory` where it is missing, and sees that something can be made in it.

    Raises:
        OSError: it cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f"probe{UNFINISHED}"
    probe.mkdir(exist_ok=True)
    probe.rmdir()


def set_aside_after(directory: Path, step: int) -> None:
    """Sets aside all that has the name of a later step, and what has the name of one and is no directory.

    Raises:
        OSError: it cannot be renamed.
    """
    for path in named(directory):
        if int(path.name) > step or not path.is_dir():
            set_aside(path)


def set_aside(path: Path) -> None:
    """Gives a step another name, under which nobody looks for it: `12.replaced`, or `12.replaced-2` if there is one."""
    names = (f"{path.name}.replaced{suffix}" for suffix in itertools.chain([""], (f"-{i}" for i in itertools.count(2))))
    path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))


def remove(path: Path) -> None:
    """Removes a step; a kill in between leaves no step that is half there."""
    gone = path.with_name(f"{path.name}{GONE}")
    path.rename(gone)
    with contextlib.suppress(OSError):  # what stays is cleared before the next save of another session
        clear(gone)


def clear(path: Path) -> None:
    """Removes an unfinished step, into which writes may still go that end after another one has failed.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_symlink():  # somebody keeps a step elsewhere: the link goes
        path.unlink()
        return
    for _ in range(_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.1)
    shutil.rmtree(path)
