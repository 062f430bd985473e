"""The part of a step that is manual: sums, gradients and accumulation, as one device computes them.

Everything here runs inside a `shard_map` over the data-parallel axes, with `tp` left to the compiler.  A device has
its rows of the batch and its parameters at rest; it returns gradients that are finished (summed over all devices, in
the layout of the optimizer state), sums for the metrics, and the model's new state.

Losses are sums: `loss_fn(model, batch) -> (sum of losses, weight)`.  Gradients of the sum are accumulated over
microbatches and devices and divided once by the total weight, so uneven weights are exact; a mean of means is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero import collectives
from jzero.mesh import DATA_AXES
from jzero.reads import Marks, UnsupportedModel, Uses, place_of, placed_over
from jzero.use import ASSIGNED, AtRest, Move, Template
from jzero.zero import Layout, Path, path_name

Values = Mapping[Path, Any]
LossFn = Callable[[Any, Any], tuple[Any, ...]]
_MANUAL = (
    "a sharding constraint inside the model, at {place}, does not hold in the region that is manual over the "
    f"data-parallel axes {DATA_AXES}: the batch is already split there; constrain over 'tp' alone"
)
_REPLACED = 2**31 - 1  # folded into a key that a model replaced; no data-parallel device has this index


@dataclass(frozen=True)
class Gradients:
    """Sums and gradients of a loss over one device's rows of a batch.

    Attributes:
        template: the model.
        loss_fn: -> (sum of losses, weight) or (sum of losses, weight, dict of sums).
        layouts: of all parameters, frozen ones too.
        layers: how many leading dims of each parameter number layers.
        slots: shape and dtype of each trained parameter's gradient on one device (tp dims whole).
        tp_specs: of all parameters and of the model's state.
        hoisted: parameters that are brought into use once, before the loss, since it reads them more than once.
        changed: what of the model's state the loss changes.
        micro_batches: how many forward-backward passes the rows are split into.
        keep: gathered parameters live to the end of the backward pass.
        sum_names: of the dict of sums.
    """

    template: Template
    loss_fn: LossFn
    layouts: Mapping[Path, Layout]
    layers: Mapping[Path, int]
    slots: Mapping[Path, jax.ShapeDtypeStruct]
    tp_specs: Mapping[Path, P]
    hoisted: frozenset[Path]
    changed: frozenset[Path]
    micro_batches: int
    keep: bool
    sum_names: tuple[str, ...] = field(default=("loss", "weight"))

    def __call__(self, params: Values, frozen: Values, state: Values, batch: Any) -> tuple[Values, dict[str, jax.Array], Values]:
        """Finished gradients (float32), sums over all devices (float32 scalars), the model's state after the batch."""

        def micro(state: Values, batch: Any) -> tuple[Values, tuple[Values, Values]]:
            # Ties the parameters to the microbatch: what does not depend on it, XLA moves out of the accumulation
            # loop, and a parameter that is gathered before the loop stays whole for the whole step.
            tied, batch = lax.optimization_barrier(((params, frozen), batch))

            def loss(slots: Values) -> tuple[jax.Array, tuple[Values, Values]]:
                model = self._model(slots, *tied, state)
                sums = sums_of(self.loss_fn, model, batch)
                after = self.template.state_of(model)
                return sums["loss"], (sums, {path: new.astype(state[path].dtype) for path, new in after.items()})

            grads, (sums, after) = jax.grad(loss, has_aux=True)(self._zero_slots())
            return after, (grads, sums)

        before = _device_keys(state)
        after, (grads, sums) = self._accumulate(micro, before, batch)
        grads = {path: self.layouts[path].finish(grad) for path, grad in grads.items()}
        return grads, self._total(sums), self._agree(state, before, after)

    def evaluate(self, params: Values, frozen: Values, state: Values, batch: Any, micro_batches: int) -> dict[str, jax.Array]:
        """Sums over all devices with the model in evaluation mode; nothing changes."""

        def micro(sums: Any, batch: Any) -> tuple[Any, None]:
            model = self._model(dict.fromkeys(params), params, frozen, state)
            model.eval()
            return jax.tree.map(jnp.add, sums, sums_of(self.loss_fn, model, batch)), None

        sums, _ = lax.scan(micro, self._zero_sums(), split_rows(batch, micro_batches))
        return self._total(sums)

    def for_evaluation(self, mesh: Mesh, params: Values, state: Values, batch: Any) -> "Gradients":
        """The same, ready for what the loss does in evaluation mode, which may read parameters elsewhere.

        Args:
            params, state, batch: anything with shapes and dtypes; `batch` is one device's rows of one microbatch.
        """
        found = probe(self.template, self.loss_fn, mesh, params, state, batch, train=False)
        return replace(self, hoisted=self.hoisted | self.hoisted_by(found.uses, params), sum_names=found.sum_names)

    def hoisted_by(self, uses: Mapping[Path, Uses], params: Values) -> frozenset[Path]:
        """The parameters that have to come into use before a loss that uses them so."""
        return self.template.early | {
            path for path, x in params.items()
            if hoists(path, x.shape, uses[path], self.layers[path], moves=self.layouts[path].moves)
        }

    def _model(self, slots: Values, params: Values, frozen: Values, state: Values) -> nnx.Module:
        at_rest = {path: AtRest(slots.get(path), value) for path, value in {**params, **frozen}.items()}
        moves = {path: Move(to.use_forward, to.use_backward, self.keep) for path, to in self.layouts.items()}
        hoisted = {path: moves.pop(path)(at_rest[path]) for path in self.hoisted}
        return self.template.merge(at_rest | hoisted, state, moves)

    def _accumulate(self, micro: Callable[..., Any], state: Values, batch: Any) -> Any:
        if self.micro_batches == 1:
            return micro(state, batch)

        def add(carry: Any, batch: Any) -> tuple[Any, None]:
            state, total = carry
            state, new = micro(state, batch)
            return (state, jax.tree.map(jnp.add, total, new)), None

        start = (state, (self._zero_slots(), self._zero_sums()))
        return lax.scan(add, start, split_rows(batch, self.micro_batches))[0]

    def _zero_slots(self) -> dict[Path, jax.Array]:
        return {
            path: collectives.zeros(slot.shape, str(slot.dtype), self.tp_specs[path]) for path, slot in self.slots.items()
        }

    def _zero_sums(self) -> dict[str, jax.Array]:
        return {name: jnp.zeros((), jnp.float32) for name in self.sum_names}

    def _total(self, sums: Values) -> dict[str, jax.Array]:
        names = list(sums)
        total = collectives.AllReduce(DATA_AXES, P(None), "float32")(jnp.stack([sums[name] for name in names]))
        return dict(zip(names, total, strict=True))

    def _agree(self, state: Values, before: Values, after: Values) -> Values:
        """The model's state, the same on all devices.

        Floats are averaged.  A random key stays what it was, or moves on where the model replaced it.  Other integers
        are the first device's; random counters are equal everywhere.
        """

        def agreed(path: Path, old: jax.Array, new: jax.Array) -> jax.Array:
            if _is_key(old):
                return _next_key(old, before[path], new)
            if not new.size or isinstance(self.template.state[path], nnx.RngCount):
                return new
            if jnp.issubdtype(new.dtype, jnp.inexact):
                return collectives.mean_over(new, DATA_AXES, self.tp_specs[path])
            first = jnp.where(lax.axis_index(DATA_AXES) == 0, new, jnp.zeros_like(new)).astype(jnp.int32)
            return collectives.AllReduce(DATA_AXES, self.tp_specs[path], "int32")(first).astype(new.dtype)

        return {path: agreed(path, old, after[path]) if path in self.changed else old for path, old in state.items()}


