"""One training step for any model and any optimizer, at any stage.

The step never asks which stage it runs.  It is in two parts: gradients in a region that is manual over the
data-parallel axes (`gradients.py`), and the optimizer outside of it, on global arrays.  `run.py` makes the arguments.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import Identity
from jzero.gradients import Gradients
from jzero.mesh import DATA_AXES, data_size
from jzero.optim import Optimizer
from jzero.use import Template, template, value_of
from jzero.zero import Layout, Path, path_name

Metrics = dict[str, jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "frozen", "model_state", "opt_state", "skipped", "skipped_in_row"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """All that changes from step to step, and the parameters that do not.

    Attributes:
        step: int32, batches seen, skipped ones too.
        params: nested dict of trained parameters at rest.
        frozen: nested dict of parameters that are not trained.
        model_state: nested dict of what else the model holds: batch statistics, random keys and counters.
        opt_state: of the optax transformation, float32 masters included.
        skipped, skipped_in_row: int32, steps whose gradient was not finite; in all, and up to now without a break.
    """

    step: Any
    params: Any
    frozen: Any
    model_state: Any
    opt_state: Any
    skipped: Any
    skipped_in_row: Any


def train_step(
    gradients: Gradients, update: Optimizer, mesh: Mesh, clip_norm: float | None, state: TrainState, batch: Any
) -> tuple[TrainState, Metrics]:
    """Gradients, one division by the total weight, one clip, one update, and the way back to rest."""
    layouts = {path: gradients.layouts[path] for path in gradients.slots}

    grads, sums, model_state = _per_device(gradients, mesh)(
        flatten_dict(state.params), flatten_dict(state.frozen), flatten_dict(state.model_state), batch
    )
    grads = _constrain(jax.tree.map(lambda g: g / sums["weight"], grads), layouts, mesh)
    loss, norm = sums["loss"] / sums["weight"], optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    if clip_norm is not None:
        scale = jnp.minimum(1.0, clip_norm / norm)
        grads = jax.tree.map(lambda g: g * scale, grads)

    # The optimizer sees every array in the layout of its own state; `old` costs no traffic, it is a slice at most.
    old = unflatten_dict(_constrain(flatten_dict(state.params), layouts, mesh))
    new, opt_state = update.update(unflatten_dict(grads), state.opt_state, old, loss)
    kept = (new, opt_state, unflatten_dict(model_state))
    new, opt_state, model_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), kept, (old, state.opt_state, state.model_state)
    )

    skip = 1 - finite.astype(jnp.int32)
    after = TrainState(
        step=state.step + 1,
        params=unflatten_dict(_publish(flatten_dict(new), layouts, mesh)),
        frozen=state.frozen,
        model_state=model_state,
        opt_state=opt_state,
        skipped=state.skipped + skip,
        skipped_in_row=(state.skipped_in_row + 1) * skip,
    )
    counts = {"skipped": after.skipped, "skipped_in_row": after.skipped_in_row}
    return after, {**sums, "loss": loss, "grad_norm": norm, **counts}


def evaluate_step(gradients: Gradients, mesh: Mesh, state: TrainState, batch: Any, micro_batches: int) -> Metrics:
    """The exact mean loss of a batch in evaluation mode, `micro_batches` parts after each other, and its sums."""
    params, frozen, model_state = map(flatten_dict, (state.params, state.frozen, state.model_state))
    rows = rows_per_device(batch, mesh, micro_batches)
    local = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    gradients = gradients.for_evaluation(mesh, params | frozen, model_state, local)
    rest = {path: data_part(layout.params) for path, layout in gradients.layouts.items()}
    sums = jax.shard_map(
        functools.partial(gradients.evaluate, micro_batches=micro_batches),
        mesh=mesh,
        axis_names=set(DATA_AXES),
        check_vma=False,
        out_specs=P(),
        in_specs=({path: rest[path] for path in params}, {path: rest[path] for path in frozen}, P(), P(DATA_AXES)),
    )(params, frozen, model_state, batch)
    return {**sums, "loss": sums["loss"] / sums["weight"]}


def init_state(
    model_fn: Callable[[], nnx.Module],
    parts: Template,
    trainable: Any,
    params: Mapping[Path, jax.ShapeDtypeStruct],
    frozen: Mapping[Path, jax.ShapeDtypeStruct],
    update: Optimizer,
) -> TrainState:
    """A new train state, to be jitted with the shardings that it is born in.

    Args:
        parts: the model as it was looked at.
        params, frozen: path -> shape and dtype at rest.

    Raises:
        ValueError: `model_fn` makes another model than that.
    """
    with nnx.use_eager_sharding(False):
        born = template(model_fn(), trainable)
    _check_same(parts, born)
    values = unflatten_dict({path: jnp.asarray(value_of(v)) for path, v in born.trained.items()})
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params=unflatten_dict({path: jnp.asarray(value_of(born.trained[path]), x.dtype) for path, x in params.items()}),
        frozen=unflatten_dict({path: jnp.asarray(value_of(born.frozen[path]), x.dtype) for path, x in frozen.items()}),
        model_state=unflatten_dict({path: value_of(v) for path, v in born.state.items()}),
        # From the values as they were born, so a master is not rounded to the precision at rest.
        opt_state=update.init(values),
        skipped=zero,
        skipped_in_row=zero,
    )


def _per_device(gradients: Gradients, mesh: Mesh) -> Callable[..., Any]:
    layouts = gradients.layouts
    rest = {path: data_part(layout.params) for path, layout in layouts.items()}
    trained = {path: rest[path] for path in gradients.template.trained}
    frozen = {path: rest[path] for path in gradients.template.frozen}
    summed = {path: data_part(layouts[path].opt_state) for path in gradients.slots}
    return jax.shard_map(
        gradients,
        mesh=mesh,
        axis_names=set(DATA_AXES),
        check_vma=False,
        in_specs=(trained, frozen, P(), P(DATA_AXES)),
        out_specs=(summed, P(), P()),
    )


def _constrain(values: Mapping[Path, Any], layouts: Mapping[Path, Layout], mesh: Mesh) -> dict[Path, Any]:
    return {
        path: lax.with_sharding_constraint(x, NamedSharding(mesh, layouts[path].opt_state))
        for path, x in values.items()
    }


def _publish(values: Mapping[Path, Any], layouts: Mapping[Path, Layout], mesh: Mesh) -> dict[Path, Any]:
    """Updated parameters from the optimizer state's layout to rest, in one manual region.

    One region per leaf would do the same, but XLA of jaxlib 0.10 calls equal regions as one function and aborts on it.
    """
    move = {path: x for path, x in values.items() if not isinstance(layouts[path].publish, Identity)}
    if not move:
        return dict(values)
    published = jax.shard_map(
        lambda shards: {path: layouts[path].publish(x) for path, x in shards.items()},
        mesh=mesh,
        axis_names=set(DATA_AXES),
        check_vma=False,
        in_specs=({path: data_part(layouts[path].opt_state) for path in move},),
        out_specs={path: data_part(layouts[path].params) for path in move},
    )(move)
    return {**values, **published}


def data_part(spec: P) -> P:
    """What of a spec is sharded over the data-parallel axes, which are manual; the rest is the compiler's."""

    def part(entry: Any) -> Any:
        axes = entry if isinstance(entry, tuple) else (entry,)
        return entry if set(axes) <= set(DATA_AXES) else None

    return P(*map(part, spec))


