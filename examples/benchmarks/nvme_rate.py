"""How fast blocks go to disk and back, against the plain sequential rate of the same disks in the same run.

Three loads: all blocks written, all read, and both as a training step does it (block k+1 is read and block k-1 written
while k is in hand).  Plain is one file per disk that one thread per direction goes through in requests of 16 MiB, past
the page cache where the file system can do so: what `dd` does.  The two take turns, and so does who begins; a ratio is
the median of those of the rounds, in each of which the two ran one after the other.

    python examples/benchmarks/nvme_rate.py [--dir DIRECTORY ...] [--gigabytes 2] [--block_megabytes 256] [--rounds 5]
"""

import argparse
import contextlib
import itertools
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jzero.block_files import PIECE_BYTES, THREADS, BlockFiles, aligned

REQUEST = 16 * 2**20
LOADS = ("write", "read", "both")


class Plain:
    """A file on each disk, and nothing but a loop over it."""

    def __init__(self, directories: Sequence[Path], nbytes: int) -> None:
        self._per_disk = max(REQUEST, nbytes // len(directories) // REQUEST * REQUEST)
        self.nbytes = self._per_disk * len(directories)
        self._files = [opened(directory / "plain", self._per_disk) for directory in directories]
        self._out, self._in = aligned(REQUEST), aligned(REQUEST)
        self._out[:] = random_bytes(REQUEST)

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def run(self, load: str) -> None:
        directions = {"write": [self._write], "read": [self._read], "both": [self._read, self._write]}[load]
        with ThreadPoolExecutor(2 * len(self._files)) as pool:
            for done in [pool.submit(move, file) for move in directions for file in self._files]:
                done.result()

    def _write(self, file: int) -> None:
        for at in range(0, self._per_disk, REQUEST):
            if os.pwritev(file, [self._out.data], at) != REQUEST:
                raise RuntimeError("a short write")

    def _read(self, file: int) -> None:
        for at in range(0, self._per_disk, REQUEST):
            if os.preadv(file, [self._in.data], at) != REQUEST:
                raise RuntimeError("a short read")


class Blocks:
    """The same bytes as blocks; three of them are in memory."""

    def __init__(self, directories: Sequence[Path], nbytes: int, block: int, shift: int) -> None:
        self._names = [str(i) for i in range(max(2, nbytes // block))]
        self.nbytes = block * len(self._names)
        self._buffers = [aligned(block + shift)[shift:] for _ in range(3)]
        for buffer in self._buffers:
            buffer[:] = random_bytes(block)
        self.files = BlockFiles(directories, dict.fromkeys(self._names, block), "nvme_rate")

    def run(self, load: str) -> None:
        {"write": self._write, "read": self._read, "both": self._both}[load]()

    def _write(self) -> None:
        self._one_behind(self.files.write)

    def _read(self) -> None:
        self._one_behind(self.files.read)

    def _one_behind(self, call: Callable[..., Any]) -> None:
        under_way = []
        for name, buffer in zip(self._names, itertools.cycle(self._buffers), strict=False):
            under_way.append(call(name, buffer))
            if len(under_way) == 2:
                under_way.pop(0).result()
        for done in under_way:
            done.result()

    def _both(self) -> None:
        buffers, written = itertools.cycle(self._buffers), None
        buffer = next(buffers)
        coming = self.files.read(self._names[0], buffer)
        for name, following in zip(self._names, [*self._names[1:], None], strict=True):
            coming.result()
            here, buffer = buffer, next(buffers)
            if following:  # the third buffer is free: the block before last is written
                coming = self.files.read(following, buffer)
            if written:
                written.result()
            written = self.files.write(name, here)
        if written:
            written.result()


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--dir", type=Path, action="append", help="one per disk; the system's temporary directory")
    cli.add_argument("--gigabytes", type=float, default=2.0, help="bytes of all blocks together")
    cli.add_argument("--block_megabytes", type=float, default=256.0)
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--unaligned", action="store_true", help="blocks come from memory that has to be copied")
    args = cli.parse_args()
    directories = [Path(tempfile.mkdtemp(dir=parent)) for parent in args.dir or [None]]
    try:
        nbytes, block = int(args.gigabytes * 1e9), int(args.block_megabytes * 2**20)
        with contextlib.closing(Plain(directories, nbytes)) as plain:
            blocks = Blocks(directories, nbytes, block, int(args.unaligned))
            with blocks.files:
                tell(args, blocks, directories)
                measure(plain, blocks, args.rounds)
    finally:
        for directory in directories:
            shutil.rmtree(directory)


def tell(args: argparse.Namespace, blocks: Blocks, directories: Sequence[Path]) -> None:
    memory = "unaligned, copied" if args.unaligned else "aligned"
    print(
        f"{platform.node()}, {platform.system()} {platform.release()}, {os.cpu_count()} processors, "
        f"{', '.join(str(directory.parent) for directory in directories)}\n"
        f"{blocks.nbytes / 1e9:.2f} GB in blocks of {args.block_megabytes:g} MiB ({memory}), pieces of "
        f"{PIECE_BYTES // 2**20} MiB, {THREADS} threads per disk and direction, at most "
        f"{blocks.files.buffer_bytes // 2**20} MiB of buffers; medians of {args.rounds} rounds"
    )


def measure(plain: Plain, blocks: Blocks, rounds: int) -> None:
    """Prints the table: GB/s, for both directions those of each."""
    for side in (plain, blocks):
        side.run("write")  # space that was reserved and never written is slower at first
    print(f"{'GB/s':8}{'plain':>8}{'blocks':>8}{'ratio':>8}")
    for load in LOADS:
        rates = {plain: list[float](), blocks: list[float]()}
        for number in range(rounds):
            for side in (plain, blocks) if number % 2 else (blocks, plain):
                begun = time.perf_counter()
                side.run(load)
                rates[side].append(side.nbytes / (time.perf_counter() - begun) / 1e9)
        ratio = statistics.median(b / a for a, b in zip(rates[plain], rates[blocks], strict=True))
        print(f"{load:8}{statistics.median(rates[plain]):8.2f}{statistics.median(rates[blocks]):8.2f}{ratio:8.2f}")


def opened(path: Path, nbytes: int) -> int:
    """A descriptor of a new file of `nbytes`, past the page cache if that is possible."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    try:
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
        os.preadv(file, [aligned(4096).data], 0)
    except OSError:
        return os.open(path, os.O_RDWR)
    return file


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


if __name__ == "__main__":
    main()
