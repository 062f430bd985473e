"""Host memory for gradients, which a run holds from step to step: a program is handed it, and hands it back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.zero import Path


class Memory:
    """Pinned arrays of all gradients that rest on the host, one copy of them or two.

    They are made when the first step asks for them, in host memory: a program would make them on the device first.
    After a step that failed they are made again.
    """

    def __init__(self, abstract: Sequence[Mapping[Path, jax.ShapeDtypeStruct]]) -> None:
        """For arrays like these; what is in them is nobody's business."""
        self._abstract = abstract
        self._arrays: list[dict[Path, jax.Array]] | None = None

    def take(self) -> list[dict[Path, jax.Array]]:
        """The arrays, to be donated."""
        arrays, self._arrays = self._arrays, None
        return [{path: _zeros(x) for path, x in part.items()} for part in self._abstract] if arrays is None else arrays

    def keep(self, arrays: Sequence[dict[Path, jax.Array]]) -> None:
        """Arrays that came back, until the next step."""
        self._arrays = list(arrays) if self._abstract else []


def _zeros(x: Any) -> jax.Array:
    def shard(index: Any) -> np.ndarray:
        sizes = (range(n)[at] for n, at in zip(x.shape, index, strict=True))
        return np.zeros([len(size) for size in sizes], x.dtype)

    return jax.make_array_from_callback(x.shape, x.sharding, shard)
