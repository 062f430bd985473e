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
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.block_files import TierError
from jzero.offload.piece import Piece
from jzero.offload.read_ahead import Buffers, ReadAhead
from jzero.offload.state_params import with_params
from jzero.step import TrainState
from jzero.zero import Path, path_name

_LAYERS_AHEAD = 2  # that are read, beyond those that the program gathers ahead

#: (parameter, region of devices, layer, memory) -> the reads that fill it with what these devices hold of the layer.
BeginRead = Callable[[Path, int, int, np.ndarray], Sequence[Future[None]]]


class ParamReads:
    """What programs are given of the parameters of a run that rest in files, and call for them; of most runs, nothing.

    Layouts hold the reads, and where things lie follows from layouts: so this is there first, and is told where to read
    (`read_from`) once there are files.

    Attributes:
        wholes: path -> the parameter, abstract, with its sharding.
        layers: path -> how many of its leading dims number layers.
    """

    def __init__(
        self,
        mesh: Mesh,
        wholes: Mapping[Path, jax.ShapeDtypeStruct],
        layers: Mapping[Path, int],
        *,
        called: bool = True,
    ) -> None:
        """Reads nothing yet.

        Args:
            mesh: of the run.
            called: by programs; else they are given whole parameters.
        """
        self.wholes, self.layers, self._mesh, self._called = dict(wholes), dict(layers), mesh, called
        self._regions = {path: _regions(mesh, x) for path, x in self.wholes.items()}
        numbers = {number for regions in self._regions.values() for number in regions}
        self._readers = {number: ReadAhead(self._begin, _LAYERS_AHEAD * len(self.layers)) for number in numbers}
        self._buffers = Buffers()
        self._begin_read: BeginRead | None = None
        self._fault: TierError | None = None

    def read_from(self, begin_read: BeginRead) -> None:
        """Says how layers are read, before the first program runs."""
        self._begin_read = begin_read

    def entered(self, state: TrainState) -> TrainState:
        """A state, abstract or not, as programs are given it."""
        if not self._called:
            return state
        abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state.step))
        return with_params(state, self._abstract_tickets() if abstract else self._tickets)

    def layer(self, path: Path, ticket: int, device: int) -> np.ndarray:
        """What a device holds of a layer; called by the programs.

        One that cannot be read is zeros, and `finished` says so: an error would end one device's program, for which
        those of the others would wait in the next collective.
        """
        dtype, shape = self.wholes[path].dtype, self.layer_shape(path)
        try:
            buffer = self._readers[device].take((path, ticket, self._regions[path][device]))
        except TierError as error:
            self._fault = self._fault or error
        except Exception as error:  # noqa: BLE001 (no memory, say)
            what = f"{path_name(path)}, layer {ticket}: cannot be read: {error!r}"
            self._fault = self._fault or TierError(f"{what}; go on from the last checkpoint")
        else:
            return self._buffers.lent(buffer, dtype, shape)
        return np.zeros(shape, dtype)

    def layer_shape(self, path: Path) -> tuple[int, ...]:
        """What a device holds of a layer."""
        whole = self.wholes[path]
        return whole.sharding.shard_shape(whole.shape)[self.layers[path] :]

    def finished(self, results: Any) -> None:
        """To be called with what a program returned, before anything comes of it: waits where it has read files.

        Raises:
            TierError: it has not read what was written; the next program may.
        """
        if not self.layers:
            return
        try:
            jax.block_until_ready(results)
        finally:
            fault, self._fault = self._fault, None
        if fault:
            raise fault

    def forget(self) -> None:
        """Lets go of what was read ahead: it is about to be written."""
        for reader in self._readers.values():
            reader.forget()

    def _begin(self, key: Any) -> "_Coming":
        """Begins to read a layer, as a region of devices holds it."""
        assert self._begin_read is not None
        path, ticket, region = key
        buffer = self._buffers.take(math.prod(self.layer_shape(path)) * self.wholes[path].dtype.itemsize)
        return _Coming(buffer, self._begin_read(path, region, ticket, buffer), self._buffers)

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


class _Coming:
    """A layer on its way into `buffer`, which is one of `buffers`."""

    def __init__(self, buffer: np.ndarray, reads: Sequence[Future[None]], buffers: Buffers) -> None:
        self._buffer, self._reads, self._buffers = buffer, reads, buffers

    def result(self) -> np.ndarray:
        """Its bytes."""
        for done in self._reads:
            done.result()
        return self._buffer

    def drop(self) -> None:
        """Its memory is for others, once nothing of the layer comes into it any more."""
        wait(self._reads)
        self._buffers.returned(self._buffer)


def _regions(mesh: Mesh, whole: jax.ShapeDtypeStruct) -> dict[int, int]:
    """Number of a device of this process on the mesh -> which of the array's shards it holds."""
    numbers = {device: i for i, device in enumerate(mesh.devices.flat)}
    regions = enumerate(Piece.all_of(whole).regions)
    return {numbers[device]: region for region, (_, devices) in regions for device in devices}
