"""A look at a model: what it holds, and what the loss does with it, without making an array."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.gradients import abstract_rows
from jzero.probe import LossFn, Probe, layer_dims, probe
from jzero.template import Template, split_abstract
from jzero.use import value_of
from jzero.zero import Leaf, Path, tp_spec


@dataclass(frozen=True)
class Seen:
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
        """All parameters, as the stage table asks for them."""
        return [
            Leaf(path, x.shape, self.layers[path], self.tp_specs[path], x.dtype.itemsize)
            for path, x in self.params.items()
        ]

    def trained(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """Path -> shape and dtype at rest of the parameters that are trained."""
        return {path: self.params[path] for path in self.template.trained}

    def per_layer(self) -> Any:
        """The trained parameters as layers read them, a nested dict of ShapeDtypeStruct."""
        return unflatten_dict(
            {path: jax.ShapeDtypeStruct(x.shape[self.layers[path] :], x.dtype) for path, x in self.trained().items()}
        )


def look(
    model_fn: Callable[[], nnx.Module],
    loss_fn: LossFn,
    trainable: Any,
    mesh: Mesh,
    batch: Any,
    micro_batches: int,
    dtype: str | None,
) -> Seen:
    """The model that `model_fn` makes, and what its loss does with it in training.

    Args:
        model_fn, loss_fn, trainable, batch, micro_batches: as in `setup`.
        dtype: of floating parameters at rest; None leaves what the model made.

    Raises:
        ValueError: a batch that cannot be split, an annotation that does not fit.
        TypeError: not an NNX module, or a loss that is not sums.
        UnsupportedModelError: the model does what cannot be sharded.
    """
    local = abstract_rows(batch, mesh, micro_batches)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        template = split_abstract(model_fn, trainable)
        variables = {**template.trained, **template.frozen}
        params = {path: _at_rest(v, dtype) for path, v in variables.items()}
        state = {path: _abstract(value_of(v)) for path, v in template.state.items()}
        tp_specs = {path: _tp_spec(path, v, mesh) for path, v in {**variables, **template.state}.items()}
        found = probe(template, loss_fn, mesh, params, state, local)
    layers = {path: layer_dims(x.shape, found.uses[path]) for path, x in params.items()}
    return Seen(template, params, state, tp_specs, found, layers)


def _at_rest(variable: Any, dtype: str | None) -> jax.ShapeDtypeStruct:
    value = _abstract(value_of(variable))
    narrows = dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(value.shape, dtype if narrows else value.dtype)


def _abstract(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _tp_spec(path: Path, variable: Any, mesh: Mesh) -> P:
    annotated = isinstance(variable, nnx.Variable) and variable.has_metadata("out_sharding")
    names = nnx.get_partition_spec(variable).get_raw_value() if annotated else ()
    return tp_spec(tuple(names), value_of(variable).shape, path, mesh)
