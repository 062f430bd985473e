"""What the forward pass keeps for the backward pass, in functions small enough to know it, and for absent GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jzero
from jzero import targets
from jzero.models.decoder import Decoder, DecoderConfig, next_token_loss
from jzero.saved import Saved, saved

LAYERS, D, ROWS = 5, 16, 8
F32 = 4


def of_gradient(loss, *shapes) -> Saved:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return saved(jax.jit(jax.grad(loss)).lower(*args).compile())


def layer(x, w):
    return jnp.sin(x @ w), None


def test_of_a_loop_over_layers_the_stack_of_what_each_keeps():
    """The derivative of sin needs the product and that of the product its other operand, the layer's input."""

    def loss(ws, x):
        return lax.scan(layer, x, ws)[0].sum()

    found = of_gradient(loss, (LAYERS, D, D), (ROWS, D))
    assert sorted(held.bytes for held in found.activations) == [LAYERS * ROWS * D * F32] * 2
    assert found.gathered == ()


def test_with_rematerialisation_the_layers_inputs_alone():
    def loss(ws, x):
        return lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)[0].sum()

    (inputs,) = of_gradient(loss, (LAYERS, D, D), (ROWS, D)).activations
    assert (inputs.shape, inputs.bytes) == (f"f32[{LAYERS},{ROWS},{D}]", LAYERS * ROWS * D * F32)


def test_parameters_are_not_activations_however_they_are_cast_or_laid_out():
    def loss(w, x):
        narrow = w.astype(jnp.bfloat16).T
        return jnp.sin(x.astype(jnp.bfloat16) @ narrow).astype(jnp.float32).sum()

    found = of_gradient(loss, (D, D), (ROWS, D))
    assert all(held.bytes <= ROWS * D * F32 for held in found.activations)
    assert not any(f"[{D},{D}]" in held.shape for held in found.activations)


def test_without_a_derivative_nothing_is_kept():
    args = jax.ShapeDtypeStruct((ROWS, D), jnp.float32), jax.ShapeDtypeStruct((D, D), jnp.float32)
    assert saved(jax.jit(lambda x, w: jnp.sin(x @ w)).lower(*args).compile()) == Saved((), ())


def test_of_gathers_after_each_other_those_alive_at_once_count():
    """One layer's weights in a plain scan; the head after it."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = Mesh(np.array(jax.devices()[:4]), ("dp",), axis_types=(AxisType.Auto,))

    def gathered(shard):
        return lax.all_gather(shard, "dp", axis=0, tiled=True)

    def f(ws, x):
        return lax.scan(lambda x, w: layer(x, gathered(w)), x, ws)[0]

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P(None, "dp"), P()), out_specs=P(), check_vma=False)
    args = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.float32), jax.ShapeDtypeStruct((ROWS, D), jnp.float32)
    assert saved(jax.jit(mapped).lower(*args).compile()).gathered_bytes == D * D * F32


# ---- for absent GPUs -------------------------------------------------------------------------------------------------


@functools.cache
def for_gpus(stage: int) -> Saved:
    config = DecoderConfig(
        width=256, layers=4, heads=4, kv_heads=4, mlp_width=512, vocab=1024, dtype="bfloat16", remat="full"
    )
    run = jzero.setup(
        lambda: Decoder(config, rngs=nnx.Rngs(0)),
        next_token_loss,
        optax.adamw(1e-3),
        jzero.make_mesh("dp=8", targets.gpu_devices("h100", 8)),
        {"tokens": jax.ShapeDtypeStruct((8, 129), jnp.int32)},
        stage=stage,
        precision=jzero.Precision(params="bfloat16"),
    )
    return saved(run.lower()["step"].compile(compiler_options=targets.COMPILER_OPTIONS))


@pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_programs_for_gpus_save_the_same_activations_as_at_stage_3(stage):
    assert for_gpus(stage).activation_bytes == for_gpus(3).activation_bytes > 0
