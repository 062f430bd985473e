"""The part of a step that is manual: sums, gradients and accumulation, as one device computes them.

Everything here runs inside a `shard_map` over the data-parallel axes, with `tp` left to the compiler.  A device has
its rows of the batch and its parameters at rest; it returns gradients that are finished (summed over all devices, in
the layout of the optimizer state), sums for the metrics, and the model's new state.

Losses are sums: `loss_fn(model, batch) -> (sum of losses, weight)`.  Gradients of the sum are accumulated over
microbatches and devices and divided once by the total weight, so uneven weights are exact; a mean of means is not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero import collectives
from jzero.host_params import HOST
from jzero.layerwise import added, in_its_memory, zeroed
from jzero.mesh import DATA_AXES, data_size
from jzero.probe import LossFn, Values, hoisted, probe, sums_of
from jzero.template import Template
from jzero.use import AtRest, Move
from jzero.zero import Layout, Path

_NONE: Values = MappingProxyType({})
_REPLACED = 2**31 - 1  # folded into a key that a model replaced; no data-parallel device has this index


@dataclass(frozen=True)
class Gradients:
    """Sums and gradients of a loss over one device's rows of a batch.

    Attributes:
        template: the model.
        loss_fn: -> (sum of losses, weight) or (sum of losses, weight, dict of sums).
        params: shapes and dtypes of all parameters.
        layouts: of all parameters, frozen ones too.
        layers: how many leading dims of each parameter number layers.
        slots: shape and dtype of each trained parameter's gradient on one device (tp dims whole).
        tp_specs: of all parameters and of the model's state.
        hoisted: parameters that come into use once, before the loss (`probe.hoists` says which).
        changed: what of the model's state the loss changes.
        micro_batches: how many forward-backward passes the rows are split into.
        keep: gathered parameters live to the end of the backward pass.
        sum_names: of the dict of sums.
    """

    template: Template
    loss_fn: LossFn
    params: Mapping[Path, jax.ShapeDtypeStruct]
    layouts: Mapping[Path, Layout]
    layers: Mapping[Path, int]
    slots: Mapping[Path, jax.ShapeDtypeStruct]
    tp_specs: Mapping[Path, P]
    hoisted: frozenset[Path]
    changed: frozenset[Path]
    micro_batches: int
    keep: bool
    sum_names: tuple[str, ...] = field(default=("loss", "weight"))

    def __call__(
        self, params: Values, frozen: Values, state: Values, batch: Any
    ) -> tuple[Values, dict[str, jax.Array], Values]:
        """Finished gradients (float32), sums over all devices (float32 scalars), the model's state after the batch."""
        return self.into((), params, frozen, state, batch)[:3]

    def into(
        self, memory: Sequence[Values], params: Values, frozen: Values, state: Values, batch: Any
    ) -> tuple[Values, dict[str, jax.Array], Values, list[Values]]:
        """The same where some gradients rest in host memory, unfinished, and the memory that is free again.

        Args:
            memory: for these gradients, with whatever is in it: `memories` of them.
        """

        def micro(state: Values, slots: Values, batch: Any) -> tuple[Values, tuple[Values, Values]]:
            # Ties the parameters to the microbatch: what does not depend on it, XLA moves out of the accumulation
            # loop, and a parameter that is gathered before the loop stays whole for the whole step.
            (tied_params, tied_frozen), batch = lax.optimization_barrier(((params, frozen), batch))

            def loss(slots: Values) -> tuple[jax.Array, tuple[Any, Any]]:
                model = self._model(slots, tied_params, tied_frozen, state)
                sums = sums_of(self.loss_fn, model, batch)
                after = self.template.state_of(model)
                return sums["loss"], (sums, {path: new.astype(state[path].dtype) for path, new in after.items()})

            grads, (sums, after) = jax.grad(loss, has_aux=True)({**self._zero_slots(), **slots})
            return after, (grads, sums)

        params, frozen = self._at_rest(params), self._at_rest(frozen)
        memory = [{path: in_its_memory(x, HOST, self.tp_specs[path]) for path, x in part.items()} for part in memory]
        before = _device_keys(state)
        after, (grads, sums), free = self._accumulate(micro, before, batch, *memory)
        grads = {path: self.layouts[path].finish(grad) for path, grad in grads.items()}
        return grads, self._total(sums), self._agree(state, before, after), free

    def evaluate(
        self, params: Values, frozen: Values, state: Values, batch: Any, micro_batches: int
    ) -> dict[str, jax.Array]:
        """Sums over all devices with the model in evaluation mode; nothing changes."""

        def micro(sums: Any, batch: Any) -> tuple[Any, None]:
            # As in training: without the tie, XLA gathers parameters before the loop and keeps them whole.
            (tied_params, tied_frozen), batch = lax.optimization_barrier(((params, frozen), batch))
            model = self._model(dict.fromkeys(params), tied_params, tied_frozen, state)
            model.eval()
            return jax.tree.map(jnp.add, sums, sums_of(self.loss_fn, model, batch)), None

        sums, _ = lax.scan(micro, self._zero_sums(), split_rows(batch, micro_batches))
        return self._total(sums)

    def for_evaluation(self, mesh: Mesh, state: Values, batch: Any) -> "Gradients":
        """The same, ready for what the loss does in evaluation mode, which may read parameters elsewhere.

        Args:
            state, batch: anything with shapes and dtypes; `batch` is one device's rows of one microbatch.
        """
        found = probe(self.template, self.loss_fn, mesh, self.params, state, batch, train=False)
        elsewhere = hoisted(found.uses, self.params, self.layers, self.layouts)
        return replace(self, hoisted=self.hoisted | elsewhere, sum_names=found.sum_names)

    @property
    def memories(self) -> int:
        """How much memory gradients at rest on the host take, in copies of them: with microbatches, one for their sum
        too."""
        return 1 if self.micro_batches == 1 else 2

    @property
    def trained_layouts(self) -> dict[Path, Layout]:
        """The layouts of the trained parameters."""
        return {path: self.layouts[path] for path in self.slots}

    @property
    def published(self) -> list[Path]:
        """The trained parameters that are updated in another layout than they rest in."""
        return [path for path, to in self.trained_layouts.items() if to.publish.moves]

    def _model(self, slots: Values, params: Values, frozen: Values, state: Values) -> nnx.Module:
        at_rest = {path: AtRest(slots.get(path), value) for path, value in {**params, **frozen}.items()}
        moves = {
            path: Move(to.use_forward, to.use_backward, self.keep, self.layers[path])
            for path, to in self.layouts.items()
        }
        hoisted = {path: moves.pop(path)(at_rest[path]) for path in self.hoisted}
        return self.template.merge(at_rest | hoisted, state, moves)

    def _accumulate(
        self, micro: Callable[..., Any], state: Values, batch: Any, slots: Values = _NONE, rested: Values = _NONE
    ) -> Any:
        """(state, (gradients, sums), host memory that is free again).

        Args:
            slots, rested: host memory for the gradients of one microbatch, and for their sum.
        """
        if self.micro_batches == 1:
            return *micro(state, slots, batch), []

        def add(carry: Any, batch: Any) -> tuple[Any, None]:
            state, total, slots, rested = carry
            state, (new, sums) = micro(state, slots, batch)
            # One that nothing was read for is zeros, which no backward pass has brought there.
            slots = {path: in_its_memory(new.pop(path), HOST, self.tp_specs[path]) for path in slots}
            rested = {path: added(x, slots[path], *self._stacked(path)) for path, x in rested.items()}
            return (state, jax.tree.map(jnp.add, total, (new, sums)), slots, rested), None

        zero = {path: zeroed(x, *self._stacked(path)) for path, x in rested.items()}
        start = (state, (self._zero_slots(), self._zero_sums()), dict(slots), zero)
        state, (total, sums), slots, rested = lax.scan(add, start, split_rows(batch, self.micro_batches))[0]
        return state, ({**total, **rested}, sums), [slots] if slots else []

    def _at_rest(self, params: Values) -> Values:
        return {path: in_its_memory(x, self.layouts[path].memory, self.tp_specs[path]) for path, x in params.items()}

    def _stacked(self, path: Path) -> tuple[int, P]:
        return self.layers[path], self.tp_specs[path]

    def _zero_slots(self) -> dict[Path, jax.Array]:
        """Of the gradients that are accumulated on the device."""
        return {
            path: collectives.zeros(slot.shape, str(slot.dtype), self.tp_specs[path])
            for path, slot in self.slots.items()
            if self.layouts[path].grads_memory is None
        }

    def _zero_sums(self) -> dict[str, jax.Array]:
        return {name: jnp.zeros((), jnp.float32) for name in self.sum_names}

    def _total(self, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
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


def abstract_rows(batch: Any, mesh: Mesh, micro_batches: int) -> Any:
    """One device's rows of one microbatch of `batch`, as ShapeDtypeStructs.

    Raises:
        ValueError: as `rows_per_device`.
    """
    rows = rows_per_device(batch, mesh, micro_batches)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), device_dtype(x)), batch)


def device_dtype(x: Any) -> Any:
    """What an array of the host becomes on a device: 64 bits are 32, unless JAX is told otherwise."""
    return jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)


def split_rows(batch: Any, parts: int) -> Any:
    """Every array of `batch`, [rows, ...] as [parts, rows / parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)


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


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
