"""One training step for any model and any optimizer, at any stage.

The step never asks which stage it runs.  It is in two parts: gradients in a region that is manual over the
data-parallel axes (`gradients.py`), and the optimizer outside of it, on global arrays.  `assemble.py` makes the
arguments.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.collectives import Fetch, over_data
from jzero.gradients import Gradients, abstract_rows
from jzero.mesh import DATA_AXES
from jzero.optim import Optimizer
from jzero.template import Template, split_model
from jzero.use import value_of
from jzero.zero import Layout, Path, data_part, path_name

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


class Factors(NamedTuple):
    """What an accumulated gradient is divided and then multiplied by, to be that of the mean loss, clipped.

    Attributes:
        weight: float32 scalar, of the batch.
        scale: float32 scalar, at most 1.
    """

    weight: jax.Array
    scale: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grads", "model_state", "loss", "finite", "metrics", "factors"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Found:
    """What a batch says of the parameters.

    Attributes:
        grads: nested dict, float32, in the layout of the optimizer state; of the mean loss, clipped.  Where the
            optimizer runs in groups a list, as they were accumulated.
        model_state: after the batch, or as it was where the gradient is not finite.
        loss: float32 scalar, the exact mean.
        finite: whether loss and gradient are; the update is skipped where they are not.
        metrics: scalars to log.
        factors: which gradients of the summed loss are still to be taken by, where the optimizer runs in groups.
    """

    grads: Any
    model_state: Any
    loss: jax.Array
    finite: jax.Array
    metrics: Metrics
    factors: Factors


def train_step(
    gradients: Gradients, optimizer: Optimizer, mesh: Mesh, clip_norm: float, state: TrainState, batch: Any
) -> tuple[TrainState, Metrics]:
    """Gradients, one update, and the way back to rest.

    Args:
        clip_norm: largest global norm of the gradient; infinite for none.
    """
    found = find(gradients, mesh, clip_norm, state.params, state.frozen, state.model_state, batch)
    # The optimizer sees every array in the layout of its own state; `old` costs no traffic, it is a slice at most.
    old = in_update(gradients, mesh, state.params)
    new, opt_state, report = updated(optimizer, found.loss, found.finite, found.grads, state.opt_state, old)
    params = published(gradients, mesh, new)
    after = advanced(dataclasses.replace(state, params=params, opt_state=opt_state), found)
    return after, logged(found, after, report)


def find(
    gradients: Gradients, mesh: Mesh, clip_norm: float, params: Any, frozen: Any, model_state: Any, batch: Any
) -> Found:
    """Gradients, one division by the total weight, one clip.

    Args:
        params, frozen, model_state: of the train state.
        clip_norm: largest global norm of the gradient; infinite for none.
    """
    grads, sums, after, _ = summed(gradients, mesh, (), params, frozen, model_state, batch)
    grads = _constrain(jax.tree.map(lambda g: g / sums["weight"], grads), gradients.trained_layouts, mesh)
    found = judged(sums, optax.tree.norm(grads), clip_norm, model_state, after)
    return dataclasses.replace(found, grads=unflatten_dict(jax.tree.map(lambda g: g * found.factors.scale, grads)))


def summed(
    gradients: Gradients, mesh: Mesh, memory: Sequence[Any], params: Any, frozen: Any, model_state: Any, batch: Any
) -> tuple[dict[Path, Any], dict[str, jax.Array], Any, list[dict[Path, Any]]]:
    """What `Gradients.into` returns, on global arrays; gradients in the layout of the optimizer state.

    Args:
        memory: as `Gradients.into` takes it.
    """
    specs = {path: data_part(to.opt_state) for path, to in gradients.trained_layouts.items()}
    given = [{path: specs[path] for path in part} for part in memory]
    places = (specs, P(), P(), given[1:])
    return over_data(gradients.into, mesh, (given, *_at_rest_specs(gradients)), places)(
        list(memory), flatten_dict(params), flatten_dict(frozen), flatten_dict(model_state), batch
    )


def judged(sums: dict[str, jax.Array], norm: jax.Array, clip_norm: float, before: Any, after: Any) -> Found:
    """What a batch says, but for its gradients.

    Args:
        sums: over all devices.
        norm: of the gradient of the mean loss.
        before, after: the model's state, as a tree and as a flat dict.
    """
    loss = sums["loss"] / sums["weight"]
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    scale = jnp.minimum(1.0, clip_norm / norm)
    kept = where(finite, unflatten_dict(after), before)
    metrics = {**sums, "loss": loss, "grad_norm": norm}
    return Found(None, kept, loss, finite, metrics, Factors(sums["weight"], scale))


def updated(
    optimizer: Optimizer, loss: jax.Array, finite: jax.Array, grads: Any, opt_state: Any, old: Any
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """(parameters, optimizer state, scalars to log) after one update, or as they were where it is skipped.

    Args:
        loss, finite: as of `Found`.
        grads, opt_state, old: of all parameters, or of parts of them that the optimizer treats by themselves.
    """
    new = optimizer.update(grads, opt_state, old, loss)
    params, opt_state = where(finite, new, (old, opt_state))
    return params, opt_state, optimizer.report(opt_state)


def where(finite: jax.Array, new: Any, old: Any) -> Any:
    """`new`, or `old` where the gradient is not finite."""
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


def in_update(gradients: Gradients, mesh: Mesh, params: Any) -> Any:
    """Parameters at rest in the layout in which they are updated, on the device."""
    layouts = gradients.trained_layouts
    values: dict[Path, Any] = flatten_dict(params)
    values = {path: Fetch()(x) if layouts[path].memory else x for path, x in values.items()}
    return unflatten_dict(_constrain(values, layouts, mesh))


def published(gradients: Gradients, mesh: Mesh, params: Any) -> Any:
    """Parameters in the layout in which they are updated, at rest."""
    return unflatten_dict(_publish(flatten_dict(params), gradients.trained_layouts, mesh))


def advanced(state: TrainState, found: Found) -> TrainState:
    """`state` with the counters and the model's state as the batch left them."""
    skip = 1 - found.finite.astype(jnp.int32)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        model_state=found.model_state,
        skipped=state.skipped + skip,
        skipped_in_row=(state.skipped_in_row + 1) * skip,
    )


