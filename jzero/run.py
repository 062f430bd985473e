"""From a model, a loss, an optimizer and a mesh to a run: `setup` and what it returns.

`setup` looks at a model without making it, chooses the specs, and returns a `Run`: the jitted `init` and `step`, and
the specs that they hold the train state to.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import zero as zero_lib
from jzero.gradients import Gradients
from jzero.mesh import DATA_AXES, as_mesh
from jzero.optim import optimizer
from jzero.probe import LossFn, layer_dims, notes, probe
from jzero.step import Metrics, TrainState, data_part, evaluate_step, init_state, rows_per_device, train_step
from jzero.use import Template, abstract_template, value_of
from jzero.zero import Layout, Leaf, Path, Whole, Zero


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
            if dtype is not None and not _is_floating(dtype):
                raise ValueError(f"precision.{name}={dtype!r} is no floating-point dtype; use 'bfloat16' or 'float32'")


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


_AS_MADE = Precision()
_EVERYWHERE = Zero()


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
    """

    mesh: Mesh
    specs: Specs
    abstract_state: TrainState
    whole: tuple[Whole, ...]
    notes: tuple[str, ...]
    micro_batches: int
    _template: Template
    _gradients: Gradients
    _abstract_batch: Any
    _init: Callable[[], TrainState]
    _step: Any
    _evaluate: Any

    def init(self) -> TrainState:
        """A new train state, every array born in its shards."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer step; `state` is donated.

        Args:
            batch: tree of arrays [batch, ...] on the host or, better, from `put`.

        Returns:
            The new state, and float32 scalars on the device: `loss` (exact mean), `grad_norm` (before clipping),
            `weight`, `skipped`, `skipped_in_row`, and the sums that the loss function returned.

        Raises:
            ValueError: a batch dim that the data-parallel devices times the microbatches do not divide, or a state that
                an earlier step has used up.
        """
        _check_alive(state)
        rows_per_device(batch, self.mesh, self.micro_batches)
        with jax.set_mesh(self.mesh):
            return self._step(state, self.put(batch))

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """The exact loss of a batch in evaluation mode, its `weight`, and the loss function's sums."""
        _check_alive(state)
        rows = rows_per_device(batch, self.mesh, 1)
        with jax.set_mesh(self.mesh):
            return self._evaluate(state, self.put(batch), self._evaluation_parts(rows))

    def model(self, state: TrainState) -> nnx.Module:
        """The NNX module on the state's global arrays."""
        params = flatten_dict(state.params) | flatten_dict(state.frozen)
        return self._template.merge(params, flatten_dict(state.model_state), {})

    def put(self, batch: Any) -> Any:
        """`batch` on the mesh, its first dim split over the data-parallel devices; does not wait."""
        sharding = NamedSharding(self.mesh, P(DATA_AXES))
        rows_per_device(batch, self.mesh, 1)
        return jax.tree.map(lambda x: jax.device_put(x, sharding), batch)

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """The run's programs, lowered; no array is made."""
        with jax.set_mesh(self.mesh):
            return {"step": self._step.lower(self.abstract_state, self._abstract_batch)}

    def at_rest_bytes(self) -> dict[str, int]:
        """Bytes that one device holds between steps, by class; `grads` is what accumulation adds during one."""
        state, specs, mesh = self.abstract_state, self.specs, self.mesh
        grads = {path: slot.dtype for path, slot in self._gradients.slots.items()}
        sizes = {
            "params": _tree_bytes(state.params, specs.params, mesh),
            "frozen": _tree_bytes(state.frozen, specs.state.frozen, mesh),
            "opt_state": _tree_bytes(state.opt_state, specs.opt_state, mesh),
            "model_state": _tree_bytes(state.model_state, specs.state.model_state, mesh),
        }
        params: dict[Path, Any] = flatten_dict(state.params)
        like_grads = {path: jax.ShapeDtypeStruct(x.shape, grads[path]) for path, x in params.items()}
        return sizes | {"grads": _tree_bytes(unflatten_dict(like_grads), specs.grads, mesh)}

    def _evaluation_parts(self, rows: int) -> int:
        """Microbatches of an evaluation over `rows` rows a device: no more rows at a time than in training."""
        at_a_time = rows_per_device(self._abstract_batch, self.mesh, self.micro_batches)
        return next(n for n in range(-(-rows // at_a_time), rows + 1) if rows % n == 0)


def setup(
    model_fn: Callable[[], nnx.Module],
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh | str | Mapping[str, int] | None,
    batch: Any,
    *,
    stage: int = 3,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    trainable: Any = nnx.Param,
    precision: Precision = _AS_MADE,
    zero: Zero = _EVERYWHERE,
) -> Run:
    """Makes a ZeRO run of any Flax NNX model and any optax transformation, without making an array.

    Args:
        model_fn: () -> the model, unmodified.
        loss_fn: (model, batch) -> (sum of losses, weight), or with a dict of sums as a third value.  Its mean over a
            batch is sum / weight, whatever the devices and microbatches.
        tx: sees float32 gradients of the mean loss, after clipping.
        mesh: from `make_mesh`, or what `make_mesh` takes.
        batch: one batch, arrays or ShapeDtypeStructs; the first dim is the batch.
        stage: 0 to 3.
        micro_batches: forward-backward passes per step.
        clip_norm: largest global norm of the gradient, applied once, after accumulation.
        trainable: NNX filter of the parameters to train; other `nnx.Param`s are frozen.

    Raises:
        ValueError: bad stage, mesh, batch, annotation, pattern.
        TypeError: not an NNX module, or a loss that is not sums.
        UnsupportedModelError: the model does what cannot be sharded; names the place.
    """
    mesh = as_mesh(mesh)
    _check_numbers(micro_batches, clip_norm)
    rows = rows_per_device(batch, mesh, micro_batches)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        parts = abstract_template(model_fn, trainable)
        variables = {**parts.trained, **parts.frozen}
        abstract = {path: _at_rest(v, precision.params) for path, v in variables.items()}
        state = {path: _abstract(value_of(v)) for path, v in parts.state.items()}
        local = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), _device_dtype(x)), batch)
        found = probe(parts, loss_fn, mesh, abstract, state, local)

    tp_specs = {path: _tp_spec(path, v, mesh) for path, v in {**variables, **parts.state}.items()}
    layers = {path: layer_dims(x.shape, found.uses[path]) for path, x in abstract.items()}
    leaves = [Leaf(path, x.shape, layers[path], tp_specs[path], x.dtype.itemsize) for path, x in abstract.items()]
    layouts, whole = zero_lib.layouts(leaves, stage, zero, mesh, precision.reduce, precision.grads)
    gradients = Gradients(
        template=parts,
        loss_fn=loss_fn,
        layouts=layouts,
        layers=layers,
        slots={path: _slot(abstract[path], layouts[path], mesh, precision.grads) for path in parts.trained},
        tp_specs=tp_specs,
        hoisted=frozenset(),
        changed=found.changed,
        micro_batches=micro_batches,
        keep=not zero.regather,
        sum_names=found.sum_names,
    )
    gradients = replace(gradients, hoisted=gradients.hoisted_by(found.uses, abstract))
    reduced = frozenset(path for path, to in layouts.items() if to.moves) - gradients.hoisted
    gathered = frozenset(path for path in reduced if layouts[path].gathers)
    said = notes(found, gathered, reduced, layers)
    return _build(model_fn, gradients, tx, mesh, batch, trainable, clip_norm, abstract, state, whole, said)


