"""Arrays in pieces, to Orbax's files and from them: the same files as of arrays on a device.

Writing goes through tensorstore as Orbax's own handler does, but a chunk at a time and straight from where the pieces
rest.  Reading goes to where they are to rest.  Either way host memory holds a few pieces and chunks.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint import future, type_handlers

from jzero import checksums, together
from jzero.in_chunks import Start, bounds, chunk_shape, in_chunks
from jzero.offload import at_rest
from jzero.offload.piece import Piece, first_holders
from jzero.offload.pieces import AbstractPieces, Pieces

_AT_ONCE_BYTES = 2**26  # written before they are waited for, and the most of a chunk
_CACHE_BYTES = 2**28  # of chunks that were read and of which a next piece may want more
_SUMS = "sums.{}.json"  # what a process has written, for the one that seals it


class Leaf:
    """An array in pieces as Orbax takes it: not a tree of its parts."""

    def __init__(self, name: str, pieces: Pieces) -> None:
        """Of a name in the checkpoint."""
        self.name, self.pieces = name, pieces


class PiecesHandler(type_handlers.TypeHandler):
    """Writes `Leaf`s, as the arrays that they are."""

    def typestr(self) -> str:
        """Of an array, in the words of Orbax: that is what is read again."""
        return "jax.Array"

    def memory_size(self, values: Sequence[Leaf]) -> Sequence[tuple[int, int]]:
        """(bytes written, bytes read) of each, for Orbax's log."""
        return [(size, size) for size in (leaf.pieces.size * leaf.pieces.dtype.itemsize for leaf in values)]

    async def serialize(
        self, values: Sequence[Leaf], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Begins to write; the pieces must stay as they are until the futures are done."""
        del args  # the pieces say how large a chunk is
        return [future.CommitFutureAwaitingContractedSignals(_write(values, infos), name="pieces")]

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Not of Orbax: see `restore`."""
        raise NotImplementedError

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """Not from here: that of an array, which it is in the files."""
        raise NotImplementedError


def registry() -> Any:
    """The types of a state of which something is in pieces.

    Orbax's handler of arrays would hold the list of arrays that it has written against the list of all.
    """
    arrays = type_handlers.ArrayHandler(enable_write_sharding_file=False, array_metadata_store=None)
    return type_handlers.create_type_handler_registry((Leaf, PiecesHandler()), (jax.Array, arrays))


def written_sums(directory: Path) -> dict[str, int]:
    """Checksums of the pieces that all processes have written to a directory, by name; removes what says so."""
    found: dict[str, int] = {}
    for path in sorted(directory.glob(_SUMS.format("*"))):
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            found[name] = checksums.total([found.get(name, 0), value])
        path.unlink()
    return found


async def _write(leaves: Sequence[Leaf], infos: Sequence[Any]) -> None:
    sums, batch = dict[str, int](), _Batch()
    for leaf, info in zip(leaves, infos, strict=True):
        await info.await_path_creation()
        sums[leaf.name] = await _write_one(leaf.pieces, info, batch)
    await batch.commit()
    path = Path(infos[0].parent_dir) / _SUMS.format(jax.process_index())
    path.write_text(json.dumps(sums), encoding="utf-8")


class _Batch:
    """Chunks that are written together: each time the disk is waited for."""

    def __init__(self) -> None:
        self._transaction, self._nbytes = ts.Transaction(), 0

    async def write(self, store: Any, start: Start, part: np.ndarray) -> None:
        """A chunk, which is in memory until the batch is full."""
        # Nobody changes what a piece holds before the save is done, so tensorstore need not copy it.
        target = store.with_transaction(self._transaction)[bounds(start, part)]
        await target.write(part, can_reference_source_data_indefinitely=True)
        self._nbytes += part.nbytes
        if self._nbytes >= _AT_ONCE_BYTES:
            await self.commit()

    async def commit(self) -> None:
        """Waits until all is on the disk."""
        await self._transaction.commit_async()
        self._transaction, self._nbytes = ts.Transaction(), 0


async def _write_one(pieces: Pieces, info: Any, batch: _Batch) -> int:
    """Writes what is of this process; returns what it adds to the checksum of the array."""
    shape, shard = pieces.shape, pieces.sharding.shard_shape(pieces.shape)
    largest = max(math.prod(cut.shape) for cut in pieces.cuts)
    chunk = chunk_shape(shape, shard, min(_AT_ONCE_BYTES // pieces.dtype.itemsize, largest))
    store, mine = await _created(pieces, chunk, info), first_holders(pieces.whole)
    starts = [tuple(part.start for part in index) for index, _ in Piece.all_of(pieces.whole).regions]
    starts = [start for start, own in zip(starts, mine, strict=True) if own]
    own = ([box for box, own in zip(boxes, mine, strict=True) if own] for _, boxes in at_rest.read(pieces))
    added = 0
    for _, start, part in in_chunks(own, starts, shard, chunk):
        added += checksums.of_box(part, start, shape)
        await batch.write(store, start, part)
    return checksums.total([added])


async def _created(pieces: Pieces, chunk: Sequence[int], info: Any) -> Any:
    """The array in the files, opened; its description is written by the first process, as Orbax has it."""
    spec = ts.Spec(
        type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            global_shape=tuple(pieces.shape),
            local_shape=tuple(chunk),
            dtype=pieces.dtype,
            # Beside what Orbax writes meanwhile; it puts together whatever begins with the name of a process.
            process_index=f"{jax.process_index()}pieces",
        )
    )
    if together.is_first():
        await ts.open(spec, create=True, open=True, context=info.ts_context)
    return await ts.open(spec, open=True, assume_metadata=True, context=info.ts_context)


def restore(
    path: Path, held: Mapping[str, Any], targets: Mapping[str, tuple[str, AbstractPieces]]
) -> tuple[dict[str, Pieces], dict[str, list[Any]]]:
    """Reads arrays to where they rest.

    Args:
        path: of the state.
        held: stored name -> shape and dtype.
        targets: name -> (stored name, array as it is wanted, of this shape, of any dtype).

    Returns:
        The arrays, and for each name [stored name, what this process adds to the checksum of the stored array].
    """
    context = ts.Context(
        {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}, "cache_pool#ocdbt": {"total_bytes_limit": 2**26}}
    )
    arrays, sums = dict[str, Pieces](), dict[str, list[Any]]()
    for name, (source, target) in targets.items():
        info = type_handlers.ParamInfo(
            name=source,
            parent_dir=epath.Path(path),
            is_ocdbt_checkpoint=type_handlers.is_ocdbt_checkpoint(epath.Path(path)),
            ts_context=context,
        )
        spec = type_handlers.get_json_tspec_read(info, use_ocdbt=bool(info.is_ocdbt_checkpoint))
        store = ts.open(ts.Spec(spec), open=True, context=context).result()
        arrays[name], added = _restored(store, held[source].dtype, target)
        sums[name] = [source, added]
    return arrays, sums


def _restored(store: Any, dtype: Any, target: AbstractPieces) -> tuple[Pieces, int]:
    mine, added, parts = first_holders(target.whole), 0, []
    for piece, fill in zip(target.each, target.fills, strict=True):
        shards = []
        for (index, _), own in zip(piece.regions, mine, strict=True):
            box = np.empty(piece.cut.shape, dtype)
            ts.array(box).write(store[index][ts.d[:].translate_to[0]] if index else store).result()
            if own:
                added += checksums.of_box(box, [part.start for part in index], target.shape)
            shards.append(box.astype(target.dtype, copy=False))
        parts.append(fill(shards))
    return Pieces(target.whole, target.cuts, parts), checksums.total([added])
