"""How a process ends: what it says last, under which name, with which status, and how it leaves those that wait for it.

One of several processes says what is its own under its name, "process 1 of 2: ...".  What all of them have to say is
said by the first.
"""

import os
import select
import sys
import time
import traceback
from types import TracebackType
from typing import NoReturn

LOST = os.EX_TEMPFAIL  # 75: another process or a device is gone, and another start may well go on
_LAST_S = 2.0  # the first process leaves so much later: JAX aborts those that find it gone, on a busy machine too
_STDERR = 2
_me: tuple[int, int | None] | None = None  # JAX would start a backend to tell


def is_one_of(process: int, processes: int | None) -> None:
    """From here on this process has a name and peers, and an exception that nobody catches ends it at once.

    Args:
        process: index of this one.
        processes: how many there are; None if only JAX knows.
    """
    global _me  # noqa: PLW0603
    _me = process, processes
    sys.excepthook = _uncaught


def named(text: object) -> str:
    """What this process says, under its name; the text alone where it has no peers."""
    if _me is None:
        return str(text)
    process, processes = _me
    return f"process {process}{'' if processes is None else f' of {processes}'}: {text}"


def all_failed(error: object, status: int) -> int:
    """Says what all processes have to say, and returns the status; if there are several, all leave.

    Threads may wait for what does not come, and JAX's own way out may end a process that has not come as far.
    """
    if _is_first():
        _print(f"error: {_line(error)}")
        if _me is not None:
            time.sleep(_LAST_S)
    return _leaving(status)


def failed(error: object, status: int) -> int:
    """Says what this process alone has to say, and returns the status; if it has peers, it leaves them."""
    _print(f"error: {named(_line(error))}")
    return _leaving(status)


def ended(text: object, status: int) -> int:
    """`failed`, where nothing went wrong."""
    _print(named(_line(text)))
    return _leaving(status)


def tell(text: str) -> None:
    """Writes to stderr, past its locks, which the main thread may hold; not at all where it would have to wait."""
    if select.select([], [_STDERR], [], 0)[1]:
        os.write(_STDERR, f"{text}\n".encode())


def leave(status: int) -> NoReturn:
    """Ends this process at once: on the usual way out JAX waits for the others, who may be waiting for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _is_first() -> bool:
    return _me is None or _me[0] == 0


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _print(line: str) -> None:
    print(f"{line}\n", end="", file=sys.stderr)  # one write: JAX may print meanwhile


def _leaving(status: int) -> int:
    if _me is not None:
        leave(status)
    return status


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    traceback.print_exception(kind, error, trace)
    _print(f"error: {named(kind.__name__)}")  # others write into the same log
    leave(1)
