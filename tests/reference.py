"""One device, no jzero: what every sharded run has to equal; and the small decoder that the core's tests share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict

from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss

SEQ = 8
VOCAB = 96


class Trace(NamedTuple):
    """What a training run left behind."""

    grads: dict[Any, np.ndarray]  # of the first step, by path
    norms: list[float]
    losses: list[float]


class Recorded(NamedTuple):
    inner: Any
    grads: Any


def recording(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, with the gradients it last saw in its state."""
    tx = optax.with_extra_args_support(tx)

    def init(params):
        return Recorded(tx.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None, **extra):
        updates, inner = tx.update(grads, state.inner, params, **extra)
        return updates, Recorded(inner, grads)

    return optax.GradientTransformationExtraArgs(init, update)


def decoder(**changes) -> Callable[[], nnx.Module]:
    """A model function for a tiny decoder: 2 layers, width 32, nothing that tp=4 does not divide."""
    sizes = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 4, "mlp_width": 64, "vocab": VOCAB, "tied": False}
    config = DecoderConfig(**(sizes | changes))
    return lambda: Decoder(config, rngs=nnx.Rngs(0))


def batches(count: int, rows: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Random tokens with random 0/1 weights, so that devices and microbatches carry different total weights."""
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(0, VOCAB, (rows, SEQ + 1)).astype(np.int32),
            "weights": (rng.random((rows, SEQ)) < rng.random((rows, 1))).astype(np.float32),
        }
        for _ in range(count)
    ]


def train_on_one_device(
    model_fn: Callable[[], nnx.Module], tx: Any, data: Sequence[Any], loss_fn: Callable = next_token_loss
) -> Trace:
    """Plain `jax.jit`, `jax.grad` of the mean loss, optax."""
    graphdef, params, rest = nnx.split(model_fn(), nnx.Param, ...)
    opt_state = tx.init(params)

    def mean(params, batch):
        total, weight = loss_fn(nnx.merge(graphdef, params, rest), batch)
        return total / weight

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(mean)(params, batch)
        updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    first, norms, losses = {}, [], []
    for batch in data:
        params, opt_state, loss, grads = step(params, opt_state, batch)
        first = first or {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(grads)}
        norms.append(float(optax.tree.norm(grads)))
        losses.append(float(loss))
    return Trace(first, norms, losses)


def train(run: Any, data: Sequence[Any]) -> Trace:
    """The same of a jzero run whose optimizer is `recording`."""
    state, first, norms, losses = run.init(), {}, [], []
    for batch in data:
        state, metrics = run.step(state, batch)
        recorded = getattr(state.opt_state, "inner", None)
        recorded = state.opt_state if isinstance(state.opt_state, Recorded) else recorded
        first = first or {path: np.asarray(g) for path, g in flatten_dict(recorded.grads).items()}
        norms.append(float(metrics["grad_norm"]))
        losses.append(float(metrics["loss"]))
    return Trace(first, norms, losses)


def assert_same(found: Trace, wanted: Trace, rtol: float = 1e-5) -> None:
    """Gradients leaf by leaf (relative to the leaf's norm), gradient norms and losses."""
    assert found.grads.keys() == wanted.grads.keys()
    for path, grad in wanted.grads.items():
        error = np.linalg.norm(found.grads[path] - grad) / np.linalg.norm(grad)
        assert error < rtol, f"gradient of {path}: relative error {error:.2e}"
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=rtol)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=rtol)
