"""From a model, a loss, an optimizer and a mesh to a run.

`setup` looks at a model without making it, chooses the specs, and returns a `Run`: the jitted `init` and `step`, and
the specs that they hold the train state to.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding

from jzero import host_memory
from jzero import zero as zero_lib
from jzero.comm import Comm
from jzero.driver import at_once
from jzero.gradients import Gradients, device_dtype
from jzero.look import Seen, look
from jzero.mesh import TP, as_mesh, batch_sharding
from jzero.offload.averages import averages_at_rest
from jzero.offload.layouts import offloaded
from jzero.offload.setup import streamed
from jzero.optim import with_master
from jzero.pace import Pace
from jzero.placement import Offload
from jzero.precision import Precision
from jzero.probe import LossFn, hoisted, notes
from jzero.run import Run
from jzero.specs import notes_on_opt_state, shardings_of, specs_of
from jzero.step import TrainState, evaluate_step, init_state
from jzero.zero import Layout, Path, Zero, data_part

_AS_MADE = Precision()
_BY_XLA = Comm()
_EVERYWHERE = Zero()
_NOTHING = Offload()


def setup(
    model_fn: Callable[[], nnx.Module],
    loss_fn: LossFn,
    tx: optax.GradientTransformation | Callable[[Any], optax.GradientTransformation],
    mesh: Mesh | str | Mapping[str, int] | None,
    batch: Any,
    *,
    stage: int = 3,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    trainable: Any = nnx.Param,
    precision: Precision = _AS_MADE,
    zero: Zero = _EVERYWHERE,
    comm: Comm = _BY_XLA,
    offload: Offload = _NOTHING,
) -> Run:
    """Makes a ZeRO run of any Flax NNX model and any optax transformation, without making an array.

    Args:
        model_fn: () -> the model, unmodified.
        loss_fn: (model, batch) -> (sum of losses, weight), or with a dict of sums as a third value.  Its mean over a
            batch is sum / weight, whatever the devices and microbatches.
        tx: sees float32 gradients of the mean loss, after clipping.  Or a function that makes it from the trained
            parameters as layers read them, a nested dict of ShapeDtypeStruct: for masks by rank, since a stacked norm's
            scale is no matrix.
        mesh: from `make_mesh`, or what `make_mesh` takes.
        batch: one batch, arrays or ShapeDtypeStructs; the first dim is the batch.
        stage: 0 to 3.
        micro_batches: forward-backward passes per step.
        clip_norm: largest global norm of the gradient, applied once, after accumulation.
        trainable: NNX filter of the parameters to train; other `nnx.Param`s are frozen.
        precision: dtypes of parameters, accumulated gradients and reductions.
        zero: over which axes, and what stays whole or gathered.
        comm: how collectives are scheduled.
        offload: what rests outside of the device.

    Raises:
        ValueError: bad stage, mesh, batch, annotation, pattern.
        ShardingError: what zero or offload ask for cannot be done with these parameters.
        SeparationError: an optimizer that cannot be run in groups.
        TypeError: not an NNX module, a loss that is not sums, or an offload that is no `Offload`.
        UnsupportedModelError: the model does what cannot be sharded; names the place.
        HostMemoryError: more is to rest in pinned host memory than XLA lets a process have.
    """
    mesh = as_mesh(mesh)
    comm.compiler_options(mesh)  # before work starts
    _check_arguments(tx, micro_batches, clip_norm, offload)
    seen = look(model_fn, loss_fn, trainable, mesh, batch, micro_batches, precision.params)
    layouts, whole = zero_lib.layouts(seen.leaves(), stage, zero, mesh, precision.reduce, precision.grads)
    layouts, reads = offloaded(layouts, offload, seen, zero, mesh)
    options = _compiler_options(comm, seen, layouts, mesh)
    gradients = _gradients(seen, loss_fn, layouts, mesh, precision, micro_batches, keep=not zero.regather)

    per_layer = seen.per_layer()
    dtypes = unflatten_dict({path: x.dtype for path, x in seen.trained().items()})
    optimizer = with_master(_transformation(tx, per_layer), dtypes)
    born = functools.partial(init_state, model_fn, seen.template, trainable, seen.params)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        shapes = jax.eval_shape(functools.partial(born, optimizer))
    specs = specs_of(seen, layouts, shapes)
    shardings = shardings_of(mesh, specs.state, layouts)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    rows = batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, device_dtype(x), sharding=rows), batch)

    make_driver = functools.partial(streamed, offload, reads) if offload.in_groups else at_once
    limit = math.inf if clip_norm is None else clip_norm
    driver = make_driver(optimizer, gradients, limit, state, batch, born, options)
    run = Run(
        mesh=mesh,
        specs=specs,
        whole=whole,
        notes=(
            *notes(seen.found, seen.layers, layouts, gradients.hoisted, regather=zero.regather),
            *notes_on_opt_state(layouts, shapes.opt_state, specs.opt_state),
        ),
        micro_batches=micro_batches,
        per_layer=per_layer,
        abstract_batch=batch,
        _gradients=gradients,
        _driver=driver,
        _evaluate=_evaluation(gradients, mesh, driver.entered(dataclasses.replace(state, opt_state=())), options),
        _average_at_rest=averages_at_rest(gradients, mesh, dtypes, shardings.params),
        _pace=Pace(mesh),
    )
    _check_pinned(run)
    return run


def _compiler_options(comm: Comm, seen: Seen, layouts: Mapping[Path, Layout], mesh: Mesh) -> dict[str, Any] | None:
    layers_fetch = any(layout.memory or layout.in_files for layout in layouts.values())
    return comm.compiler_options(mesh, _layer_bytes(seen.leaves(), layouts, mesh), layers_fetch=layers_fetch)


def _gradients(
    seen: Seen,
    loss_fn: LossFn,
    layouts: Mapping[Path, Layout],
    mesh: Mesh,
    precision: Precision,
    micro_batches: int,
    *,
    keep: bool,
) -> Gradients:
    return Gradients(
        template=seen.template,
        loss_fn=loss_fn,
        params={path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in seen.params.items()},
        layouts=layouts,
        layers=seen.layers,
        slots={path: _slot(x, layouts[path], mesh, precision.grads) for path, x in seen.trained().items()},
        tp_specs=seen.tp_specs,
        hoisted=seen.template.early | hoisted(seen.found.uses, seen.params, seen.layers, layouts),
        changed=seen.found.changed,
        micro_batches=micro_batches,
        keep=keep,
        sum_names=seen.found.sum_names,
    )


def _evaluation(gradients: Gradients, mesh: Mesh, given: TrainState, options: dict[str, Any] | None) -> Any:
    """The jitted `evaluate_step`.

    Args:
        given: a state without optimizer state, abstract, as programs are given it.
    """
    shardings = (jax.tree.map(lambda x: x.sharding, given), batch_sharding(mesh))
    evaluate = functools.partial(evaluate_step, gradients, mesh)
    return jax.jit(evaluate, static_argnums=2, in_shardings=shardings, compiler_options=options)


def _check_pinned(run: Run) -> None:
    """Before work starts: XLA would say it in the middle of the first step."""
    pinned = run.pinned_bytes()
    if not pinned:
        return
    own = [device for device in run.mesh.devices.flat if device.process_index == jax.process_index()]
    # Absent GPUs have no memories.
    count = sum(1 for device in own if device.platform == "gpu" and device.addressable_memories())
    if count:
        host_memory.check_pinned(count * pinned, os.environ)


def _layer_bytes(leaves: Iterable[zero_lib.Leaf], layouts: Mapping[Path, Layout], mesh: Mesh) -> int:
    """Message bytes of what one layer gathers; of several stacks, of one layer of each."""

    def gathered(leaf: zero_lib.Leaf) -> int:
        elements = math.prod(leaf.shape[leaf.layer_dims :]) // (mesh.shape[TP] if TP in leaf.tp_spec else 1)
        return layouts[leaf.path].use_forward.message_bytes(elements, leaf.bytes_per_element)

    return sum(gathered(leaf) for leaf in leaves if leaf.layer_dims)


def _slot(at_rest: jax.ShapeDtypeStruct, layout: Layout, mesh: Mesh, dtype: str) -> jax.ShapeDtypeStruct:
    """The gradient of a parameter as one device accumulates it, tp dims whole."""
    shape = NamedSharding(mesh, data_part(layout.grads)).shard_shape(at_rest.shape)
    return jax.ShapeDtypeStruct(shape, dtype)


def _check_arguments(tx: Any, micro_batches: Any, clip_norm: Any, offload: Any) -> None:
    if not callable(tx):
        _check_transformation(tx, "tx")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r} must be a whole number, at least 1")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise ValueError(f"clip_norm={clip_norm!r} must be a positive number; None does not clip")
    if not isinstance(offload, Offload):
        raise TypeError(f"offload={offload!r} must be a jzero.Offload, such as jzero.Offload(optimizer='host')")


def _transformation(tx: Any, per_layer: Any) -> optax.GradientTransformation:
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return tx
    made = tx(per_layer)
    _check_transformation(made, "what tx made of the parameters")
    return made


def _check_transformation(tx: Any, name: str) -> None:
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(f"{name} must be an optax transformation, such as optax.adamw(1e-3); got {tx!r}")
