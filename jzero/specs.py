"""The specs that a run holds its train state to, and the shardings that come of them."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.look import Seen
from jzero.step import TrainState
from jzero.zero import Layout, Path, opt_state_specs

_LARGE = 1024  # elements; what is smaller is not worth a word


@dataclass(frozen=True)
class Specs:
    """PartitionSpec trees, the whole truth about a run; `state` is all of it in the shape of the train state."""

    params: Any
    grads: Any
    opt_state: Any
    state: TrainState


def specs_of(seen: Seen, layouts: Mapping[Path, Layout], shapes: TrainState) -> Specs:
    """Of a model and an optimizer.

    Args:
        layouts: of all parameters.
        shapes: the train state, abstract.
    """
    trained, frozen = seen.template.trained, seen.template.frozen
    places = {path: (x.shape, layouts[path].opt_state) for path, x in seen.trained().items()}
    params = unflatten_dict({path: layouts[path].params for path in trained})
    opt_state = opt_state_specs(shapes.opt_state, places)
    state = TrainState(
        step=P(),
        params=params,
        frozen=unflatten_dict({path: layouts[path].params for path in frozen}),
        model_state=unflatten_dict({path: seen.tp_specs[path] for path in seen.state}),
        opt_state=opt_state,
        skipped=P(),
        skipped_in_row=P(),
    )
    return Specs(params, unflatten_dict({path: layouts[path].grads for path in trained}), opt_state, state)


def shardings_of(mesh: Mesh, specs: TrainState, layouts: Mapping[Path, Layout]) -> TrainState:
    """Where all of the train state lies between steps."""
    at_rest = jax.tree.map(functools.partial(NamedSharding, mesh), specs)

    def placed(specs: Any) -> Any:
        return unflatten_dict({path: layouts[path].at_rest(mesh) for path in flatten_dict(specs)})

    return dataclasses.replace(at_rest, params=placed(specs.params), frozen=placed(specs.frozen))


def notes_on_opt_state(layouts: Mapping[Path, Layout], shapes: Any, specs: Any) -> tuple[str, ...]:
    """A note if arrays of the optimizer state follow no parameter, and so stay whole where others are sharded."""
    if all(layout.dim is None for layout in layouts.values()):
        return ()
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True)
    followers_of_none = [x for x, spec in pairs if x.size >= _LARGE and len(spec) == 0]
    if not followers_of_none:
        return ()
    total = sum(x.size * x.dtype.itemsize for x in followers_of_none)
    note = (
        f"{len(followers_of_none)} arrays of the optimizer state, {total:,} bytes, have the shape of no parameter and "
        f"stay whole on every device"
    )
    return (note,)
