"""Training on one device in a dozen lines of plain JAX: what every ZeRO run has to equal.

The batch is cut into the slices that the devices and microbatches of a run see, each slice runs by itself, and the
sums are added up.  For a model without state that is the same as the whole batch at once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict

import jzero

MESHES = {"dp4": "dp=4", "node2dp2": "node=2,dp=2", "dp2tp2": "dp=2,tp=2"}


class Recorded(NamedTuple):
    inner: Any
    grads: Any


def recording(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, with the gradients that it was last given in its state."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Recorded:
        return Recorded(tx.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: Recorded, params: Any = None, **extra: Any) -> tuple[Any, Recorded]:
        updates, inner = tx.update(grads, state.inner, params, **extra)
        return updates, Recorded(inner, grads)

    return optax.GradientTransformationExtraArgs(init, update)


class Trace(NamedTuple):
    """What a training left behind.

    Attributes:
        losses: of each step.
        norms: of each step's gradient, before clipping.
        grads: path -> gradient of step 1 as the optimizer was given it, after clipping.
        params, state: path -> array after the last step; `state` is what the model holds beside parameters.
    """

    losses: list[float]
    norms: list[float]
    grads: dict[Any, np.ndarray]
    params: dict[Any, np.ndarray]
    state: dict[Any, np.ndarray]


def mesh(name: str = "dp4") -> jax.sharding.Mesh:
    """Four devices, however many there are."""
    return jzero.make_mesh(MESHES.get(name, name), jax.devices()[:4])


def train(run: jzero.Run, batches: Sequence[Any]) -> Trace:
    """A run whose `tx` is `recording`."""
    state, losses, norms, grads = run.init(), [], [], {}
    for batch in batches:
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        grads = grads or arrays(_recorded(state.opt_state).grads)
    return Trace(losses, norms, grads, arrays(state.params), arrays(state.model_state))


def one_device(
    model_fn: Callable[[], nnx.Module],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    batches: Sequence[Any],
    *,
    devices: int = 1,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    trainable: Any = nnx.Param,
) -> Trace:
    """The same training without jzero, on `devices * micro_batches` slices one after another."""
    with nnx.use_eager_sharding(False):
        model = model_fn()
    graphdef, *parts = nnx.split(model, nnx.All(trainable, _is_float), nnx.Param, ...)
    params, frozen, rest = map(nnx.to_pure_dict, parts)
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def gradient(params: Any, rest: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            model = nnx.merge(graphdef, params, frozen, rest)
            total, weight = loss_fn(model, batch)[:2]
            after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
            return total.astype(jnp.float32), (weight, after)

        return jax.value_and_grad(loss, has_aux=True)(params)

    @jax.jit
    def update(params: Any, opt_state: Any, grads: Any, loss: Any, weight: Any) -> Any:
        grads = jax.tree.map(lambda g: g / weight, grads)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip_norm / norm), grads)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, grads, norm

    opt_state, losses, norms, first = tx.init(params), [], [], {}
    for batch in batches:
        total, weight, grads, afters = 0.0, 0.0, None, []
        for device, micros in enumerate(_slices(batch, devices, micro_batches)):
            own = _on_device(rest, device)
            for micro in micros:
                (loss, (w, own)), g = gradient(params, own, micro)
                total, weight = total + float(loss), weight + float(w)
                grads = g if grads is None else jax.tree.map(jnp.add, grads, g)
            afters.append(own)
        rest = _averaged(rest, afters)
        params, opt_state, grads, norm = update(params, opt_state, grads, total / weight, weight)
        first = first or arrays(grads)
        losses.append(total / weight)
        norms.append(float(norm))
    return Trace(losses, norms, first, arrays(params), arrays(rest))


def assert_equal(got: Trace, wanted: Trace, rtol: float = 1e-5, *, floor: float = 0.0) -> None:
    """Gradients of step 1 by leaf and by element, and the gradient norms and losses of all steps.

    Every mesh adds up in an order of its own.  In float32 that changes a leaf of the gradient by 2e-6 of its norm at
    most, and a loss, a sum of terms of one sign, by 4e-7; so losses are held ten times as tightly.
    """
    assert_gradients_equal(got, wanted, rtol, floor=floor)
    for path, grad in wanted.grads.items():
        # Elements that cancel to nearly nothing carry the rounding of what they are a sum of.
        atol = rtol * max(0.1 * float(np.abs(grad).max(initial=0)), floor * wanted.norms[0])
        np.testing.assert_allclose(got.grads[path], grad, rtol=rtol, atol=atol, err_msg=str(path))
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=rtol)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=0.1 * rtol)


def assert_gradients_equal(got: Trace, wanted: Trace, rtol: float, *, floor: float = 0.0) -> None:
    """Gradients of step 1, every leaf relative to its norm.

    Args:
        floor: of the norm that an error is relative to, as a part of the norm of the whole gradient; for leaves whose
            gradient is zero but for rounding.
    """
    assert got.grads.keys() == wanted.grads.keys()
    for path, grad in wanted.grads.items():
        norm = max(float(np.linalg.norm(grad)), floor * wanted.norms[0])
        error = float(np.linalg.norm(got.grads[path] - grad))
        assert error <= rtol * norm, f"gradient of {path}: off by {error:.2e}, where its norm is {norm:.2e}"


def arrays(tree: Any) -> dict[Any, np.ndarray]:
    """Path -> array on the host, of a nested dict."""
    return {path: _host(x) for path, x in flatten_dict(tree).items()}


def _recorded(opt_state: Any) -> Recorded:
    """Parameters that rest in less than float32 have a master beside the transformation's state."""
    return opt_state if isinstance(opt_state, Recorded) else opt_state.inner


def _host(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)


def _is_float(_: Any, x: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)


def _slices(batch: Any, devices: int, micro_batches: int) -> Iterator[list[Any]]:
    rows = jax.tree.leaves(batch)[0].shape[0] // (devices * micro_batches)
    for device in range(devices):
        starts = [(device * micro_batches + m) * rows for m in range(micro_batches)]
        yield [jax.tree.map(lambda x, s=s: x[s : s + rows], batch) for s in starts]


def _on_device(state: Any, device: int) -> Any:
    """Random keys are folded with the index of the data-parallel device."""

    def fold(x: Any) -> Any:
        if not _is_key(x):
            return x
        return jax.vmap(lambda k: jax.random.fold_in(k, device))(x.reshape(-1)).reshape(x.shape)

    return jax.tree.map(fold, state)


def _averaged(before: Any, afters: Sequence[Any]) -> Any:
    def average(old: Any, *new: Any) -> Any:
        if _is_key(old):
            return old
        return jnp.mean(jnp.stack(new), 0) if jnp.issubdtype(jnp.asarray(old).dtype, jnp.floating) else new[0]

    return jax.tree.map(average, before, *afters)
