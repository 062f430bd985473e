"""Pieces of the train state in files: ZeRO-Infinity's NVMe tier (Rajbhandari et al. 2021, section 5).

A piece is in equal blocks of `BlockFiles`, one or several for each distinct shard of this process.  A group is read,
by threads, while the one before is updated, and written behind; host memory holds the groups under way.  The files are
scratch: what lasts is a checkpoint.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jzero.block_files import BlockFiles, TierError, aligned, reserved_bytes
from jzero.offload.copies import Copies
from jzero.offload.piece import Piece
from jzero.offload.place import Place
from jzero.offload.tiers import Arrived, Left

__all__ = ["InFiles", "Stored", "TierError", "from_device", "to_device"]


@dataclass(frozen=True)
class Stored:
    """A piece at rest in files.

    Attributes:
        tier: whose files.
        place: which blocks.
        version: how many times they have been written; a handle of an older version is of a state that is used up.
    """

    tier: "InFiles"
    place: Place
    version: int

    def check(self) -> None:
        """Holds the blocks to be of this version.

        Raises:
            ValueError: they are of a later one.
            TierError: the files are closed.
        """
        self.tier.check(self)

    def __repr__(self) -> str:
        """Which blocks."""
        return f"Stored({', '.join(self.place.blocks)})"


class InFiles:
    """As `tiers.Tier` has it; an update on the device gets arrays there, one on the CPU chunks of its memory."""

    name = "nvme"

    def __init__(
        self,
        directories: Sequence[str],
        owner: str,
        groups: Mapping[int, Sequence[Place]],
        arrive: Callable[[Piece, Sequence[np.ndarray], Copies], Any],
        leave: Callable[[Piece, Any], Sequence[np.ndarray]],
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes no file yet: that is for the first state.

        Args:
            directories: one per disk.
            owner: of the files, for whoever finds them.
            groups: what each group has here.
            arrive: (piece, shards as they were read, flat bytes) -> what the update takes, with memory of its
                own from the third argument.
            leave: (piece, what the update returned) -> shards, once they are computed.
            before_write: called before a piece is written, when what it is made of is computed.
        """
        self._directories, self._owner, self._groups = tuple(directories), owner, dict(groups)
        self._arrive, self._leave, self._before_write = arrive, leave, before_write
        self._versions: dict[tuple[str, ...], int] = {}
        self._files: BlockFiles | None = None
        self._closed = False
        self._lock = threading.Lock()
        # One thread brings a group in while another takes one out.
        self._incoming, self._outgoing = (ThreadPoolExecutor(1, f"jzero-{way}") for way in ("in", "out"))
        self._copies = Copies()

    @property
    def nbytes(self) -> int:
        """Of the files of this process: more than of what is in them, as `block_files.reserved_bytes` says."""
        return reserved_bytes(self._sizes, len(self._directories))

    @property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each block, by name."""
        places = [place for group in self._groups.values() for place in group]
        return {name: place.block_bytes for place in places for name in place.blocks}

    def fetch(self, group: int, parts: Sequence[Any]) -> Arrived:
        """Begins to read; the returned function waits, and gives what the update takes.

        Raises:
            ValueError: the handles are of a state that a later one has overwritten.
            TierError: they are closed; from the returned function, as the files say.
        """
        self._check_open()
        for part in parts:
            self.check(part)
        return self._incoming.submit(self._read, group).result

    def check(self, part: Stored) -> None:
        """Holds a piece to be what its blocks have.

        Raises:
            ValueError: they have been written again since.
            TierError: the files are closed.
        """
        self._check_open()
        if part.version != self._versions.get(part.place.blocks):
            raise ValueError(
                f"what rests in {', '.join(self._directories)} was overwritten by a later step, or by a "
                f"newer state of this run: use what step returned, and one state at a time"
            )

    def store(self, group: int, arrays: Sequence[Any]) -> tuple[list[Any], Left]:
        """Begins to write.

        Raises:
            TierError: they are closed; from the returned function, as the files say.
        """
        self._check_open()
        places = self._groups[group]
        with self._lock:
            for place in places:
                self._next_version(place)
        done: Future[None] = self._outgoing.submit(self._write, group, list(arrays))
        return [Stored(self, place, self._versions[place.blocks]) for place in places], done.result

    def fill(self, group: int, number: int, piece: Piece, shards: Sequence[np.ndarray]) -> Stored:  # noqa: ARG002
        """Writes a piece from a checkpoint, and waits until it is written; a state that had it is used up.

        Raises:
            TierError: as the files say.
        """
        place, files = self._groups[group][number], self._opened()
        self._before_write()
        with self._lock:
            version = self._next_version(place)
        whole_blocks = [np.ascontiguousarray(shard) for shard in shards]
        # After whatever an update that failed has left to write.
        self._outgoing.submit(_all_done, files.write, place.each(whole_blocks)).result()
        return Stored(self, place, version)

    def _next_version(self, place: Place) -> int:
        self._versions[place.blocks] = self._versions.get(place.blocks, 0) + 1
        return self._versions[place.blocks]

    def read(self, place: Place) -> list[np.ndarray]:
        """The shards of a piece, for a checkpoint; memory of their own.

        Raises:
            TierError: as the files say.
        """
        shards = [aligned(place.piece.shard_bytes) for _ in range(place.shards)]
        _all_done(self._opened().read, place.each(shards))
        return [place.piece.box(shard) for shard in shards]

    def close(self) -> None:
        """Removes the files; what rested there is lost, and nothing can rest there any more.

        Raises:
            TierError: they cannot be removed.
        """
        with self._lock:
            self._closed = True
        for pool in (self._incoming, self._outgoing):
            pool.shutdown()
        if self._files:
            self._files.close()

    def begin_read(self, block: str, out: np.ndarray) -> Future[None]:
        """As `BlockFiles.read`."""
        return self._opened().read(block, out)

    def _read(self, group: int) -> list[Any]:
        places, files = self._groups[group], self._opened()
        unused: list[np.ndarray] = []  # of what fails nothing: arrays may still be made of it
        try:
            taken = [(place, self._memory(place)) for place in places]
            _all_done(files.read, (block for place, shards in taken for block in place.each(shards)))
            arrays = [self._arrive(place.piece, shards, self._copies) for place, shards in taken]
            jax.block_until_ready(arrays)  # the memory is used again
            unused = [shard for _, shards in taken for shard in shards]
        finally:
            self._copies.returned(unused)
        return arrays

    def _memory(self, place: Place) -> list[np.ndarray]:
        """For the blocks of a piece."""
        shape, dtype = place.piece.cut.shape, place.piece.dtype
        return [self._copies.memory(shape, dtype, devices[0]) for _, devices in place.piece.regions]

    def _write(self, group: int, arrays: list[Any]) -> None:
        """From the memory of the arrays, when they are computed: they are kept until it is on disk."""
        places = zip(self._groups[group], arrays, strict=True)
        _all_done(self._opened().write, (block for place, array in places for block in self._leaving(place, array)))
        self._copies.give(shard.data for array in jax.tree.leaves(arrays) for shard in array.addressable_shards)

    def _leaving(self, place: Place, array: Any) -> Iterator[tuple[str, np.ndarray]]:
        """(name, bytes) of the blocks of a piece."""
        shards = [np.ascontiguousarray(shard) for shard in self._leave(place.piece, array)]
        self._before_write()
        return place.each(shards)

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(
                f"the run is closed, and its files in {', '.join(self._directories)} are removed: set up anew"
            )

    def _opened(self) -> BlockFiles:
        with self._lock:
            self._check_open()
            if self._files is None:
                self._files = BlockFiles(self._directories, self._sizes, self._owner)
            return self._files


def _all_done(begin: Callable[[str, np.ndarray], Future[None]], blocks: Iterable[tuple[str, np.ndarray]]) -> None:
    """Reads or writes all; nothing of it is under way any more when it returns, and when it raises the first error."""
    begun: list[Future[None]] = []
    try:
        for name, data in blocks:
            begun.append(begin(name, data))
    finally:
        wait(begun)
    for done in begun:
        done.result()


def to_device(piece: Piece, shards: Sequence[np.ndarray], copies: Copies) -> jax.Array:
    """A piece on the devices of the run, from the bytes of its shards."""
    return piece.from_shards([piece.box(shard) for shard in shards], copies.take)


def from_device(piece: Piece, x: jax.Array) -> list[np.ndarray]:
    """The shards of a piece on the devices."""
    return [np.asarray(shard) for shard in piece.shards_of(x)]
