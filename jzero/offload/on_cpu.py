"""The update of a group on the host's CPU: ZeRO-Offload (Ren et al. 2021, section 4), for any elementwise optimizer.

Gradients come down, new parameters go up, and what the optimizer keeps never sees the device.  Each process updates
the shards of its own devices, each shard once, however many devices hold a copy of it.  A piece is held in as many
chunks as the processor has cores for it, and each is updated in one pass over its memory (`jzero/in_blocks.py`).

As in the paper, gradients of the next group come down and parameters of the last one go up while one is updated.  The
paper's update that is one step late is not here: it trains another model.
"""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.in_blocks import at_once, in_blocks
from jzero.offload.copies import Copies
from jzero.offload.files import Place
from jzero.offload.groups import Cut
from jzero.offload.in_groups import InGroups
from jzero.offload.pieces import cut_out, paste_in, piece_shape, regions
from jzero.offload.programs import Update
from jzero.offload.separable import SeparationError
from jzero.offload.stream import Scalars
from jzero.zero import Path, path_name

Part = tuple[tuple[jax.Array, ...], ...]  # a piece: of each shard of this process its chunks, flat


class UpdatedOnCpu:
    """As `stream.Updater` has it."""

    def __init__(self, groups: InGroups, group: Sequence[Cut], programs: dict[Any, Any]) -> None:
        """Of one group.

        Args:
            programs: parameter -> jitted update of one chunk, of all groups, filled as they are asked for.

        Raises:
            SeparationError: the optimizer does not take a parameter of the group element by element.
        """
        for cut in group:
            if cut.path not in groups.placewise:
                raise SeparationError(
                    f"offload.update = cpu: tx does not take parameter {path_name(cut.path)!r} element by element (it "
                    f"works on whole tensors); take offload.update = device, or another optimizer"
                )
        self._groups, self._group, self._programs = groups, group, programs
        self._in_files = groups.in_files(tuple(group))
        self._copies = Copies()

    def bring(self, grads: Sequence[jax.Array], params: Mapping[Path, Any]) -> list[tuple[Any, Any]]:
        """Gradients on their way down, and the parameters that are their own masters."""
        of_grads = [_shards(x, self._groups.param(c.path), c) for x, c in zip(grads, self._group, strict=True)]
        return [(x, self._old(params.get(cut.path), cut)) for x, cut in zip(of_grads, self._group, strict=True)]

    def update(
        self,
        brought: list[tuple[Any, Any]],
        params: Mapping[Path, Any],
        state: Sequence[Part],
        scalars: Scalars,
    ) -> tuple[dict[Path, Any], list[Part], Scalars]:
        """One program for each chunk of each shard; parameters are donated where they lie, and so is the state."""
        flat, new, after, states = iter(state), dict[Path, Any](), scalars, list[Part]()
        given = _on_host(scalars)
        for cut, (grad, old) in zip(self._group, brought, strict=True):
            own = [next(flat) for _ in self._groups.numbers(cut.path)]
            olds = params[cut.path] if cut in self._in_files else old and self._chunked(cut, old)
            parts, updated, after = self._cut(cut, own, _arrived(grad), olds, given)
            states += parts
            if cut in self._in_files:
                new[cut.path] = updated
            else:
                new[cut.path] = self._up({**params, **new}[cut.path], cut, updated, scalars.finite)
        rest = scalars.loss.sharding
        shared, report = jax.device_put(jax.device_get((after.shared, after.report)), rest)
        return new, states, scalars._replace(shared=shared, report=report)

    def settle(self, pieces: Sequence[jax.Array]) -> list[Part]:
        """Pieces of the state, from the device into chunks."""
        whole = [(leaf, cut) for cut in self._group for leaf in self._groups.leaves(cut.path)]
        return [
            to_chunks(Place(leaf, cut, ()), _arrived(_shards(x, leaf, cut)), self._copies)
            for x, (leaf, cut) in zip(pieces, whole, strict=True)
        ]

    def _cut(
        self, cut: Cut, own: list[Part], grads: list[np.ndarray], old: Part | None, given: Any
    ) -> tuple[list[Part], Part, Scalars]:
        """(new state, new parameter, scalars) of one piece."""
        abstract = self._groups.param(cut.path)
        program, devices = self._program(cut), list(_devices(abstract, cut))
        arguments, counts = [], []
        for r, device in enumerate(devices):
            reads = _chunks(grads[r], device)
            olds = old[r] if old else _blank(reads, abstract.dtype, device)
            counts.append(len(reads))
            arguments += [
                ([[part[r][c] for part in own], olds[c]], reads[c], jax.device_put(given, device))
                for c in range(len(reads))
            ]
        results = iter(at_once(program, arguments))
        by_shard = [[next(results) for _ in range(count)] for count in counts]
        states = [tuple(tuple(arrays[0][n] for arrays, _ in shard) for shard in by_shard) for n in range(len(own))]
        updated = tuple(tuple(arrays[1] for arrays, _ in shard) for shard in by_shard)
        shared, report = by_shard[0][0][1]
        return states, updated, Scalars(shared, given[1], given[2], report)

    def _program(self, cut: Cut) -> Any:
        """The jitted update of a chunk."""
        key = cut.path
        if key not in self._programs:
            self._programs[key] = jax.jit(
                in_blocks(functools.partial(_update, self._groups, key)), donate_argnums=0, keep_unused=True
            )
        return self._programs[key]

    def _old(self, x: Any, cut: Cut) -> list[jax.Array] | None:
        """A piece of a parameter that has no master, on its way, of each shard; what has one is made from that.

        One that is in files comes with the state.
        """
        if x is None or x.dtype.itemsize < 4:
            return None
        if not cut.whole:
            x = cut_out(self._groups.mesh, self._groups.spec(cut.path), cut.shape)(x, _start(cut))
        return _shards(x, self._groups.param(cut.path), cut)

    def _chunked(self, cut: Cut, shards: list[jax.Array]) -> Part:
        """A piece of a parameter that has come down, in chunks."""
        return to_chunks(Place(self._groups.param(cut.path), cut, ()), _arrived(shards), self._copies)

    def _up(self, x: jax.Array, cut: Cut, part: Part, finite: jax.Array) -> jax.Array:
        """The parameter with its new piece, which is on its way."""
        abstract = self._groups.param(cut.path)
        shards = from_chunks(Place(abstract, cut, ()), part)
        arrays = [
            jax.device_put(shard, device)
            for shard, (_, devices) in zip(shards, regions(abstract, cut), strict=True)
            for device in devices
        ]
        piece = jax.make_array_from_single_device_arrays(
            piece_shape(abstract, cut), self._groups.sharding(cut.path), arrays
        )
        return paste_in(self._groups.mesh, self._groups.updating(cut.path))(x, piece, _start(cut), finite)


