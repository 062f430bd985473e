"""At rest -> in use: the one mechanism that everything hangs on.

A parameter at rest is what the train state holds: whole, or a shard.  A parameter in use is what a layer computes
with: always whole (but for tensor parallelism).  A `Move` takes one to the other at the moment a layer reads it, and
its derivative takes the gradient from use to where it is accumulated.  A `Variable` subclass calls it, so models stay
as they are:

    in_use = move(AtRest(slot, value))   forward:  value at rest   -> move.forward  -> value in use
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
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from jzero.collectives import Transition
from jzero.reads import UnsupportedModelError, user_place

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
        keep: hold the value in use until the backward pass has used it, as far as the layer's rematerialisation policy
            asks: those of `remat_policy` do, a plain `nnx.remat` gathers again.
        layer_dims: how many leading dims of the leaf number layers; they are gone when the move is called.
    """

    forward: Transition
    backward: Transition
    keep: bool = False
    layer_dims: int = 0

    def __call__(self, at_rest: "AtRest") -> jax.Array:
        """The parameter in use."""
        if at_rest.slot is None:
            return _use_frozen(self, at_rest.value)
        return _use(self, at_rest.slot, at_rest.value)


class AtRest(NamedTuple):
    """A parameter as it lies in a Variable inside the step.

    Attributes:
        slot: where its gradient lands, or None for a frozen parameter.
        value: at rest.
    """

    slot: jax.Array | None
    value: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use(move: Move, slot: jax.Array, value: jax.Array) -> jax.Array:  # noqa: ARG001 (its gradient is what the rule gives)
    return _marked(move, move.forward(value))


def _use_fwd(move: Move, slot: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
    return _use(move, slot, value), None


def _use_bwd(move: Move, _: None, grad: jax.Array) -> tuple[jax.Array, None]:
    return move.backward(grad), None


_use.defvjp(_use_fwd, _use_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use_frozen(move: Move, value: jax.Array) -> jax.Array:
    """One operation to a rematerialisation policy, as `_use` is: of several it would keep the first ones' results."""
    return _marked(move, move.forward(value))


def _use_frozen_fwd(move: Move, value: jax.Array) -> tuple[jax.Array, None]:
    return _use_frozen(move, value), None


def _use_frozen_bwd(move: Move, _: None, grad: jax.Array) -> tuple[None]:  # noqa: ARG001 (nobody asks for it)
    return (None,)


_use_frozen.defvjp(_use_frozen_fwd, _use_frozen_bwd)


def _marked(move: Move, value: jax.Array) -> jax.Array:
    """`value` under the name by which a rematerialisation policy knows it."""
    if not move.forward.moves:
        return value
    return checkpoint_name(value, KEPT if move.keep else GATHERED)


def remat_policy(remat: str) -> Callable[..., Any]:
    """What a layer keeps for its backward pass; to be given to `nnx.remat` on the body of a layer loop.

    ``"none"`` keeps everything but gathered parameters, which are gathered again; ``"dots"`` keeps the layer's input
    and the matrix products without batch dims, which are those of linear layers; ``"full"`` keeps the layer's input
    alone.  Each keeps gathered parameters when the run says so (`zero.regather` false).

    Raises:
        ValueError: another word.
    """
    policies = {"none": _all_but_gathered, "dots": _dots_and_kept, "full": _nothing_but_kept}
    if remat not in policies:
        raise ValueError(f"remat {remat!r} is not one of {', '.join(policies)}")
    return policies[remat]


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    return _name(primitive, params) != GATHERED


def _dots_and_kept(primitive: Any, *avals: Any, **params: Any) -> bool:
    is_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)
    return bool(is_dot) or _name(primitive, params) == KEPT


def _nothing_but_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    return _name(primitive, params) == KEPT


def _name(primitive: Any, params: Mapping[str, Any]) -> str | None:
    """The name that an operation gives to its result; a policy sees a `use` as one operation, its name inside."""
    if primitive.name == "name":
        return params["name"]
    inner = params["call_jaxpr"].eqns if primitive.name == "custom_vjp_call" else []
    return next((eqn.params["name"] for eqn in inner if eqn.primitive.name == "name"), None)


@functools.cache
def in_use(variable_type: type[nnx.Variable]) -> type[nnx.Variable]:
    """A Variable of the same type whose value, however it is read, is the parameter in use.

    Its raw value is what its move (in the metadata) takes to the value in use.  Everything that reads a Variable
    (calls, slices, operators, attributes such as `.T`) goes through `get_value` or `__getattr__`; these ask a Variable
    of the model's own type that holds the value in use, so whatever that type does to a value is done.
    """

    class InUse(variable_type):  # type: ignore[misc, valid-type]
        __slots__ = ("_known_whole",)

        def get_value(self, **how: Any) -> Any:
            return _whole(self).get_value(**how)

        def __getattr__(self, name: str) -> Any:
            if self.has_metadata(name):
                return self.get_metadata(name)
            # Flax asks every Variable for metadata that it may lack; that is no reason to gather.
            if variable_type.__getattr__ is nnx.Variable.__getattr__ and not hasattr(jax.Array, name):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return getattr(_whole(self), name)

        def set_value(self, value: Any, *, index: Any = ...) -> None:  # noqa: ARG002 (as in Flax)
            raise UnsupportedModelError(
                f"parameter {self.get_metadata(_NAME)!r} is assigned to inside the loss, at {user_place()}; {ASSIGNED}"
            )

    InUse.__name__ = InUse.__qualname__ = variable_type.__name__
    return InUse


def with_move(variable: nnx.Variable, raw: Any, move: Callable[[Any], jax.Array], name: str) -> nnx.Variable:
    """`variable`, holding `raw`, which `move` takes to the value in use when it is read; errors call it `name`."""
    return in_use(type(variable)).from_metadata(raw, {**variable.get_metadata(), _USE: move, _NAME: name})


def at_rest(leaf: Any) -> Callable[[Any], jax.Array] | None:
    """What brings a leaf of a module's state into use; None if it holds its value as it is."""
    return leaf.get_metadata(_USE) if isinstance(leaf, nnx.Variable) and leaf.has_metadata(_USE) else None


def value_of(leaf: Any) -> Any:
    """The array of a leaf of a module's state, which is a Variable or an array."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def holding(leaf: Any, value: Any) -> Any:
    """A leaf of a module's state as the model made it, with `value`: a Variable of the same type, or the array."""
    if not isinstance(leaf, nnx.Variable):
        return value
    metadata = leaf.get_metadata()
    if at_rest(leaf) is None:
        return type(leaf).from_metadata(value, metadata)
    own = {key: x for key, x in metadata.items() if key not in (_USE, _NAME)}
    return type(leaf).__bases__[0].from_metadata(value, own)  # what `in_use` made a subclass of


def _whole(variable: nnx.Variable) -> nnx.Variable:
    """The Variable as the model made it, holding the value in use.

    It is moved once per trace: a tied table that is read twice is gathered once.
    """
    raw, trace = variable.get_raw_value(), get_opaque_trace_state(convention="nnx")
    try:
        known = object.__getattribute__(variable, "_known_whole")
        if known[0] is raw and known[1] == trace:
            return known[2]
    except AttributeError:
        pass
    whole = holding(variable, variable.get_metadata(_USE)(raw))
    object.__setattr__(variable, "_known_whole", (raw, trace, whole))
    return whole
