"""Training on one device in a dozen lines of plain JAX: what every ZeRO run has to equal.

The batch is cut into the slices that the devices and microbatches of a run see, each slice runs by itself, and the
sums are added up.  For a model without state that is the same as the whole batch at once.
"""

import functools
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
    grads: Any
    inner: Any


def recording(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, with the gradient of the last step in its state."""

    def init(params: Any) -> Recorded:
        return Recorded(jax.tree.map(jnp.zeros_like, params), tx.init(params))

    def update(grads: Any, state: Recorded, params: Any = None) -> tuple[Any, Recorded]:
        updates, inner = tx.update(grads, state.inner, params)
        return updates, Recorded(grads, inner)

    return optax.GradientTransformation(init, update)


class Trace(NamedTuple):
    """`params`, `grads`, `state`: path -> array; gradients of step 1, the others after the last step."""

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
        grads = grads or arrays(state.opt_state.grads)
    return Trace(losses, norms, grads, arrays(state.params), arrays(state.model_state))


def one_device(
    model_fn: Callable[[], nnx.Module],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    batches: Sequence[Any],
    *,
    devices: int = 1,
    micro_batches: int = 1,
    trainable: Any = nnx.Param,
) -> Trace:
    """The same training without jzero, on `devices * micro_batches` slices one after another."""
    with nnx.use_eager_sharding(False):
        model = model_fn()
    graphdef, params, frozen, rest = nnx.split(model, nnx.All(trainable, _is_float), nnx.Param, ...)

    @jax.jit
    def gradient(params: Any, rest: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            # A Variable can be changed only at the trace level at which it was made, so they are made anew here.
            model = nnx.merge(graphdef, params, *jax.tree.map(jnp.asarray, (frozen, rest)))
            total, weight = loss_fn(model, batch)[:2]
            return total.astype(jnp.float32), (weight, nnx.state(model, nnx.Not(nnx.Param)))

        return jax.value_and_grad(loss, has_aux=True)(params)

    opt_state, losses, norms, first = tx.init(params), [], [], None
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
        grads = jax.tree.map(functools.partial(jnp.multiply, 1 / weight), grads)
        first = grads if first is None else first
        losses.append(total / weight)
        norms.append(float(optax.tree.norm(grads)))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return Trace(losses, norms, arrays(first), arrays(params), arrays(rest))


def assert_equal(got: Trace, wanted: Trace, rtol: float = 1e-5) -> None:
    """Gradients leaf by leaf, their norms and the losses."""
    assert set(got.grads) == set(wanted.grads)
    for path, grad in wanted.grads.items():
        # An element is as exact as the sums it came from: the leaf's largest element measures those, and for a leaf
        # whose gradient is zero but for rounding, the norm does.
        scale = max(float(np.abs(grad).max(initial=0)), 0.01 * wanted.norms[0])
        np.testing.assert_allclose(got.grads[path], grad, rtol=rtol, atol=rtol * scale, err_msg=str(path))
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=rtol)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=rtol)


def arrays(tree: Any) -> dict[Any, np.ndarray]:
    """Path -> array on the host, of a nested dict or an NNX state."""
    flat = dict(nnx.to_flat_state(tree)) if isinstance(tree, nnx.State) else flatten_dict(tree)
    return {path: _host(v.get_raw_value() if isinstance(v, nnx.Variable) else v) for path, v in flat.items()}


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
