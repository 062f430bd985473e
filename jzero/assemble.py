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
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import host_memory
from jzero import zero as zero_lib
from jzero.comm import Comm
from jzero.driver import at_once
from jzero.gradients import Gradients, device_dtype
from jzero.host_grads import grads_on_host
from jzero.host_params import on_host
from jzero.look import Seen, look
from jzero.mesh import TP, as_mesh, batch_sharding
from jzero.offload.averages import averages_at_rest
from jzero.offload.in_files import read_from_files
from jzero.offload.param_reads import ParamReads
from jzero.offload.setup import streamed
from jzero.optim import with_master
from jzero.pace import Pace
from jzero.placement import Offload
from jzero.precision import Precision
from jzero.probe import LossFn, hoisted, notes
from jzero.run import Run, Specs
from jzero.step import TrainState, evaluate_step, init_state
from jzero.zero import Layout, Path, Zero, data_part

_AS_MADE = Precision()
_BY_XLA = Comm()
_EVERYWHERE = Zero()
_NOTHING = Offload()
_LARGE = 1024  # elements; what is smaller is not worth a word


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
        TypeError: not an NNX module, or a loss that is not sums.
        UnsupportedModelError: the model does what cannot be sharded; names the place.
        HostMemoryError: more is to rest in pinned host memory than XLA lets a process have.
    """
    mesh = as_mesh(mesh)
    comm.compiler_options(mesh)  # before work starts
    _check_arguments(tx, micro_batches, clip_norm)
    seen = look(model_fn, loss_fn, trainable, mesh, batch, micro_batches, precision.params)
    per_layer = seen.per_layer()
    layouts, whole = zero_lib.layouts(seen.leaves(), stage, zero, mesh, precision.reduce, precision.grads)
    if offload.params == "host":
        layouts = on_host(layouts, seen.leaves(), zero, offload.min_param_bytes)
    reads = ParamReads(mesh, {}, {})
    if offload.params == "nvme":
        layouts, reads = read_from_files(layouts, seen.leaves(), zero, offload.min_param_bytes, seen.params, mesh)
    if offload.grads == "host":
        trained = [leaf for leaf in seen.leaves() if leaf.path in seen.trained()]
        layouts |= grads_on_host(layouts, trained, offload.min_param_bytes)
    layers_fetch = any(layout.memory or layout.in_files for layout in layouts.values())
    layer_bytes = _layer_bytes(seen.leaves(), layouts, mesh)
    compiler_options = comm.compiler_options(mesh, layer_bytes, layers_fetch=layers_fetch)
    gradients = Gradients(
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
        keep=not zero.regather,
        sum_names=seen.found.sum_names,
    )
    dtypes = unflatten_dict({path: x.dtype for path, x in seen.trained().items()})
    optimizer = with_master(_transformation(tx, per_layer), dtypes)
    limit = math.inf if clip_norm is None else clip_norm
    born = functools.partial(init_state, model_fn, seen.template, trainable, seen.params)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        shapes = jax.eval_shape(functools.partial(born, optimizer))

    specs = _specs(seen, layouts, shapes)
    shardings = _shardings(mesh, specs.state, layouts)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    rows = batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, device_dtype(x), sharding=rows), batch)
    make_driver = functools.partial(streamed, offload, reads) if offload.in_groups else at_once
    driver = make_driver(optimizer, gradients, limit, state, batch, born, compiler_options)
    evaluate = functools.partial(evaluate_step, gradients, mesh)
    without_optimizer = jax.tree.map(lambda x: x.sharding, driver.entered(dataclasses.replace(state, opt_state=())))
    run = Run(
        mesh=mesh,
        specs=specs,
        abstract_state=driver.state,
        whole=whole,
        notes=(
            *notes(seen.found, seen.layers, layouts, gradients.hoisted, regather=zero.regather),
            *_note_on_opt_state(layouts, shapes.opt_state, specs.opt_state),
        ),
        micro_batches=micro_batches,
        per_layer=per_layer,
        abstract_batch=batch,
        file_bytes=driver.file_bytes,
        _gradients=gradients,
        _init=driver.init,
        _step=driver.step,
        _programs=driver.programs,
        _evaluate=jax.jit(
            evaluate, static_argnums=2, in_shardings=(without_optimizer, rows), compiler_options=compiler_options
        ),
        _average_at_rest=averages_at_rest(gradients, mesh, dtypes, shardings.params),
        _elsewhere_bytes=driver.elsewhere_bytes,
        _entered=driver.entered,
        _finished=driver.finished,
        _close=driver.close,
        _pace=Pace(mesh),
    )
    _check_pinned(run)
    return run


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


def _specs(seen: Seen, layouts: Mapping[Path, Layout], shapes: TrainState) -> Specs:
    trained, frozen = seen.template.trained, seen.template.frozen
    places = {path: (x.shape, layouts[path].opt_state) for path, x in seen.trained().items()}
    params = unflatten_dict({path: layouts[path].params for path in trained})
    opt_state = zero_lib.opt_state_specs(shapes.opt_state, places)
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


def _shardings(mesh: Mesh, specs: TrainState, layouts: Mapping[Path, Layout]) -> TrainState:
    """Where all of the train state lies between steps."""
    at_rest = jax.tree.map(functools.partial(NamedSharding, mesh), specs)

    def placed(specs: Any) -> Any:
        return unflatten_dict({path: layouts[path].at_rest(mesh) for path in flatten_dict(specs)})

    return dataclasses.replace(at_rest, params=placed(specs.params), frozen=placed(specs.frozen))


def _note_on_opt_state(layouts: Mapping[Path, Layout], shapes: Any, specs: Any) -> tuple[str, ...]:
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


def _slot(at_rest: jax.ShapeDtypeStruct, layout: Layout, mesh: Mesh, dtype: str) -> jax.ShapeDtypeStruct:
    """The gradient of a parameter as one device accumulates it, tp dims whole."""
    shape = NamedSharding(mesh, data_part(layout.grads)).shard_shape(at_rest.shape)
    return jax.ShapeDtypeStruct(shape, dtype)


def _check_arguments(tx: Any, micro_batches: Any, clip_norm: Any) -> None:
    if not callable(tx):
        _check_transformation(tx, "tx")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r} must be a whole number, at least 1")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise ValueError(f"clip_norm={clip_norm!r} must be a positive number; None does not clip")


def _transformation(tx: Any, per_layer: Any) -> optax.GradientTransformation:
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return tx
    made = tx(per_layer)
    _check_transformation(made, "what tx made of the parameters")
    return made


def _check_transformation(tx: Any, name: str) -> None:
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(f"{name} must be an optax transformation, such as optax.adamw(1e-3); got {tx!r}")