def _build(
    model_fn: Callable[[], nnx.Module],
    gradients: Gradients,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    batch: Any,
    trainable: Any,
    clip_norm: float | None,
    abstract: Mapping[Path, jax.ShapeDtypeStruct],
    state: Mapping[Path, Any],
    whole: tuple[Whole, ...],
    notes: tuple[str, ...],
) -> Run:
    parts, layouts = gradients.template, gradients.layouts
    params = {path: abstract[path] for path in parts.trained}
    frozen = {path: abstract[path] for path in parts.frozen}
    update = optimizer(tx, unflatten_dict({path: x.dtype for path, x in params.items()}))

    init = functools.partial(init_state, model_fn, parts, trainable, params, frozen, update)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        shapes = jax.eval_shape(init)
    places = {path: (x.shape, layouts[path].opt_state) for path, x in params.items()}
    scalar = P()
    state_specs = TrainState(
        step=scalar,
        params=unflatten_dict({path: layouts[path].params for path in params}),
        frozen=unflatten_dict({path: layouts[path].params for path in frozen}),
        model_state=unflatten_dict({path: gradients.tp_specs[path] for path in state}),
        opt_state=zero_lib.opt_state_specs(shapes.opt_state, places),
        skipped=scalar,
        skipped_in_row=scalar,
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs)
    abstract_state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    rows = NamedSharding(mesh, P(DATA_AXES))
    evaluate = functools.partial(evaluate_step, gradients, mesh)
    return Run(
        mesh=mesh,
        specs=Specs(
            params=state_specs.params,
            grads=unflatten_dict({path: layouts[path].grads for path in params}),
            opt_state=state_specs.opt_state,
            state=state_specs,
        ),
        abstract_state=abstract_state,
        whole=whole,
        notes=notes,
        micro_batches=gradients.micro_batches,
        _template=parts,
        _gradients=gradients,
        _abstract_batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _device_dtype(x), sharding=rows), batch),
        _init=jax.jit(init, out_shardings=shardings),
        _step=jax.jit(
            functools.partial(train_step, gradients, update, mesh, clip_norm),
            in_shardings=(shardings, rows),
            out_shardings=(shardings, NamedSharding(mesh, P())),
            donate_argnums=0,
        ),
        _evaluate=jax.jit(evaluate, static_argnums=2, in_shardings=(shardings, rows)),
    )