def split_rows(batch: Any, parts: int) -> Any:
    """Every array of `batch`, [rows, ...] as [parts, rows / parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)


def sums_of(loss_fn: LossFn, model: Any, batch: Any) -> dict[str, jax.Array]:
    """What a loss function returns, as float32 scalars by name.

    Raises:
        TypeError: it is not (sum of losses, weight) or (sum of losses, weight, dict of sums), all real scalars.
    """
    result = loss_fn(model, batch)
    wanted = (
        f"{_named(loss_fn)} must return (sum of losses, weight) or (sum of losses, weight, dict of sums), "
        f"all of them real scalars"
    )
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise TypeError(f"{wanted}; it returned {_describe(result)} (a mean over a batch is exact on one device only)")
    extra = result[2] if len(result) == 3 else {}
    if not isinstance(extra, Mapping) or {"loss", "weight"} & set(extra):
        raise TypeError(f"{wanted}; its third value is {_describe(extra)}, with names other than 'loss' and 'weight'")
    sums = {"loss": result[0], "weight": result[1], **extra}
    for name, value in sums.items():
        if not (isinstance(value, int | float) or hasattr(value, "dtype")) or jnp.iscomplexobj(value):
            raise TypeError(f"{wanted}; {name!r} is {_describe(value)}")
        if jnp.shape(value) != ():
            raise TypeError(f"{wanted}; {name!r} has the shape {jnp.shape(value)}: sum it")
    return {name: jnp.asarray(value, jnp.float32) for name, value in sums.items()}


@dataclass(frozen=True)
class Probe:
    """What a loss does, as found by tracing it.

    Attributes:
        uses: of each parameter.
        changed: what of the model's state it changes.
        sum_names: of the sums it returns.
    """

    uses: Mapping[Path, Uses]
    changed: frozenset[Path]
    sum_names: tuple[str, ...]


def probe(
    template: Template, loss_fn: LossFn, mesh: Mesh, params: Values, state: Values, batch: Any, *, train: bool = True
) -> Probe:
    """Traces the loss once on abstract values.

    Args:
        params, state, batch: anything with shapes and dtypes; `batch` is one device's rows of one microbatch.
        train: False traces it in evaluation mode.

    Raises:
        UnsupportedModel: a sharding constraint over data-parallel axes inside the model, state that changes shape, or
            parameters that are assigned to.
    """
    marks, changed = Marks(), set()

    def traced(params: Values, state: Values, batch: Any) -> tuple[Values, dict[str, jax.Array]]:
        values = {path: marks.mark(x) if path in template.early else x for path, x in params.items()}
        model = template.merge(values, state, dict.fromkeys(params.keys() - template.early, marks.mark))
        if not train:
            model.eval()
        sums = sums_of(loss_fn, model, batch)
        after = template.state_of(model)
        changed.update(path for path, old in state.items() if _changes(path, old, after[path]))
        return params | template.params_of(model), sums

    region = jax.shard_map(traced, mesh=mesh, axis_names=set(DATA_AXES), in_specs=P(), out_specs=P(), check_vma=False)
    try:
        jaxpr, (_, sums) = jax.make_jaxpr(region, return_shape=True)(params, state, batch)
    except ValueError as error:
        raise _explained(error) from error
    place = placed_over(jaxpr.jaxpr, DATA_AXES)
    if place:
        raise UnsupportedModel(_MANUAL.format(place=place))
    paths = jax.tree.unflatten(jax.tree.structure(params), range(len(params)))
    uses, results = marks.find(jaxpr.jaxpr, jaxpr.jaxpr.invars[: len(params)])
    for path, i in paths.items():
        # A loop over another dim than the first transposes the whole stack, and back again.
        transposed = {raw.primitive for raw in uses[i].raw} == {"transpose"}
        if results[i] != i and not transposed:
            raise UnsupportedModel(f"parameter {path_name(path)!r} is assigned to inside the loss; {ASSIGNED}")
    return Probe({path: uses[i] for path, i in paths.items()}, frozenset(changed), tuple(sums))


def layer_dims(shape: tuple[int, ...], uses: Uses) -> int:
    """How many leading dims of a parameter number layers: those that are gone where it is read."""
    return max((len(shape) - len(read.shape) for read in uses.reads), default=0)


def hoists(path: Path, shape: tuple[int, ...], uses: Uses, layers: int, *, moves: bool) -> bool:
    """Whether a parameter comes into use once, before the loss, rather than where it is read.

    It does when it is read twice, in a loop that does not slice it, or in a branch (where devices would wait for those
    that took another), and when something takes it without reading it.  A stacked parameter cannot, if that takes a
    collective: the whole stack would be gathered.

    Args:
        layers: how many leading dims of `shape` number layers.
        moves: bringing the parameter into use, or its gradient to rest, takes a collective.

    Raises:
        UnsupportedModel: names the parameter, the place in the user's code and the remedy.
    """
    if layers == 0:
        elsewhere = any(read.loops or read.branch or read.shape != shape for read in uses.reads)
        return len(uses.reads) > 1 or bool(uses.raw) or elsewhere
    problem = _stacked_problem(shape, uses, layers)
    if problem and moves:
        raise UnsupportedModel(
            f"parameter {path_name(path)!r} of shape {shape}, stacked over layers, {problem}; it would have to be "
            f"gathered for all layers at once: change that place, or keep it whole with zero.replicate"
        )
    return problem is not None


def _stacked_problem(shape: tuple[int, ...], uses: Uses, layers: int) -> str | None:
    for raw in uses.raw:
        return f"goes into {raw.primitive!r} at {raw.place} without being read through its Variable inside the layer loop"
    for read in uses.reads:
        if shape[layers:] != read.shape:
            return f"is read with the shape {read.shape} at {read.place}, not as one layer {shape[layers:]} along dim 0"
        if read.branch:
            return f"is read inside a cond or while at {read.place}, where devices would wait for those in other branches"
    return None


def _explained(error: ValueError) -> ValueError:
    frames = []
    tb = error.__traceback__
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    # JAX may have left its own frames out of the traceback; its message then says it.
    if not any(word in frames or word in str(error) for word in ("with_sharding_constraint", "reshard")):
        return error
    return UnsupportedModel(f"{_MANUAL.format(place=place_of(error))} ({error})")


def _device_keys(state: Values) -> Values:
    """The state with random keys that differ over data-parallel devices and agree over tp."""
    device = lax.axis_index(DATA_AXES)

    def folded(keys: jax.Array) -> jax.Array:
        flat = jax.vmap(lambda key: jax.random.fold_in(key, device))(keys.reshape(-1))
        return flat.reshape(keys.shape)

    return {path: folded(x) if _is_key(x) else x for path, x in state.items()}


def _next_key(old: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
    """The key that all devices share after a batch: another one if the model replaced its own.

    Args:
        old: shared by all devices.
        before, after: one device's own.
    """
    replaced = jnp.any(jax.random.key_data(before) != jax.random.key_data(after))
    moved = jax.vmap(lambda key: jax.random.fold_in(key, _REPLACED))(old.reshape(-1)).reshape(old.shape)
    return jnp.where(replaced, moved, old)


def _changes(path: Path, old: jax.Array, new: Any) -> bool:
    if jnp.shape(new) != old.shape:
        raise UnsupportedModel(
            f"{path_name(path)!r}, which the model holds beside its parameters, has the shape {old.shape} before the "
            f"loss and {jnp.shape(new)} after it: what is carried from step to step must keep its shape"
        )
    return new is not old


def _is_key(x: jax.Array) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _describe(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    if isinstance(result, jax.Array):
        return f"an array of shape {result.shape} and dtype {result.dtype}"
    return f"a {type(result).__name__}"


def _named(loss_fn: LossFn) -> str:
    code = getattr(loss_fn, "__code__", None)
    return f"loss_fn, at {code.co_filename}:{code.co_firstlineno} ({code.co_name})," if code else "loss_fn"
