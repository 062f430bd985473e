"""The update of a group on the host's CPU: ZeRO-Offload (Ren et al. 2021, section 4), for any elementwise optimizer.

Gradients come down, new parameters go up, and what the optimizer keeps never sees the device.  Each process updates
the shards of its own devices, each shard once, however many devices hold a copy of it.  A piece is held in as many
chunks as the processor has cores for it, and each is updated in one pass over its memory (`jzero/in_blocks.py`).

As in the paper, gradients of the next group come down and parameters of the last one go up while one is updated.  The
paper's update that is one step late is not here: it trains another model.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.in_blocks import at_once, in_blocks
from jzero.offload.copies import Copies
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups, block_shape
from jzero.offload.piece import Piece, paste_in
from jzero.offload.separable import SeparationError
from jzero.offload.stream import Scalars
from jzero.offload.updates import Update
from jzero.zero import Path, path_name

Part = tuple[tuple[jax.Array, ...], ...]  # a piece: of each shard of this process its chunks, flat


class UpdatedOnCpu:
    """As `stream.Updater` has it."""

    def __init__(self, in_groups: InGroups, group: Sequence[Cut], programs: dict[Any, Any]) -> None:
        """Of one group.

        Args:
            programs: parameter -> jitted update of one chunk, of all groups, filled as they are asked for.

        Raises:
            SeparationError: the optimizer does not take a parameter of the group element by element.
        """
        for cut in group:
            _check(in_groups, cut.path)
        self._in_groups, self._programs = in_groups, programs
        self._pieces = [in_groups.piece(cut) for cut in group]

    def bring(self, grads: Sequence[jax.Array], params: Mapping[Path, Any]) -> list[tuple[Any, Any]]:
        """Gradients on their way down, and the parameters that are their own masters."""
        of_grads = [_going_down(piece, x) for piece, x in zip(self._pieces, grads, strict=True)]
        return [(x, self._old(params.get(p.cut.path), p)) for x, p in zip(of_grads, self._pieces, strict=True)]

    def update(
        self,
        brought: list[tuple[Any, Any]],
        params: Mapping[Path, Any],
        state: Sequence[Part],
        scalars: Scalars,
    ) -> tuple[dict[Path, Any], list[Part], Scalars]:
        """One program for each chunk of each shard; parameters are donated where they lie, and so is the state."""
        flat, new, states = iter(state), dict[Path, Any](), list[Part]()
        given, result = _on_host(scalars), (scalars.shared, scalars.report)
        for piece, (grad, old) in zip(self._pieces, brought, strict=True):
            path = piece.cut.path
            in_files = self._in_groups.layouts[path].in_files
            own = [next(flat) for _ in self._in_groups.numbers(path)]
            olds = params[path] if in_files else old and to_chunks(piece, _arrived(old))
            parts, updated, result = self._piece(piece, own, _arrived(grad), olds, given)
            states += parts
            new[path] = updated if in_files else self._up(params[path], piece, updated, scalars.finite)
        shared, report = jax.device_get(result)
        return new, states, scalars._replace(shared=shared, report=report)

    def settle(self, pieces: Sequence[jax.Array]) -> list[Part]:
        """Pieces of the state, from the device into chunks."""
        cuts = [piece.cut for piece in self._pieces]
        of_state = [Piece(leaf, cut) for cut in cuts for leaf in self._in_groups.leaves(cut.path)]
        return [to_chunks(piece, _arrived(_going_down(piece, x))) for piece, x in zip(of_state, pieces, strict=True)]

    def _piece(
        self, piece: Piece, own: list[Part], grads: list[np.ndarray], old: Part | None, given: Any
    ) -> tuple[list[Part], Part, tuple[Any, Any]]:
        """(new state, new parameter, (state of no parameter, what to log)) of one piece."""
        program, devices = self._program(piece.cut.path), list(_devices(piece))
        arguments, counts = [], []
        for r, device in enumerate(devices):
            reads = _chunks(grads[r], device)
            olds = old[r] if old else _blank(reads, piece.dtype, device)
            counts.append(len(reads))
            arguments += [
                ([[part[r][c] for part in own], olds[c]], reads[c], jax.device_put(given, device))
                for c in range(len(reads))
            ]
        results = iter(at_once(program, arguments))
        by_shard = [[next(results) for _ in range(count)] for count in counts]
        states = [tuple(tuple(arrays[0][n] for arrays, _ in shard) for shard in by_shard) for n in range(len(own))]
        updated = tuple(tuple(arrays[1] for arrays, _ in shard) for shard in by_shard)
        return states, updated, by_shard[0][0][1]

    def _program(self, path: Path) -> Any:
        """The jitted update of a chunk."""
        if path not in self._programs:
            self._programs[path] = jax.jit(
                in_blocks(functools.partial(_update, self._in_groups, path)), donate_argnums=0, keep_unused=True
            )
        return self._programs[path]

    def _old(self, x: Any, piece: Piece) -> list[jax.Array] | None:
        """A piece of a parameter that has no master, on its way, of each shard; what has one is made from that.

        One that is in files comes with the state.
        """
        if x is None or x.dtype.itemsize < 4:
            return None
        return _going_down(piece, piece.cut_from(x, piece.cut.at))

    def _up(self, x: jax.Array, piece: Piece, part: Part, finite: jax.Array) -> jax.Array:
        """The parameter with its new piece, which is on its way."""
        new, place = piece.from_shards(from_chunks(piece, part)), self._in_groups.updating(piece.cut.path)
        return paste_in(self._in_groups.mesh, place)(x, new, piece.cut.at, finite)


def _check(in_groups: InGroups, path: Path) -> None:
    if path in in_groups.placewise:
        return
    where = f"offload.update = cpu: tx does not take parameter {path_name(path)!r} element by element"
    why = (
        "it looks at its shape, such as its size, and the host updates blocks"
        if path in in_groups.by_shape
        else "it works on whole tensors"
    )
    raise SeparationError(f"{where} ({why}); take offload.update = device, or another optimizer")


def _update(in_groups: InGroups, path: Path, arrays: Any, grads: Any, scalars: Any) -> Any:
    """The update of one flat block: ([state, parameter], gradient, scalars) -> the same, new; narrow floats are bits.

    The optimizer sees it with the rank of the parameter, at which it may look.
    """
    (own, bits), (shared, loss, finite) = arrays, scalars
    whole = in_groups.params[path]
    shape = block_shape(bits.size, whole.ndim)

    def typed(x: jax.Array, dtype: Any) -> jax.Array:
        return (x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)).reshape(shape)

    def flat(x: jax.Array, like: jax.Array) -> jax.Array:
        return (x if x.dtype == like.dtype else lax.bitcast_convert_type(x, like.dtype)).reshape(like.shape)

    state = [typed(x, leaf.dtype) for x, leaf in zip(own, in_groups.leaves(path), strict=True)]
    update = Update(in_groups, ((path, shape),))
    (new,), (after,), shared, report = update(
        [grads.reshape(shape)], [typed(bits, whole.dtype)], [state], shared, loss, finite
    )
    return [[flat(x, like) for x, like in zip(after, own, strict=True)], flat(new, bits)], (shared, report)


# ---- between devices and chunks -------------------------------------------------------------------------------------


def _devices(piece: Piece) -> Iterator[Any]:
    """For each shard, the CPU device on which it is updated."""
    cpus = jax.local_devices(backend="cpu")
    for number, _ in enumerate(piece.regions):
        yield cpus[number % len(cpus)]


def _going_down(piece: Piece, x: jax.Array) -> list[jax.Array]:
    """The shards of a piece on the devices, on their way to the host."""
    shards = piece.shards_of(x)
    for shard in shards:
        shard.copy_to_host_async()
    return shards


def to_chunks(piece: Piece, shards: Sequence[np.ndarray], copies: Copies | None = None) -> Part:
    """A piece in chunks with memory of their own, from the bytes of its shards.

    Args:
        copies: gives them their memory.
    """
    typed = [shard.view(piece.dtype) for shard in shards]
    take = copies.take if copies else _copied
    return tuple(_chunks(shard, device, take) for shard, device in zip(typed, _devices(piece), strict=True))


def from_chunks(piece: Piece, part: Part) -> list[np.ndarray]:
    """The shards of a piece in chunks."""
    return [_joined(chunks, piece.dtype, piece.cut.shape) for chunks in part]


def _arrived(shards: Sequence[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(shard) for shard in shards]


def _on_host(scalars: Scalars) -> Any:
    return jax.device_get((scalars.shared, scalars.loss, scalars.finite))


def _copied(x: np.ndarray, device: Any) -> jax.Array:
    return jnp.array(x, copy=True, device=device)


def _chunks(
    x: np.ndarray, device: Any, take: Callable[[np.ndarray, Any], jax.Array] = jax.device_put
) -> tuple[jax.Array, ...]:
    """A shard in as many flat chunks as there are cores for it, on a CPU device; narrow floats as bits.

    Args:
        take: gives them memory of their own, which can be donated; by default they are only read.
    """
    flat = x.reshape(-1)
    flat = flat.view(np.uint16) if flat.dtype.itemsize == 2 else flat
    return tuple(take(flat[at], device) for at in _ranges(flat.size))


def _blank(like: Sequence[jax.Array], dtype: Any, device: Any) -> tuple[jax.Array, ...]:
    """Memory for new parameters whose old values nobody needs."""
    bits = np.uint16 if np.dtype(dtype).itemsize == 2 else dtype
    return tuple(jnp.zeros(x.shape, bits, device=device) for x in like)


def _joined(chunks: Sequence[jax.Array], dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    flat = [np.asarray(chunk) for chunk in chunks]
    return (flat[0] if len(flat) == 1 else np.concatenate(flat)).view(dtype).reshape(shape)


def _ranges(size: int) -> Iterator[slice]:
    """Equal parts of an array for the cores, in whole cache lines."""
    step = max(16, -(-size // chunk_count() // 16) * 16)
    yield from (slice(at, min(at + step, size)) for at in range(0, max(size, 1), step))


@functools.cache
def chunk_count() -> int:
    """Cores for each device of this process; asked once, since what rests in chunks stays so when it changes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // len(jax.local_devices()))
