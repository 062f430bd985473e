"""Where parameters lie in files: in blocks of which both the pieces of the update and the layers of a pass are made."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jzero.offload.files import Place
from jzero.offload.groups import Cut, boxes
from jzero.offload.piece import Piece
from jzero.zero import Path, path_name

Stretch = tuple[str, int, int]  # a block, and from which byte of a layer's shard to which it is


@dataclass(frozen=True)
class ParamBlocks:
    """Pieces and layers of some parameters.

    Attributes:
        places: group -> its pieces; those of frozen parameters have numbers after those of all groups.
        of_layer: (parameter, region, layer) -> what a layer's shard is made of.
        holders: parameter -> for each region of this process, the devices that hold it.
    """

    places: Mapping[int, list[Place]]
    of_layer: Mapping[tuple[Path, int, int], list[Stretch]]
    holders: Mapping[Path, list[list[Any]]]

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
        cuts = {k: [cut for cut in group if cut.path in wholes] for k, group in enumerate(groups)}
        trained = {cut.path for own in cuts.values() for cut in own}
        frozen = (cut for path, x in wholes.items() if path not in trained for cut in _cuts(path, x, piece_bytes))
        cuts |= {k: [cut] for k, cut in enumerate(frozen, start=len(groups))}
        of_layer: dict[tuple[Path, int, int], list[Stretch]] = {}
        places: dict[int, list[Place]] = {}
        for k, own in cuts.items():
            for cut in own:
                piece, dims = Piece(wholes[cut.path], cut), layers[cut.path]
                blocks = list(_blocks(piece, dims))
                for region, layer, stretch in blocks:
                    of_layer.setdefault((cut.path, region, layer), []).append(stretch)
                names = tuple(name for _, _, (name, _, _) in blocks)
                places.setdefault(k, []).append(Place(piece, names, per_shard=math.prod(cut.shape[:dims])))
        holders = {path: [devices for _, devices in Piece.all_of(x).regions] for path, x in wholes.items()}
        return ParamBlocks(places, of_layer, holders)


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
