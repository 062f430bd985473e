"""Where parameters lie in files: in blocks of which both the pieces of the update and the layers of a pass are made."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jzero.offload.files import InFiles
from jzero.offload.groups import Cut, boxes
from jzero.offload.piece import Piece
from jzero.offload.place import Place
from jzero.zero import Path, path_name

Stretch = tuple[str, int, int]  # a block, and from which byte of a layer's shard to which it is


@dataclass(frozen=True)
class ParamBlocks:
    """Pieces and layers of some parameters.

    Attributes:
        places: the pieces of each group; behind those of all groups those of frozen parameters, one at a time.
        of_layer: (parameter, region, layer) -> what a layer's shard is made of.
    """

    places: Sequence[Sequence[Place]]
    of_layer: Mapping[tuple[Path, int, int], list[Stretch]]

    @staticmethod
    def of(
        wholes: Mapping[Path, jax.ShapeDtypeStruct],
        layers: Mapping[Path, int],
        groups: Sequence[Sequence[Cut]],
        piece_bytes: int,
    ) -> "ParamBlocks":
        """Lays them out.

        Args:
            wholes: abstract, with shardings.
            layers: how many leading dims of each number layers.
            groups: in which trained parameters are updated.
            piece_bytes: of frozen parameters, about, that are made together.
        """
        updated = [[cut for cut in group if cut.path in wholes] for group in groups]
        trained = {cut.path for group in updated for cut in group}
        frozen = [cut for path, x in wholes.items() if path not in trained for cut in _cuts(path, x, piece_bytes)]
        of_layer: dict[tuple[Path, int, int], list[Stretch]] = {}

        def place(cut: Cut) -> Place:
            dims = layers[cut.path]
            blocks = list(_blocks(Piece(wholes[cut.path], cut), dims))
            for region, layer, stretch in blocks:
                of_layer.setdefault((cut.path, region, layer), []).append(stretch)
            names = tuple(name for _, _, (name, _, _) in blocks)
            return Place(Piece(wholes[cut.path], cut), names, per_shard=math.prod(cut.shape[:dims]))

        places = [[place(cut) for cut in group] for group in [*updated, *([cut] for cut in frozen)]]
        return ParamBlocks(places, of_layer)

    def begin_read(self, files: InFiles, path: Path, region: int, layer: int, out: np.ndarray) -> list[Future[None]]:
        """Begins to read the shard of a layer that a region of devices holds, as bytes."""
        stretches = self.of_layer[path, region, layer]
        return [files.begin_read(name, out[start:stop]) for name, start, stop in stretches]


def _blocks(piece: Piece, dims: int) -> Iterator[tuple[int, int, Stretch]]:
    """(region, layer, stretch of it) of a piece, in the order of its elements, region by region."""
    whole, cut = piece.whole, piece.cut
    layers, layer = whole.shape[:dims], whole.sharding.shard_shape(whole.shape)[dims:]
    start = _number(cut.start[dims:], layer) * whole.dtype.itemsize
    stop = start + math.prod(cut.shape[dims:]) * whole.dtype.itemsize
    for region, _ in enumerate(piece.regions):
        for at in np.ndindex(*cut.shape[:dims]):
            number = _number([i + first for i, first in zip(at, cut.start, strict=False)], layers)
            yield region, number, (f"{path_name(cut.path)} shard {region} layer {number} from {start}", start, stop)


def _cuts(path: Path, whole: Any, piece_bytes: int) -> Iterator[Cut]:
    shape = whole.sharding.shard_shape(whole.shape)
    for start, box in boxes(shape, max(1, piece_bytes // whole.dtype.itemsize)):
        yield Cut(path, start, box, whole=box == shape)


def _number(at: Sequence[int], shape: Sequence[int]) -> int:
    """Of an element, in the order of an array's elements."""
    return int(np.ravel_multi_index(tuple(at), tuple(shape))) if shape else 0
