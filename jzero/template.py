"""A model taken apart into what is trained, what is frozen and what else it holds, and put together again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.reads import UnsupportedModelError
from jzero.use import holding, value_of, with_move
from jzero.zero import Path, path_name


@dataclass(frozen=True)
class Template:
    """A model without its arrays: what is needed to put values back into it.

    Attributes:
        graphdef: of the whole model.
        trained, frozen, state: path -> Variable without a value, for parameters that are trained, other parameters,
            and everything else the model holds (batch statistics, random keys, plain arrays).
        early: parameters that something takes all at once, before any layer reads them: those of a Linen module that
            `nnx.bridge.ToNNX` wraps.  They come into use before the loss.
    """

    graphdef: Any
    trained: Mapping[Path, Any]
    frozen: Mapping[Path, Any]
    state: Mapping[Path, Any]
    early: frozenset[Path] = frozenset()

    def merge(
        self, params: Mapping[Path, Any], state: Mapping[Path, Any], moves: Mapping[Path, Callable[..., Any]]
    ) -> nnx.Module:
        """The model with `params` (trained and frozen alike) and `state` in it.

        Args:
            moves: for the parameters that are not whole yet, what takes the raw value to the value in use.
        """
        variables = {**self.trained, **self.frozen}
        leaves = {
            path: (
                with_move(variables[path], value, moves[path], path_name(path))
                if path in moves
                else holding(variables[path], value)
            )
            for path, value in params.items()
        }
        leaves |= {path: holding(self.state[path], value) for path, value in state.items()}
        return nnx.merge(self.graphdef, nnx.from_flat_state(leaves.items()))

    def state_of(self, model: nnx.Module) -> dict[Path, Any]:
        """What the model holds beside parameters, by path; what a forward pass added (intermediates) is left out."""
        found = dict(nnx.to_flat_state(nnx.state(model)))
        for path in self.state:
            if path not in found:
                raise UnsupportedModelError(
                    f"{path_name(path)!r}, which the model holds beside its parameters, is deleted "
                    f"inside the loss: what is carried from step to step must stay"
                )
        return {path: value_of(found[path]) for path in self.state}

    def params_of(self, model: nnx.Module) -> dict[Path, Any]:
        """Parameters as they lie in the model, by path, but for those that came into use early or are gone."""
        found = dict(nnx.to_flat_state(nnx.state(model)))
        paths = (self.trained.keys() | self.frozen.keys()) - self.early
        return {path: value_of(found[path]) for path in paths if path in found}


def split_abstract(model_fn: Callable[[], nnx.Module], trainable: Any) -> Template:
    """`split_model` of a model that is not made: its Variables hold ShapeDtypeStructs.

    The model is taken apart where it is made, inside the trace: outside, an abstract array is no array to Flax.
    """
    if isinstance(model_fn, nnx.Module):
        raise TypeError(
            f"model_fn is a {type(model_fn).__name__}, not a function that makes one: pass lambda: the call"
        )
    found: list[Template] = []

    def groups() -> tuple[Any, ...]:
        found.append(split_model(model_fn(), trainable))
        return found[0].trained, found[0].frozen, found[0].state

    trained, frozen, state = jax.eval_shape(groups)
    return Template(found[0].graphdef, trained, frozen, state, found[0].early)


def split_model(model: nnx.Module, trainable: Any) -> Template:
    """Splits a model into trained parameters, frozen ones and state, with their values.

    Args:
        trainable: an NNX filter.  What it selects is trained, except integer leaves, which have no gradient; other
            `nnx.Param`s are frozen.

    Raises:
        TypeError: not an NNX module.
        ValueError: nothing is trainable.
        UnsupportedModelError: a parameter that is not one real array.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model_fn() returned {type(model).__module__}.{type(model).__name__}, which is no flax.nnx.Module; "
            f"a Linen module becomes one by flax.nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(example_input)"
        )
    _hold_plain_arrays(model)
    graphdef, *groups = nnx.split(model, trainable, nnx.Param, ...)
    flat: list[dict[Path, Any]] = [{tuple(path): v for path, v in nnx.to_flat_state(group)} for group in groups]
    trained, frozen, state = flat
    for path, variable in (trained | frozen).items():
        if isinstance(variable, nnx.Param):
            _check_parameter(path, value_of(variable))
    for path in [path for path, variable in trained.items() if not _has_gradient(variable)]:
        variable = trained.pop(path)
        (frozen if isinstance(variable, nnx.Param) else state)[path] = variable
    if not trained:
        raise ValueError(
            f"trainable={trainable!r} selects no floating-point parameter of the model (a Linen module in "
            f"nnx.bridge.ToNNX has parameters only after lazy_init)"
        )
    return Template(graphdef, trained, frozen, state, _of_linen_modules(model) & (trained.keys() | frozen.keys()))


def _hold_plain_arrays(model: nnx.Module) -> None:
    """Tells Flax that arrays among a model's attributes are data.

    Flax finds that out by itself, except of arrays that are made under a trace: those it takes for static.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))


def _has_gradient(variable: Any) -> bool:
    return isinstance(variable, nnx.Variable) and jnp.issubdtype(jnp.result_type(value_of(variable)), jnp.floating)


def _check_parameter(path: Path, value: Any) -> None:
    if isinstance(value, int | float):
        return
    if not hasattr(value, "dtype"):
        raise UnsupportedModelError(
            f"parameter {path_name(path)!r} holds a {type(value).__name__}, not one array: give each array its own "
            f"nnx.Param"
        )
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise UnsupportedModelError(
            f"parameter {path_name(path)!r} of shape {value.shape} is {value.dtype}, and gradients are accumulated and "
            f"sent as real numbers: hold its real and imaginary part as two parameters"
        )


def _of_linen_modules(model: nnx.Module) -> frozenset[Path]:
    """The Variables that a wrapped Linen module will hand over to `apply`, all of them, as plain parameters."""
    nodes = list(nnx.iter_graph(model))
    wrapped = [node for _, node in nodes if isinstance(node, nnx.bridge.ToNNX)]
    owned = {id(v) for node in wrapped for _, v in nnx.iter_graph(node) if isinstance(v, nnx.Variable)}
    return frozenset(path for path, node in nodes if id(node) in owned)