def _at_rest(variable: Any, dtype: str | None) -> jax.ShapeDtypeStruct:
    value = _abstract(value_of(variable))
    narrows = dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(value.shape, dtype if narrows else value.dtype)


def _abstract(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _device_dtype(x: Any) -> Any:
    """What an array of the host becomes on a device: 64 bits are 32, unless JAX is told otherwise."""
    return jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)


def _slot(at_rest: jax.ShapeDtypeStruct, layout: Layout, mesh: Mesh, dtype: str) -> jax.ShapeDtypeStruct:
    """The gradient of a parameter as one device accumulates it, tp dims whole."""
    shape = NamedSharding(mesh, data_part(layout.grads)).shard_shape(at_rest.shape)
    return jax.ShapeDtypeStruct(shape, dtype)


def _tp_spec(path: Path, variable: Any, mesh: Mesh) -> P:
    annotated = isinstance(variable, nnx.Variable) and variable.has_metadata("out_sharding")
    names = nnx.get_partition_spec(variable).get_raw_value() if annotated else ()
    return zero_lib.tp_spec(tuple(names), value_of(variable).shape, path, mesh)


def _check_alive(state: TrainState) -> None:
    # Not left to JAX: version 0.10 crashes on the second use of a donated array.
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ValueError(
            "this train state was given to an earlier step, which reused its memory: use what step returned"
        )


def _check_numbers(micro_batches: int, clip_norm: float | None) -> None:
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} must be a whole number, at least 1")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm} must be positive; None does not clip")


def _tree_bytes(shapes: Any, specs: Any, mesh: Mesh) -> int:
    return sum(
        jax.tree.leaves(jax.tree.map(lambda x, s: zero_lib.shard_bytes(x.shape, x.dtype, s, mesh), shapes, specs))
    )