def rows_per_device(batch: Any, mesh: Mesh, micro_batches: int) -> int:
    """Rows of one microbatch on one device.

    Raises:
        ValueError: arrays without a common first dim, or one that devices times microbatches do not divide.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    sizes = {jax.tree_util.keystr(path): (x.shape[0] if getattr(x, "shape", ()) else None) for path, x in leaves}
    if not sizes or None in sizes.values() or len(set(sizes.values())) != 1:
        shown = ", ".join(f"{path}: {'none' if n is None else n}" for path, n in list(sizes.items())[:8])
        raise ValueError(f"every leaf of a batch must be an array with the same first dim, the batch; got {shown}")
    size, devices = next(iter(sizes.values())), data_size(mesh)
    if not size or size % (devices * micro_batches):
        raise ValueError(
            f"a batch of {size} cannot be split over node x dp = {devices} devices into {micro_batches} microbatches: "
            f"it must be a positive multiple of {devices} x {micro_batches} = {devices * micro_batches}"
        )
    return size // (devices * micro_batches)


def _check_same(wanted: Template, born: Template) -> None:
    for kind in ("trained", "frozen", "state"):
        first, second = ({p: jnp.shape(value_of(v)) for p, v in getattr(t, kind).items()} for t in (wanted, born))
        if first != second:
            path = next(path for path in {**first, **second} if first.get(path) != second.get(path))
            raise ValueError(
                f"model_fn() made another model when it was called again: {path_name(path)!r} had the shape "
                f"{first.get(path)} and then {second.get(path)}; it must make the same model every time"
            )
