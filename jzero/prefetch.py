"""A stack of layers as one differentiable function, whose ZeRO traffic hides under the layers' own matmuls.

Where a layer reads its parameters, it waits for them: in a plain scan the first gather of every layer has nothing to
hide behind, forward and backward.  Hiding needs the neighbour layer.  So the whole stack is one `custom_vjp` whose
loops over layers are written out; of N layers, with k ahead:

    forward   layer i computes with weights that were gathered k layers ago, while those of layer i + k are gathered;
    backward  layer i computes while those of layer i - k are gathered, and while the gradient of layer i + 1, which
              the turn before left whole, is scattered.

Parameters that rest in host memory are fetched where they would be gathered, or before they are.

The loops take N - k turns, the other k layers stand beside them.  Forward gathers each layer once.  Its last k stay
gathered, since backward starts with them; in exchange the last k turns of backward gather what nobody needs any more,
as a loop has one body.  So the traffic is that of the plain scan, byte for byte.  The price is k more layers of
gathered parameters and one of whole gradients in memory.

A rematerialisation policy says what a layer keeps for its backward pass.  The pullback of a layer is a pytree of
arrays; those among them that are its weights are left out, whatever the policy, and brought into use again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jzero.pullback import ByKey, Layer, Pullback, Wanted, at, chosen, is_floating, run_and_pull
from jzero.use import AtRest
from jzero.zero import Path


def prefetched(layer: Layer, depth: int, ahead: int) -> Callable[..., tuple[Any, dict[Path, Any]]]:
    """The function of a stack of `depth` layers, `ahead` of which are gathered before they compute.

    Args:
        ahead: at least 1, and less than `depth`.

    Returns:
        (rest, others, x, shared) -> (x, others after the last layer).  `rest`, the weights at rest, whose slots take
        their gradients, and `others`, what else a layer holds, are stacked, [depth, ...].
    """

    @jax.custom_vjp
    def through(rest: Mapping[Path, AtRest], others: ByKey, x: Any, shared: ByKey) -> Any:
        def run_one(i: Any, weights: ByKey, x: Any, *, in_loop: bool) -> Any:  # noqa: ARG001
            return *layer.run(weights, at(others, i), x, shared), []

        return _forward(layer, depth, ahead, rest, x, run_one)[0]

    def forward(rest: Mapping[Path, AtRest], others: ByKey, x: Any, shared: ByKey) -> Any:
        trained = frozenset(path for path, weight in rest.items() if weight.slot is not None)
        wanted = Wanted(trained, _perturbed(others), _perturbed(shared))
        rest, others, x, shared = jax.tree.map(lambda primal: primal.value, (rest, others, x, shared))
        pullbacks: dict[int | None, Pullback] = {}

        def run_one(i: Any, weights: ByKey, x: Any, *, in_loop: bool) -> Any:
            *result, pullback = run_and_pull(layer, wanted, weights, at(others, i), x, shared, in_loop=in_loop)
            pullbacks[None if in_loop else i] = pullback
            return result

        result, of_loop, of_last, window = _forward(layer, depth, ahead, rest, x, run_one)
        again = frozenset[Path]().union(*(pullback.weights for pullback in pullbacks.values())) & layer.gathered
        window = [chosen(weights, again) for weights in window]
        return result, (_Static((wanted, pullbacks, again)), of_loop, of_last, window, rest, others, shared)

    def backward(residuals: Any, cotangents: Any) -> Any:
        static, of_loop, of_last, window, rest, others, shared = residuals
        wanted, pullbacks, again = static.value
        floating = {path: cotangent for path, cotangent in cotangents[1].items() if is_floating(cotangent)}
        dx, d_after = jax.tree.map(_instantiated, (cotangents[0], floating), is_leaf=_is_zero)

        def pull_one(carry: _Carried, i: Any, saved: Any, pullback: Pullback) -> _Carried:
            coming = layer.bring(again, rest, jnp.maximum(i - ahead, 0))
            weights = {**layer.bring(pullback.weights - again, rest, i), **carry.window[0]}
            pull = pullback(saved, weights, at(others, i), shared)
            return carry.past(layer, i, coming, lambda dx: pull((dx, at(d_after, i))))

        def body(carry: _Carried, of_layer: tuple[Any, Any]) -> tuple[_Carried, None]:
            i, saved = of_layer
            return pull_one(carry, i, saved, pullbacks[None]), None

        carry = _Carried(
            dx=dx,
            window=window[::-1],
            pending=None,
            # In the slots' own memory, be it the host's; every layer is written over.
            grads={path: r.slot for path, r in rest.items() if path in wanted.weights},
            d_others=jax.tree.map(jnp.zeros_like, chosen(others, wanted.others)),
            d_shared=jax.tree.map(jnp.zeros_like, chosen(shared, wanted.shared)),
        )
        for i, saved in reversed(list(enumerate(of_last, start=depth - ahead))):
            carry = pull_one(carry, i, saved, pullbacks[i])
        carry, _ = lax.scan(body, carry, (jnp.arange(depth - ahead), of_loop), reverse=True)
        d_others = {path: carry.d_others.get(path) for path in others}
        d_shared = {key: carry.d_shared.get(key) for key in shared}
        grads = carry.scattered(layer, 0)
        d_rest = {path: AtRest(grads.get(path), None) for path in rest}  # pyright: ignore[reportArgumentType] (no gradient)
        return d_rest, d_others, carry.dx, d_shared

    through.defvjp(forward, backward, symbolic_zeros=True)
    return through


# ---- forward --------------------------------------------------------------------------------------------------------


def _forward(
    layer: Layer, depth: int, ahead: int, rest: Mapping[Path, AtRest], x: Any, run_one: Callable[..., Any]
) -> tuple[tuple[Any, dict[Path, Any]], Any, list[Any], list[dict[Path, jax.Array]]]:
    """All layers by `run_one(i, weights, x, in_loop=...) -> (x, others after it, saved)`.

    Returns:
        (x, others after the last layer), what was saved of the layers in the loop, stacked, and of each after it, and
        the gathered weights of those.
    """

    def body(carry: Any, i: Any) -> Any:
        x, (weights, *window) = carry
        coming = layer.bring(layer.gathered, rest, i + ahead)
        x, after, saved = run_one(i, {**weights, **layer.bring(layer.local, rest, i)}, x, in_loop=True)
        return (x, [*window, coming]), (after, saved)

    window = [layer.bring(layer.gathered, rest, i) for i in range(ahead)]
    (x, window), (after, of_loop) = lax.scan(body, (x, window), jnp.arange(depth - ahead))
    afters, of_last = [], []
    for i, weights in zip(range(depth - ahead, depth), window, strict=True):
        x, last, saved = run_one(i, {**weights, **layer.bring(layer.local, rest, i)}, x, in_loop=False)
        afters.append(last)
        of_last.append(saved)
    after = jax.tree.map(lambda loop, *last: jnp.concatenate([loop, jnp.stack(last)]), after, *afters)
    return (x, after), of_loop, of_last, window


# ---- backward -------------------------------------------------------------------------------------------------------


class _Carried(NamedTuple):
    """What backward hands from layer i + 1 to layer i.

    Attributes:
        dx: cotangent of layer i's output.
        window: gathered weights of layers i, i - 1, ...
        pending: whole gradients of layer i + 1, which are still to be scattered; None before the first.
        grads, d_others: stacked, filled down to layer i + 1, but for what is pending.
        d_shared: summed up to here.
    """

    dx: Any
    window: list[dict[Path, jax.Array]]
    pending: dict[Path, jax.Array] | None
    grads: dict[Path, jax.Array]
    d_others: dict[Path, jax.Array]
    d_shared: dict[int, jax.Array]

    def scattered(self, layer: Layer, i: Any) -> dict[Path, jax.Array]:
        """`grads` with those of layer i that are pending."""
        pending = self.pending or {}
        return {**self.grads, **_put(self.grads, i, {p: layer.moves[p].backward(g) for p, g in pending.items()})}

    def past(self, layer: Layer, i: Any, coming: dict[Path, jax.Array], pull: Callable[[Any], Any]) -> "_Carried":
        """The same after layer i, whose pullback is `pull`."""
        grads = self.scattered(layer, i + 1)
        d_weights, d_others, dx, d_shared = pull(self.dx)
        pending = {path: grad for path, grad in d_weights.items() if layer.moves[path].backward.moves}
        local = {p: layer.moves[p].backward(g) for p, g in d_weights.items() if p not in pending}
        return _Carried(
            dx=dx,
            window=[*self.window[1:], coming],
            pending=pending,
            grads=_put(grads, i, local),
            d_others=_put(self.d_others, i, d_others),
            d_shared=jax.tree.map(jnp.add, self.d_shared, d_shared),
        )


def _put(stacked: ByKey, i: Any, layer: ByKey) -> dict[Any, jax.Array]:
    """`stacked` with `layer` at place i."""
    new = {key: lax.dynamic_update_index_in_dim(stacked[key], x, i, 0) for key, x in layer.items()}
    return {**stacked, **new}


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Static:
    """What backward has to know from forward that is no array."""

    value: Any


def _perturbed(primals: Mapping[Any, Any]) -> frozenset[Any]:
    return frozenset(key for key, primal in primals.items() if primal.perturbed and is_floating(primal.value))


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


def _instantiated(cotangent: Any) -> jax.Array:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if _is_zero(cotangent) else cotangent
