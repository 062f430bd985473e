"""From a model, a loss, an optimizer and a mesh to a run: `setup` and what it returns.

`setup` looks at a model without making it, chooses the specs, and returns a `Run`: the jitted `init` and `step`, and
the specs that they hold the train state to.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import zero as zero_lib
from jzero.comm import Comm
from jzero.gradients import Gradients, abstract_rows, device_dtype, rows_per_device
from jzero.mesh import as_mesh, batch_sharding, data_size, process_rows
from jzero.optim import average_of, with_master
from jzero.probe import LossFn, Probe, hoisted, layer_dims, notes, probe
from jzero.step import Metrics, TrainState, at_rest, evaluate_step, init_state, train_step
from jzero.template import Template, split_abstract, value_of
from jzero.zero import Layout, Leaf, Path, Whole, Zero, data_part


@dataclass(frozen=True)
class Precision:
    """In which dtype things are held and sent.

    Attributes:
        params: of parameters at rest, in use, and on the wire; None leaves what the model made.  Whatever it is, the
            optimizer's m, v and master are float32.
        grads: of accumulated gradients.
        reduce: of gradients on the wire.
    """

    params: str | None = None
    grads: str = "float32"
    reduce: str = "float32"

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if not (_is_floating(dtype) or (name == "params" and dtype is None)):
                raise ValueError(f"precision.{name}={dtype!r} is no floating-point dtype; use 'bfloat16' or 'float32'")


def _is_floating(dtype: Any) -> bool:
    try:
        return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


_AS_MADE = Precision()
_BY_XLA = Comm()
_EVERYWHERE = Zero()
_LARGE = 1024  # elements; what is smaller is not worth a word


@dataclass(frozen=True)
class Specs:
    """PartitionSpec trees, the whole truth about a run; `state` is all of it in the shape of the train state."""

    params: Any
    grads: Any
    opt_state: Any
    state: TrainState


@dataclass(frozen=True)
class Run:
    """A model, a loss, an optimizer and a mesh, ready to train.

    Attributes:
        mesh: (node, dp, tp).
        specs: of everything at rest.
        abstract_state: the train state as ShapeDtypeStructs with their shardings.
        whole: the parameters that the stage would shard and could not, each with the reason.
        notes: what a user should know of how this model runs.
        micro_batches: forward-backward passes per step.
        per_layer: the trained parameters as layers read them, a nested dict of ShapeDtypeStruct: where layers are
            stacked, one layer's.
    """

    mesh: Mesh
    specs: Specs
    abstract_state: TrainState
    whole: tuple[Whole, ...]
    notes: tuple[str, ...]
    micro_batches: int
    per_layer: Any
    _gradients: Gradients
    _abstract_batch: Any
    _init: Callable[[], TrainState]
    _step: Any
    _evaluate: Any
    _average_at_rest: Any

    def init(self) -> TrainState:
        """A new train state, every array born in its shards."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer step; `state` is donated.

        Args:
            batch: tree of arrays [batch, ...] on the host or, better, from `put`.

        Returns:
            The new state, and scalars on the device: float32 `loss` (exact mean), `grad_norm` (before clipping),
            `weight` and the sums that the loss function returned; `lr` of the last update that was not skipped, where
            the optimizer's state has it (`jzero.make_optimizer`, `optax.inject_hyperparams`); int32 `skipped` and
            `skipped_in_row`.

        Raises:
            ValueError: a batch dim that the data-parallel devices times the microbatches do not divide, or a state that
                an earlier step has used up.
        """
        _check_alive(state)
        rows_per_device(_whole(batch, self.mesh), self.mesh, self.micro_batches)
        with jax.set_mesh(self.mesh):
            return self._step(state, self._placed(batch))

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """The exact loss of a batch in evaluation mode, its `weight`, and the loss function's sums."""
        _check_alive(state)
        rows = rows_per_device(_whole(batch, self.mesh), self.mesh, 1)
        with jax.set_mesh(self.mesh):
            return self._evaluate(state, self._placed(batch), self._evaluation_parts(rows))

    def averaged(self, state: TrainState) -> TrainState:
        """A state whose parameters are the averages that `jzero.averaged` keeps, at rest: to evaluate or to export.

        It shares all else, and where nothing moves the averages too, with `state`: use it before the next step.

        Raises:
            ValueError: the optimizer keeps no average, or the state is used up.
        """
        _check_alive(state)
        average = average_of(state.opt_state)
        with jax.set_mesh(self.mesh):
            return dataclasses.replace(state, params=self._average_at_rest(average))

    def model(self, state: TrainState) -> nnx.Module:
        """The NNX module on the state's global arrays."""
        params = flatten_dict(state.params) | flatten_dict(state.frozen)
        return self._gradients.template.merge(params, flatten_dict(state.model_state), {})

    def put(self, batch: Any) -> Any:
        """`batch` on the mesh, its first dim split over the data-parallel devices; does not wait.

        Args:
            batch: arrays of the host; with several processes each gives the rows that `jzero.process_rows` names.
        """
        rows_per_device(_whole(batch, self.mesh), self.mesh, 1)
        return self._placed(batch)

    def _placed(self, batch: Any) -> Any:
        sharding = batch_sharding(self.mesh)

        def place(x: Any) -> jax.Array:
            if isinstance(x, jax.Array):  # of all processes already
                return jax.device_put(x, sharding)
            return jax.make_array_from_process_local_data(sharding, x)

        return jax.tree.map(place, batch)

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """The run's programs, lowered; no array is made."""
        with jax.set_mesh(self.mesh):
            return {"step": self._step.lower(self.abstract_state, self._abstract_batch)}

    def at_rest_bytes(self) -> dict[str, int]:
        """Bytes that one device holds between steps, by class."""
        state, specs, mesh = self.abstract_state, self.specs, self.mesh
        return {
            "params": _tree_bytes(state.params, specs.params, mesh),
            "frozen": _tree_bytes(state.frozen, specs.state.frozen, mesh),
            "opt_state": _tree_bytes(state.opt_state, specs.opt_state, mesh),
            "model_state": _tree_bytes(state.model_state, specs.state.model_state, mesh),
        }

    def grads_bytes(self) -> int:
        """Bytes of the gradients that one device accumulates during a step."""
        slots, specs = self._gradients.slots, self._gradients.tp_specs
        return sum(zero_lib.shard_bytes(x.shape, x.dtype, specs[path], self.mesh) for path, x in slots.items())

    def _evaluation_parts(self, rows: int) -> int:
        """Microbatches of an evaluation over `rows` rows a device: no more rows at a time than in training."""
        at_a_time = rows_per_device(self._abstract_batch, self.mesh, self.micro_batches)
        return next(n for n in range(-(-rows // at_a_time), rows + 1) if rows % n == 0)


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

    Raises:
        ValueError: bad stage, mesh, batch, annotation, pattern.
        TypeError: not an NNX module, or a loss that is not sums.
        UnsupportedModelError: the model does what cannot be sharded; names the place.
    """
    mesh = as_mesh(mesh)
    compiler_options = comm.compiler_options(mesh)
    _check_arguments(tx, micro_batches, clip_norm)
    seen = _look(model_fn, loss_fn, trainable, mesh, batch, micro_batches, precision.params)
    per_layer = unflatten_dict({path: _of_one_layer(x, seen.layers[path]) for path, x in seen.trained().items()})
    layouts, whole = zero_lib.layouts(seen.leaves(), stage, zero, mesh, precision.reduce, precision.grads)
    gradients = Gradients(
        template=seen.template,
        loss_fn=loss_fn,
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
    init = functools.partial(init_state, model_fn, seen.template, trainable, seen.params, optimizer)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        shapes = jax.eval_shape(init)

    specs = _specs(seen, layouts, shapes)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs.state)
    rows = batch_sharding(mesh)
    step = functools.partial(train_step, gradients, optimizer, mesh, limit)
    evaluate = functools.partial(evaluate_step, gradients, mesh)
    return Run(
        mesh=mesh,
        specs=specs,
        abstract_state=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        whole=whole,
        notes=(
            *notes(seen.found, seen.layers, layouts, gradients.hoisted, regather=zero.regather),
            *_note_on_opt_state(layouts, shapes.opt_state, specs.opt_state),
        ),
        micro_batches=micro_batches,
        per_layer=per_layer,
        _gradients=gradients,
        _abstract_batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, device_dtype(x), sharding=rows), batch),
        _init=jax.jit(init, out_shardings=shardings),
        _step=jax.jit(
            step,
            in_shardings=(shardings, rows),
            out_shardings=(shardings, NamedSharding(mesh, P())),
            donate_argnums=0,
            compiler_options=compiler_options,
        ),
        _evaluate=jax.jit(
            evaluate, static_argnums=2, in_shardings=(shardings, rows), compiler_options=compiler_options
        ),
        _average_at_rest=jax.jit(functools.partial(at_rest, gradients, mesh, dtypes), out_shardings=shardings.params),
    )


@dataclass(frozen=True)
class _Seen:
    """A model as it was looked at; no array of it was made.

    Attributes:
        template: the model without its arrays.
        params, state: path -> shape and dtype, at rest.
        tp_specs: what tensor parallelism takes, of both.
        found: what the loss does with it.
        layers: how many leading dims of each parameter number layers.
    """

    template: Template
    params: Mapping[Path, jax.ShapeDtypeStruct]
    state: Mapping[Path, jax.ShapeDtypeStruct]
    tp_specs: Mapping[Path, P]
    found: Probe
    layers: Mapping[Path, int]

    def leaves(self) -> list[Leaf]:
        return [
            Leaf(path, x.shape, self.layers[path], self.tp_specs[path], x.dtype.itemsize)
            for path, x in self.params.items()
        ]

    def trained(self) -> dict[Path, jax.ShapeDtypeStruct]:
        return {path: self.params[path] for path in self.template.trained}


def _look(
    model_fn: Callable[[], nnx.Module],
    loss_fn: LossFn,
    trainable: Any,
    mesh: Mesh,
    batch: Any,
    micro_batches: int,
    dtype: str | None,
) -> _Seen:
    local = abstract_rows(batch, mesh, micro_batches)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        template = split_abstract(model_fn, trainable)
        variables = {**template.trained, **template.frozen}
        params = {path: _at_rest(v, dtype) for path, v in variables.items()}
        state = {path: _abstract(value_of(v)) for path, v in template.state.items()}
        tp_specs = {path: _tp_spec(path, v, mesh) for path, v in {**variables, **template.state}.items()}
        found = probe(template, loss_fn, mesh, params, state, local)
    layers = {path: layer_dims(x.shape, found.uses[path]) for path, x in params.items()}
    return _Seen(template, params, state, tp_specs, found, layers)


def _specs(seen: _Seen, layouts: Mapping[Path, Layout], shapes: TrainState) -> Specs:
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


def _at_rest(variable: Any, dtype: str | None) -> jax.ShapeDtypeStruct:
    value = _abstract(value_of(variable))
    narrows = dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(value.shape, dtype if narrows else value.dtype)


def _of_one_layer(x: jax.ShapeDtypeStruct, layer_dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[layer_dims:], x.dtype)


def _abstract(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _slot(at_rest: jax.ShapeDtypeStruct, layout: Layout, mesh: Mesh, dtype: str) -> jax.ShapeDtypeStruct:
    """The gradient of a parameter as one device accumulates it, tp dims whole."""
    shape = NamedSharding(mesh, data_part(layout.grads)).shard_shape(at_rest.shape)
    return jax.ShapeDtypeStruct(shape, dtype)


def _tp_spec(path: Path, variable: Any, mesh: Mesh) -> P:
    annotated = isinstance(variable, nnx.Variable) and variable.has_metadata("out_sharding")
    names = nnx.get_partition_spec(variable).get_raw_value() if annotated else ()
    return zero_lib.tp_spec(tuple(names), value_of(variable).shape, path, mesh)


def _whole(batch: Any, mesh: Mesh) -> Any:
    """Shapes of the batch that all processes hold together: arrays of the host are the part of this one."""
    if jax.process_count() == 1:
        return batch
    processes = data_size(mesh) // len(process_rows(mesh, data_size(mesh)))

    def whole(x: Any) -> Any:
        if isinstance(x, jax.Array) or not getattr(x, "shape", ()):
            return x
        return jax.ShapeDtypeStruct((x.shape[0] * processes, *x.shape[1:]), x.dtype)

    return jax.tree.map(whole, batch)


def _check_alive(state: TrainState) -> None:
    # Not left to JAX: version 0.10 crashes on the second use of a donated array.
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):
        raise ValueError(
            "part of this train state was given to an earlier step, which reused its memory: use what step returned"
        )


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


def _tree_bytes(shapes: Any, specs: Any, mesh: Mesh) -> int:
    return sum(
        jax.tree.leaves(jax.tree.map(lambda x, s: zero_lib.shard_bytes(x.shape, x.dtype, s, mesh), shapes, specs))
    )
