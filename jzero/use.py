"""At rest -> in use: the one mechanism that everything hangs on.

A parameter at rest is what the train state holds: whole, or a shard.  A parameter in use is what a layer computes
with: always whole (but for tensor parallelism).  `use` takes one to the other at the moment a layer reads it, and its
derivative takes the gradient from use to where it is accumulated.  A `Variable` subclass calls it, so models stay as
they are:

    in_use = use(move, slot, value)      forward:  value at rest   -> move.forward  -> value in use
                                         backward: gradient in use -> move.backward -> gradient in the slot

The slot.  The loss is never differentiated with respect to the value at rest but with respect to a slot beside it: a
dummy that has the shape of the gradient at rest and the dtype of its accumulation.  So at stage 2 the gradient is a
shard while the value is whole, and gradients of bfloat16 parameters arrive in float32 as they left the reduction.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from jzero.collectives import Collective, Identity
from jzero.mesh import DATA_AXES
from jzero.reads import UnsupportedModelError, user_place
from jzero.zero import Path, path_name

GATHERED = "jzero.gathered"
KEPT = "jzero.kept"
# Metadata keys under which a Variable carries its move and its name.
_USE = "jzero_use"
_NAME = "jzero_name"
ASSIGNED = (
    "parameters change by the optimizer alone: hold what the forward pass updates in another Variable type "
    "(nnx.BatchStat, say)"
)


@dataclass(frozen=True)
class Move:
    """What happens to one leaf when it is read.

    Attributes:
        forward: value at rest -> in use.
        backward: gradient in use -> gradient in the slot.
        keep: hold the value in use until the backward pass has used it, whatever the rematerialisation policy.
    """

    forward: Collective
    backward: Collective
    keep: bool = False

    def __call__(self, at_rest: "AtRest") -> jax.Array:
        """The parameter in use."""
        return use(self, at_rest)


class AtRest(NamedTuple):
    """A parameter as it lies in a Variable inside the step.

    Attributes:
        slot: where its gradient lands, or None for a frozen parameter.
        value: at rest.
    """

    slot: jax.Array | None
    value: jax.Array


def use(move: Move, at_rest: AtRest) -> jax.Array:
    """The parameter in use."""
    if at_rest.slot is None:
        return _named(move, jax.lax.stop_gradient(move.forward(at_rest.value)))
    return _use(move, at_rest.slot, at_rest.value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use(move: Move, slot: jax.Array, value: jax.Array) -> jax.Array:  # noqa: ARG001 (its gradient is what the rule gives)
    return _named(move, move.forward(value))


def _use_fwd(move: Move, slot: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
    return _use(move, slot, value), None


def _use_bwd(move: Move, _: None, grad: jax.Array) -> tuple[jax.Array, None]:
    return move.backward(grad), None


_use.defvjp(_use_fwd, _use_bwd)


def _named(move: Move, value: jax.Array) -> jax.Array:
    if isinstance(move.forward, Identity):
        return value
    return checkpoint_name(value, KEPT if move.keep else GATHERED)


def remat_policy(remat: str) -> Callable[..., Any]:
    """What a layer keeps for its backward pass; to be given to `nnx.remat` on the body of a layer loop.

    ``"none"`` keeps everything but gathered parameters, which are gathered again; ``"full"`` keeps the layer's input
    alone.  Either keeps gathered parameters when the run says so (`zero.regather` false).

    Raises:
        ValueError: another word.
    """
    policies = {"none": _all_but_gathered, "full": _nothing_but_kept}
    if remat not in policies:
        raise ValueError(f"remat {remat!r} is not one of {', '.join(policies)}")
    return policies[remat]


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    # Refusing the name alone would save the output of the all-gather under it.
    return _name(primitive, params) != GATHERED and not _gathers_data(primitive, params)


def _nothing_but_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    return _name(primitive, params) == KEPT


def _name(primitive: Any, params: Mapping[str, Any]) -> str | None:
    """The name that an operation gives to its result; a policy sees a `use` as one operation, its name inside."""
    if primitive.name == "name":
        return params["name"]
    inner = params["call_jaxpr"].eqns if primitive.name == "custom_vjp_call" else []
    return next((eqn.params["name"] for eqn in inner if eqn.primitive.name == "name"), None)


def _gathers_data(primitive: Any, params: Mapping[str, Any]) -> bool:
    axes = params["axis_name"] if primitive.name == "all_gather" else ()
    return bool(set(axes if isinstance(axes, tuple) else (axes,)) & set(DATA_AXES))


@functools.cache
def in_use(variable_type: type[nnx.Variable]) -> type[nnx.Variable]:
    """A Variable of the same type whose value, however it is read, is the parameter in use.

    Its raw value is what its move (in the metadata) takes to the value in use.  Everything that reads a Variable
    (calls, slices, operators, attributes such as `.T`) goes through `get_value` or `__getattr__`.
    """

    class InUse(variable_type):  # type: ignore[misc, valid-type]
        __slots__ = ("_known_in_use",)

        def get_value(self, *, index: Any = ...) -> Any:
            value = _value_in_use(self)
            return value if index is ... else value[index]

        def __getattr__(self, name: str) -> Any:
            metadata = object.__getattribute__(self, "_var_metadata")
            return metadata[name] if name in metadata else getattr(self.get_value(), name)

        def set_value(self, value: Any, *, index: Any = ...) -> None:  # noqa: ARG002 (as in Flax)
            raise UnsupportedModelError(
                f"parameter {self.get_metadata(_NAME)!r} is assigned to inside the loss, at {user_place()}; {ASSIGNED}"
            )

    InUse.__name__ = InUse.__qualname__ = variable_type.__name__
    return InUse


def _value_in_use(variable: nnx.Variable) -> jax.Array:
    """The value in use, moved once per trace: a tied table that is read twice is gathered once."""
    raw, trace = variable.get_raw_value(), get_opaque_trace_state(convention="nnx")
    try:
        known = object.__getattribute__(variable, "_known_in_use")
        if known[0] is raw and known[1] == trace:
            return known[2]
    except AttributeError:
        pass
    value = variable.get_metadata(_USE)(raw)
    object.__setattr__(variable, "_known_in_use", (raw, trace, value))
    return value


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
        leaves = {path: _filled(path, variables[path], value, moves.get(path)) for path, value in params.items()}
        leaves |= {path: _filled(path, self.state[path], value, None) for path, value in state.items()}
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


def value_of(leaf: Any) -> Any:
    """The array of a state's leaf, which is a Variable or an array."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _filled(path: Path, variable: Any, value: Any, move: Callable[..., Any] | None) -> Any:
    if not isinstance(variable, nnx.Variable):
        return value
    metadata = variable.get_metadata()
    if move is None:
        return type(variable).from_metadata(value, metadata)
    return in_use(type(variable)).from_metadata(value, {**metadata, _USE: move, _NAME: path_name(path)})


def abstract_template(model_fn: Callable[[], nnx.Module], trainable: Any) -> Template:
    """`template` of a model that is not made: its Variables hold ShapeDtypeStructs.

    The model is taken apart where it is made, inside the trace: outside, an abstract array is no array to Flax.
    """
    if isinstance(model_fn, nnx.Module):
        raise TypeError(
            f"model_fn is a {type(model_fn).__name__}, not a function that makes one: pass lambda: the call"
        )
    found: list[Template] = []

    def groups() -> tuple[Any, ...]:
        found.append(template(model_fn(), trainable))
        return found[0].trained, found[0].frozen, found[0].state

    trained, frozen, state = jax.eval_shape(groups)
    return Template(found[0].graphdef, trained, frozen, state, found[0].early)


def template(model: nnx.Module, trainable: Any) -> Template:
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
