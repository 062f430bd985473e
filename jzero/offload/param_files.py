"""Parameters that rest in files: ZeRO-Infinity's NVMe tier for parameters (Rajbhandari et al. 2021, section 5).

A program is not given such a parameter but tickets, one for each of its layers.  Where a layer reads it, its ticket
comes into use (`zero.py` has the other moves):

    stage 0       use = read
    stage 3       use = gather after read

The read calls the host, which has the layer's shard in memory by then, as it reads ahead in the order in which layers
were read the last time.  So device and host hold the layers under way.  In the update, groups bring a parameter's
pieces along with those of its optimizer state, and write them back.  A piece and a layer are made of the same blocks.

Forward and backward compute with the same numbers as with parameters on the device, bit for bit.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.block_files import TierError
from jzero.offload.copies import Copies
from jzero.offload.files import InFiles
from jzero.offload.groups import Cut
from jzero.offload.param_blocks import ParamBlocks
from jzero.offload.piece import Piece
from jzero.offload.pieces import AbstractPieces
from jzero.offload.read_ahead import Buffers, ReadAhead
from jzero.offload.tiers import Stays, Tier
from jzero.optim import keeps_average
from jzero.step import TrainState
from jzero.zero import Path, ShardingError

_LAYERS_AHEAD = 2  # that are read, beyond those that the program gathers ahead


class ParamFiles:
    """The parameters of a run that rest in files; of most runs, none.

    Attributes:
        layers: path -> how many leading dims of such a parameter number layers.
        wholes: path -> the parameter, abstract, with its sharding.
    """

    def __init__(self, mesh: Mesh, layers: Mapping[Path, int], *, called: bool = True) -> None:
        """Makes no file yet.

        Args:
            mesh: of the run.
            called: by programs; else they are given whole parameters.
        """
        self.layers, self._mesh, self._called = dict(layers), mesh, called
        self.wholes: dict[Path, jax.ShapeDtypeStruct] = {}
        self._blocks = ParamBlocks({}, {}, {})
        self._regions: dict[Path, dict[int, int]] = {}
        self._files: InFiles | None = None
        self._buffers = Buffers()
        self._fault: Exception | None = None
        self._readers: dict[int, ReadAhead] = {}

    def check_average(self, opt_state: Any) -> None:
        """Refuses an optimizer that averages parameters, which programs read from files alone.

        Raises:
            ShardingError: so it does.
        """
        if self.layers and keeps_average(opt_state):
            raise ShardingError(
                "offload.params nvme with an average of the parameters (optim.ema, jzero.averaged): averages are "
                "evaluated from memory; take offload.params host, or no average"
            )

    # ---- where they rest ----

    def lay_out(
        self,
        directories: Sequence[str],
        state: TrainState,
        groups: Sequence[Sequence[Cut]],
        piece_bytes: int,
        arrive: Callable[[Piece, Sequence[np.ndarray], Copies], Any],
        leave: Callable[[Piece, Any], Sequence[np.ndarray]],
    ) -> None:
        """Says where each piece lies.

        Args:
            directories: one per disk.
            state: abstract, with shardings.
            groups: in which trained parameters are updated.
            piece_bytes: of frozen parameters, about, that are made together.
            arrive, leave: as `InFiles` has them.
        """
        self.wholes = dict(zip(self.layers, self.chosen(state, list(self.layers)), strict=True))
        self._blocks = ParamBlocks.of(self.wholes, self.layers, groups, piece_bytes)
        number_of = {device: i for i, device in enumerate(self._mesh.devices.flat)}
        self._regions = {
            path: {
                number_of[device]: region
                for region, devices in enumerate(self._blocks.holders[path])
                for device in devices
            }
            for path in self.layers
        }
        numbers = {number for regions in self._regions.values() for number in regions}
        self._readers = {number: ReadAhead(self._begin, _LAYERS_AHEAD * len(self.layers)) for number in numbers}
        if self._blocks.places:
            owner = f"parameters of process {jax.process_index()} of {jax.process_count()}"
            self._files = InFiles(directories, owner, self._blocks.places, arrive, self._leaving(leave))

    def tier(self, group: int) -> Tier:
        """Where the parameters of a group rest between their updates."""
        return self._files if self._files and group in self._blocks.places else Stays("device", lambda *_: None)

    def cuts(self) -> dict[int, list[Cut]]:
        """Group -> pieces of parameters that rest here; frozen ones have numbers after those of all groups."""
        return {k: [place.piece.cut for place in places] for k, places in self._blocks.places.items()}

    @property
    def buffer_bytes(self) -> int:
        """Host memory for layers on their way, of all devices of this process, when no program reads."""
        return self._buffers.nbytes + sum(
            reader.ahead(lambda buffer: buffer.nbytes) for reader in self._readers.values()
        )

    @property
    def nbytes(self) -> int:
        """Of the files of this process."""
        return self._files.nbytes if self._files else 0

    def fill(self, group: int, number: int, shards: Sequence[np.ndarray]) -> Any:
        """Writes a piece, from its shards.

        Raises:
            TierError: as the files say.
        """
        place = self._blocks.places[group][number]
        self.forget()
        return self._in_files().fill(group, number, place.piece, shards)

    def at_rest(self, state: TrainState) -> TrainState:
        """The abstract state with where each piece rests."""
        found: dict[Path, list[tuple[Cut, Any]]] = {path: [] for path in self.layers}
        for k, places in self._blocks.places.items():
            for number, place in enumerate(places):
                found[place.piece.cut.path].append(
                    (place.piece.cut, lambda shards, k=k, n=number: self.fill(k, n, shards))
                )
        wholes = self.wholes
        return self.within(state, {p: AbstractPieces(wholes[p], *zip(*of, strict=True)) for p, of in found.items()})

    # ---- in the train state ----

    def without(self, state: TrainState) -> TrainState:
        """A state with nothing in their places."""
        return self.within(state, dict.fromkeys(self.layers))

    def within(self, state: TrainState, values: Mapping[Any, Any]) -> TrainState:
        """A state with these values in their places."""

        def changed(tree: Any) -> Any:
            flat: dict[Path, Any] = flatten_dict(tree)
            return unflatten_dict({path: values[path] if path in self.layers else x for path, x in flat.items()})

        return replace(state, params=changed(state.params), frozen=changed(state.frozen)) if self.layers else state

    def chosen(self, state: TrainState, paths: Sequence[Path]) -> list[Any]:
        """What a state has in these places."""
        flat: dict[Path, Any] = {**flatten_dict(state.params), **flatten_dict(state.frozen)}
        return [flat[path] for path in paths]

    # ---- what programs are given of them ----

    def entered(self, state: TrainState) -> TrainState:
        """A state, abstract or not, as programs are given it."""
        if not self._called:
            return state
        abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state.step))
        return self.within(state, self._abstract_tickets() if abstract else self._tickets)

    def layer(self, path: Path, ticket: int, device: int) -> np.ndarray:
        """What a device holds of a layer; called by the programs.

        One that cannot be read is zeros, and `finished` says so: an error would end one device's program, for which
        those of the others would wait in the next collective.
        """
        dtype, shape = self.wholes[path].dtype, self._layer_shape(path)
        try:
            buffer = self._readers[device].take((path, ticket, self._regions[path][device]))
        except Exception as error:  # noqa: BLE001 (raised by `finished`)
            self._fault = self._fault or error
            return np.zeros(shape, dtype)
        return self._buffers.lent(buffer, dtype, shape)

    def finished(self, results: Any) -> None:
        """To be called with what a program returned, before anything comes of it: waits where it has read files.

        Raises:
            TierError: it has not read what was written.
        """
        if not self.layers:
            return
        jax.block_until_ready(results)
        if self._fault:
            raise TierError(str(self._fault)) from self._fault

    def close(self) -> None:
        """Removes the files.

        Raises:
            TierError: they cannot be removed.
        """
        if self._files:
            self._files.close()

    def forget(self) -> None:
        """Lets go of what was read ahead."""
        for reader in self._readers.values():
            reader.forget()

    def _begin(self, key: Any) -> "_Pending":
        """Begins to read a layer, as a region of devices holds it."""
        path, ticket, region = key
        nbytes = math.prod(self._layer_shape(path)) * self.wholes[path].dtype.itemsize
        buffer, files = self._buffers.take(nbytes), self._in_files()
        blocks = self._blocks.of_layer[path, region, ticket]
        return _Pending(buffer, [files.begin_read(name, buffer[start:stop]) for name, start, stop in blocks])

    def _layer_shape(self, path: Path) -> tuple[int, ...]:
        whole = self.wholes[path]
        return whole.sharding.shard_shape(whole.shape)[self.layers[path] :]

    def _in_files(self) -> InFiles:
        assert self._files is not None
        return self._files

    def _leaving(self, leave: Callable[[Piece, Any], Sequence[np.ndarray]]) -> Any:
        def left(piece: Piece, new: Any) -> Sequence[np.ndarray]:
            # When a piece is computed, the program that has read its layers is done with.
            shards = leave(piece, new)
            self.forget()
            return shards

        return left

    def _abstract_tickets(self) -> dict[Path, jax.ShapeDtypeStruct]:
        sharding = NamedSharding(self._mesh, P())
        shapes = {path: self.wholes[path].shape[:dims] for path, dims in self.layers.items()}
        return {path: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for path, shape in shapes.items()}

    @functools.cached_property
    def _tickets(self) -> dict[Path, jax.Array]:
        """The same in every step: no program is given them to reuse."""
        return {
            path: jax.device_put(np.arange(x.size, dtype=np.int32).reshape(x.shape), x.sharding)
            for path, x in self._abstract_tickets().items()
        }


class _Pending:
    """A layer on its way into `buffer`."""

    def __init__(self, buffer: np.ndarray, reads: Sequence[Any]) -> None:
        self._buffer, self._reads = buffer, reads

    def result(self) -> np.ndarray:
        """Its bytes."""
        for done in self._reads:
            done.result()
        return self._buffer
