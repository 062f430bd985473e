"""An average of the parameters, which the optimizer's state holds, as parameters at rest."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jzero.gradients import Gradients
from jzero.offload.at_rest import on_device
from jzero.offload.pieces import is_pieces
from jzero.pace import in_turn
from jzero.step import at_rest
from jzero.zero import Path


def averages_at_rest(gradients: Gradients, mesh: Mesh, dtypes: Any, places: Any) -> Callable[[Any], Any]:
    """The function (average) -> parameters at rest; of one in pieces, one parameter at a time is on its way.

    Args:
        dtypes, places: trees of dtypes and shardings at rest.
    """
    whole = jax.jit(functools.partial(at_rest, gradients, mesh, dtypes), out_shardings=places)
    of_path, to_path = flatten_dict(dtypes), flatten_dict(places)

    @functools.cache
    def of_one(path: Path) -> Any:
        dtype, place = unflatten_dict({path: of_path[path]}), unflatten_dict({path: to_path[path]})
        return jax.jit(functools.partial(at_rest, gradients, mesh, dtype), out_shardings=place)

    def to_rest(average: Any) -> Any:
        if not any(map(is_pieces, jax.tree.leaves(average, is_leaf=is_pieces))):
            return whole(average)
        found: dict[Path, Any] = {}
        for path, x in flatten_dict(average).items():
            found |= flatten_dict(in_turn(of_one(path)(unflatten_dict({path: on_device(x)}))))
        return unflatten_dict(found)

    return to_rest