def _update(groups: InGroups, path: Path, arrays: Any, grads: Any, scalars: Any) -> Any:
    """The update of one block: ([state, parameter bits], gradient, scalars) -> the same, new."""
    (own, bits), (shared, loss, finite) = arrays, scalars
    dtype = groups.params[path].dtype
    old = lax.bitcast_convert_type(bits, dtype)
    update = Update(groups, ((path, bits.shape),))
    (new,), (own,), shared, report = update([grads], [old], [own], shared, loss, finite)
    return [own, lax.bitcast_convert_type(new, bits.dtype)], (shared, report)


# ---- between devices and chunks -------------------------------------------------------------------------------------


def _start(cut: Cut) -> np.ndarray:
    return np.asarray(cut.start, np.int32)


def _devices(whole: Any, cut: Cut) -> Iterator[Any]:
    """For each shard of this process, the CPU device on which it is updated."""
    cpus = jax.local_devices(backend="cpu")
    for number, _ in enumerate(regions(whole, cut)):
        yield cpus[number % len(cpus)]


def _shards(x: jax.Array, whole: Any, cut: Cut) -> list[jax.Array]:
    """Of each shard of this process, one device's copy, on its way to the host."""
    held = {shard.device: shard.data for shard in x.addressable_shards}
    chosen = [held[devices[0]] for _, devices in regions(whole, cut)]
    for shard in chosen:
        shard.copy_to_host_async()
    return chosen


def to_chunks(place: Place, shards: Sequence[np.ndarray], copies: Copies) -> Part:
    """A piece in chunks, from the bytes of its shards."""
    typed = [shard.view(place.whole.dtype) for shard in shards]
    devices = _devices(place.whole, place.cut)
    return tuple(_chunks(shard, device, copies) for shard, device in zip(typed, devices, strict=True))


def from_chunks(place: Place, part: Part) -> list[np.ndarray]:
    """The shards of a piece in chunks."""
    return [_joined(chunks, place.whole.dtype, place.cut.shape) for chunks in part]


def _arrived(shards: Sequence[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(shard) for shard in shards]


def _on_host(scalars: Scalars) -> Any:
    return jax.device_get((scalars.shared, scalars.loss, scalars.finite))


def _chunks(x: np.ndarray, device: Any, copies: Copies | None = None) -> tuple[jax.Array, ...]:
    """A shard in as many flat chunks as there are cores for it, on a CPU device; narrow floats as bits.

    Args:
        copies: gives them memory of their own, which can be donated; without it they are only read.
    """
    flat = x.reshape(-1)
    flat = flat.view(np.uint16) if flat.dtype.itemsize == 2 else flat
    take = copies.take if copies else jax.device_put
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
    count = max(1, len(os.sched_getaffinity(0)) // len(jax.local_devices()))
    step = max(16, -(-size // count // 16) * 16)
    yield from (slice(at, min(at + step, size)) for at in range(0, max(size, 1), step))
