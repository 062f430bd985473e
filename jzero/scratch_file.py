"""A file on one disk in which a process keeps what memory has no room for, for as long as the process lives.

Each process makes a directory of its own in the one it is given, `jzero-tier-…`, with three files: `blocks`, the bytes;
`owner`, who they are of; and `lock`, which is locked (flock) as long as the process lives, however it ends.  A later
one removes what dead processes of this host left behind, and leaves alone whatever is locked, of another host (locks
may not reach over a network), or not understood.

Bytes go past the page cache (O_DIRECT) where the file system can do so: they are used once per step, so that keeping
copies of them costs memory and processor time for nothing, and a fault of the disk is an error of the call that met it.
On others the file is written through (O_DSYNC), for the same reason: a write that fails later, in the page cache's own
time, would leave the old bytes to be read.
"""

import contextlib
import errno
import json
import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

ALIGN = 4096  # bytes: of offsets and sizes that a direct transfer takes, whatever the disk's sectors are
_PREFIX = "jzero-tier-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESUME = "go on from the last checkpoint"


class TierError(RuntimeError):
    """What was kept on a disk is lost, or nothing can be kept there; the message says where, why, and what to do."""


def aligned(nbytes: int) -> np.ndarray:
    """A new uint8 array of `nbytes`, uninitialised, that direct transfers take without copying."""
    raw = np.empty(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


def padded(nbytes: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


class ScratchFile:
    """A file of fixed size whose space is reserved; removed by `close`, at the end of the process, or by the next one.

    Attributes:
        path: of the file.
        direct: whether transfers go past the page cache, and have to be aligned.
    """

    def __init__(self, directory: Path, nbytes: int, owner: str) -> None:
        """Removes what dead processes left in `directory`, makes the file, and reserves its space.

        Args:
            directory: made if it is missing; its parent has to be there, since it may be where the disk is mounted.
            nbytes: a multiple of `ALIGN`.
            owner: of the file, for whoever finds it.

        Raises:
            TierError: it cannot be made, or there is not enough space.
        """
        self.path, self._nbytes = _new_home(directory) / "blocks", nbytes
        lock = FileLock(self.path.with_name("lock"), thread_local=False)
        self._remove = weakref.finalize(self, _remove, self.path.parent, lock, os.getpid())
        try:
            _acquire(lock, directory)
            who = {"owner": owner, "host": platform.node(), "pid": os.getpid()}
            self.path.with_name("owner").write_text(json.dumps(who), encoding="utf-8")
            _reserve(self.path, nbytes)
            self._fd, self._alignment = _opened(self.path, nbytes)
        except OSError as error:
            self._remove()
            raise TierError(f"{directory}: {error.strerror}; name a directory that can be written") from error
        except BaseException:
            self._remove()
            raise
        self.direct = self._alignment > 1
        self._least_blocks = min(os.fstat(self._fd).st_blocks, nbytes // 512)  # fewer where files are compressed
        self._close = weakref.finalize(self, os.close, self._fd)

    def takes(self, data: np.ndarray) -> bool:
        """Whether `read` and `write` can be given this memory."""
        return not self.direct or (data.ctypes.data % self._alignment == 0 and data.nbytes % ALIGN == 0)

    def read(self, out: np.ndarray, offset: int, what: str) -> None:
        """Fills `out` with the bytes at `offset`.

        Args:
            out: uint8, contiguous, of which `takes` is true.
            what: these bytes are, for errors.

        Raises:
            TierError: they cannot be read, or are not those that were written.
        """
        self._transfer(os.preadv, "read", out, offset, what)

    def write(self, data: np.ndarray, offset: int, what: str) -> None:
        """Writes `data` at `offset`; the arguments and errors are those of `read`."""
        self._transfer(os.pwritev, "write", data, offset, what)

    def close(self) -> None:
        """Closes and removes the file and its directory.

        Raises:
            TierError: they cannot be removed.
        """
        self._close()
        try:
            self._remove()
        except OSError as error:
            raise TierError(f"{self.path.parent}: cannot be removed: {error.strerror}; remove it by hand") from error

    def _transfer(self, call: Callable[..., int], verb: str, data: np.ndarray, offset: int, what: str) -> None:
        at, view, done = f"{self.path}: {what}: {verb} of {data.nbytes:,} bytes at {offset:,}", data.data, 0
        try:
            while done < len(view):
                moved = call(self._fd, [view[done:]], offset + done)
                if self.direct and moved < len(view) - done:
                    moved -= moved % ALIGN  # the rest has to be aligned, too
                if moved == 0:
                    self._check(at)
                    raise TierError(f"{at} ended after {done:,}; check the disk, and {_RESUME}")
                done += moved
        except OSError as error:
            remedy = "free space there, or name another disk" if error.errno in _FULL else "check the disk"
            raise TierError(f"{at} failed: {error.strerror}; {remedy}, and {_RESUME}") from error
        self._check(at)

    def _check(self, at: str) -> None:
        """Looks whether the file is whole and in its place: else a read may have got zeros, and a write may be lost.

        To be called after a transfer.  What is cut off may have grown back to its size by another thread's write; the
        blocks that the file had reserved are then missing all the same.
        """
        own = os.fstat(self._fd)
        try:
            there = self.path.stat()
        except OSError:
            raise TierError(
                f"{at} is lost: the file was removed; leave it while the run works, and {_RESUME}"
            ) from None
        if not os.path.samestat(own, there):
            raise TierError(
                f"{at} is lost: the file is now of {_owner(self.path.parent)}; {_RESUME} in another directory"
            )
        if own.st_size != self._nbytes or own.st_blocks < self._least_blocks:
            held = min(own.st_size, own.st_blocks * 512)
            raise TierError(
                f"{at} is lost: the file has {held:,} bytes, not {self._nbytes:,}: it was truncated; {_RESUME}"
            )


def _new_home(directory: Path) -> Path:
    try:
        if not directory.parent.is_dir():
            raise TierError(f"{directory}: {directory.parent} is not there; make it, or mount the disk")
        directory.mkdir(exist_ok=True)
        _remove_stale(directory)
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    except OSError as error:
        raise TierError(f"{directory}: {error.strerror}; name a directory that can be written") from error


def _acquire(lock: FileLock, directory: Path) -> None:
    try:
        lock.acquire(blocking=False)
    except (OSError, NotImplementedError) as error:  # the latter where a file system has no flock at all
        raise TierError(f"{directory}: a file cannot be locked there: {error}; name a directory on a disk") from error


def _remove_stale(directory: Path) -> None:
    """Removes what dead processes of this host left.

    A process takes its lock before it says who it is, so that one that has said so and has no lock is dead.
    """
    for home in sorted(directory.glob(f"{_PREFIX}*")):
        try:
            host = json.loads((home / "owner").read_text(encoding="utf-8"))["host"]
            lock = FileLock(home / "lock", thread_local=False)
            if host == platform.node():
                lock.acquire(blocking=False)
                _remove(home, lock, os.getpid())
        except (OSError, NotImplementedError, ValueError, KeyError, TypeError, Timeout):
            continue  # not ours to judge


def _remove(home: Path, lock: FileLock, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the process that has it
    try:
        # In this order a process that is killed here leaves no space behind, and one that looks for what is stale finds
        # either nobody's directory or a locked one.
        (home / "blocks").unlink(missing_ok=True)
        (home / "owner").unlink(missing_ok=True)
    finally:
        lock.release()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(home)


def _reserve(path: Path, nbytes: int) -> None:
    """Makes the file with all its space, so that a disk is not found full in the middle of a run."""
    directory, stat = path.parent.parent, os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    with path.open("xb") as file:
        try:
            if nbytes > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if error.errno == errno.EFBIG:
                raise TierError(
                    f"{directory}: a file of {nbytes:,} bytes is larger than the file system or the process allows; "
                    f"raise the limit (ulimit -f), or name more disks"
                ) from error
            raise TierError(
                f"{directory}: {nbytes:,} bytes are needed and {free:,} are free{_others(path.parent)}; "
                f"free space there, or name more or larger disks"
            ) from error


def _others(home: Path) -> str:
    held = [path.stat().st_blocks * 512 for path in home.parent.glob(f"{_PREFIX}*/blocks") if path.parent != home]
    return f" ({home.parent / _PREFIX}* of other runs hold {sum(held):,})" if held else ""


def _owner(home: Path) -> str:
    try:
        return json.dumps(json.loads((home / "owner").read_text(encoding="utf-8"))["owner"])
    except (OSError, ValueError, KeyError, TypeError):
        return "somebody else"


def _opened(path: Path, nbytes: int) -> tuple[int, int]:
    """A descriptor, and what memory has to be aligned to; to 1 if the file is not direct.

    Some file systems refuse the flag, others the transfers, and drivers of disks ask for more or less of memory: NVMe's
    takes every array of numpy and JAX, some of virtual disks none.
    """
    if nbytes and (flag := getattr(os, "O_DIRECT", 0)):
        with _refused(), contextlib.ExitStack() as stack:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flag)
            stack.callback(os.close, fd)
            for alignment in (16, 512, ALIGN):
                with _refused():
                    os.pwritev(fd, [aligned(2 * ALIGN)[alignment:][:ALIGN].data], 0)
                    stack.pop_all()
                    return fd, alignment
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DSYNC), 1


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