def logged(found: Found, after: TrainState, report: Mapping[str, jax.Array]) -> Metrics:
    """The metrics of a step that led to `after`."""
    return {**found.metrics, **report, "skipped": after.skipped, "skipped_in_row": after.skipped_in_row}


def at_rest(gradients: Gradients, mesh: Mesh, dtypes: Any, values: Any) -> Any:
    """Values in the layout of the optimizer state, such as an average of the parameters, as parameters at rest.

    Args:
        dtypes: tree of the dtypes at rest.
    """
    values = jax.tree.map(lambda dtype, x: x.astype(dtype), dtypes, values)
    return published(gradients, mesh, in_update(gradients, mesh, values))


def evaluate_step(gradients: Gradients, mesh: Mesh, state: TrainState, batch: Any, micro_batches: int) -> Metrics:
    """The exact mean loss of a batch in evaluation mode, `micro_batches` parts after each other, and its sums."""
    params, frozen, model_state = map(flatten_dict, (state.params, state.frozen, state.model_state))
    local = abstract_rows(batch, mesh, micro_batches)
    gradients = gradients.for_evaluation(mesh, model_state, local)
    evaluate = functools.partial(gradients.evaluate, micro_batches=micro_batches)
    sums = over_data(evaluate, mesh, _at_rest_specs(gradients), P())(params, frozen, model_state, batch)
    return {**sums, "loss": sums["loss"] / sums["weight"]}


def init_state(
    model_fn: Callable[[], nnx.Module],
    template: Template,
    trainable: Any,
    params: Mapping[Path, jax.ShapeDtypeStruct],
    optimizer: Optimizer,
) -> TrainState:
    """A new train state, to be jitted with the shardings that it is born in.

    Args:
        template: the model as it was looked at.
        params: path -> shape and dtype at rest, of trained and frozen parameters.

    Raises:
        ValueError: `model_fn` makes another model than that.
    """
    with nnx.use_eager_sharding(False):
        born = split_model(model_fn(), trainable)
    _check_same(template, born)
    values = unflatten_dict({path: jnp.asarray(value_of(v)) for path, v in born.trained.items()})
    zero = jnp.zeros((), jnp.int32)

    def at_rest(path: Path, variable: Any) -> jax.Array:
        return jnp.asarray(value_of(variable), params[path].dtype)

    return TrainState(
        step=zero,
        params=unflatten_dict({path: at_rest(path, v) for path, v in born.trained.items()}),
        frozen=unflatten_dict({path: at_rest(path, v) for path, v in born.frozen.items()}),
        model_state=unflatten_dict({path: value_of(v) for path, v in born.state.items()}),
        # From the values as they were born, so a master is not rounded to the precision at rest.
        opt_state=optimizer.init(values),
        skipped=zero,
        skipped_in_row=zero,
    )


def _at_rest_specs(gradients: Gradients) -> tuple[Any, Any, P, P]:
    """How (trained parameters, frozen ones, model state, batch) enter the manual region."""
    rest = {path: data_part(layout.given) for path, layout in gradients.layouts.items()}
    template = gradients.template
    return {path: rest[path] for path in template.trained}, {p: rest[p] for p in template.frozen}, P(), P(DATA_AXES)


def _constrain(values: Mapping[Path, Any], layouts: Mapping[Path, Layout], mesh: Mesh) -> dict[Path, Any]:
    return {
        path: lax.with_sharding_constraint(x, NamedSharding(mesh, layouts[path].opt_state))
        for path, x in values.items()
    }


def _publish(values: Mapping[Path, Any], layouts: Mapping[Path, Layout], mesh: Mesh) -> dict[Path, Any]:
    """Updated parameters from the optimizer state's layout to rest, in one manual region.

    One region per leaf would do the same, but XLA of jaxlib 0.10 calls equal regions as one function and aborts on it.
    """
    shards = {path: x for path, x in values.items() if layouts[path].publish.moves}
    if not shards:
        return dict(values)
    published = over_data(
        lambda shards: {path: layouts[path].publish(x) for path, x in shards.items()},
        mesh,
        ({path: data_part(layouts[path].opt_state) for path in shards},),
        {path: data_part(layouts[path].params) for path in shards},
    )(shards)
    return {**values, **published}


def _check_same(wanted: Template, born: Template) -> None:
    for kind in ("trained", "frozen", "state"):
        first, second = ({p: jnp.shape(value_of(v)) for p, v in getattr(t, kind).items()} for t in (wanted, born))
        if first != second:
            path = next(path for path in {**first, **second} if first.get(path) != second.get(path))
            raise ValueError(
                f"model_fn() made another model when it was called again: {path_name(path)!r} had the shape "
                f"{first.get(path)} and then {second.get(path)}; it must make the same model every time"
            )
