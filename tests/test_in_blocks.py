"""An update in blocks gives what the plain one gives, in the donated buffers, with temporaries of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jzero.in_blocks import at_once, in_blocks

BLOCK_BYTES = 2**12  # 128 elements of the AdamW below


def adamw(arrays, read, scalars):
    tx = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))
    inner = (optax.ScaleByAdamState(scalars["count"], arrays["m"], arrays["v"]), optax.EmptyState())
    updates, (adam, _) = tx.update(read * scalars["clip"], inner, arrays["master"])
    new = {"m": adam.mu, "v": adam.nu, "master": arrays["master"] - scalars["lr"] * updates}
    new = {name: jnp.where(scalars["finite"], x, arrays[name]) for name, x in new.items()}
    count = jnp.where(scalars["finite"], adam.count, scalars["count"])
    return new | {"param": new["master"].astype(arrays["param"].dtype)}, scalars | {"count": count}


def lion(arrays, read, scalars):
    tx = optax.chain(optax.scale_by_lion(), optax.add_decayed_weights(0.1))
    inner = (optax.ScaleByLionState(scalars["count"], arrays["m"]), optax.EmptyState())
    updates, (state, _) = tx.update(read * scalars["clip"], inner, arrays["master"])
    new = arrays["master"] - scalars["lr"] * updates
    return {"m": state.mu, "master": new}, scalars | {"count": state.count}


def sgd(arrays, read, scalars):
    updates, state = optax.trace(0.9).update(read, optax.TraceState(arrays["m"]))
    return {"m": state.trace, "master": arrays["master"] - scalars["lr"] * updates}, scalars


def example(update, shape, param=jnp.bfloat16):
    rng = np.random.default_rng(0)
    normal = lambda scale: jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)  # noqa: E731
    arrays = {"m": normal(1e-2), "master": normal(1.0)}
    if update is adamw:
        arrays |= {"v": jnp.square(normal(1e-2)), "param": normal(1.0).astype(param)}
    scalars = {"count": jnp.int32(4), "lr": jnp.float32(1e-2), "clip": jnp.float32(0.3), "finite": jnp.bool_(True)}
    return arrays, normal(1e-1), scalars


def jitted(update):
    return jax.jit(in_blocks(update, BLOCK_BYTES), donate_argnums=0, keep_unused=True)


@pytest.mark.parametrize("update", [adamw, lion, sgd])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (127,), (2048,), (2049,), (37, 83)])
def test_it_equals_the_plain_update_bit_for_bit(update, shape):
    args = example(update, shape)
    expected = jax.jit(update)(*args)
    jax.tree.map(np.testing.assert_array_equal, jitted(update)(*args), expected)


@pytest.mark.parametrize("param", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_parameters_of_any_dtype(param):
    args = example(adamw, (1000,), param)
    expected = jax.jit(adamw)(*args)
    assert expected[0]["param"].dtype == param
    jax.tree.map(np.testing.assert_array_equal, jitted(adamw)(*args), expected)


def test_a_step_that_is_not_finite_changes_nothing():
    arrays, read, scalars = example(adamw, (1000,))
    arrays["param"] = arrays["master"].astype(jnp.bfloat16)
    before = jax.tree.map(np.asarray, arrays)
    new, new_scalars = jitted(adamw)(arrays, read * np.float32(np.nan), scalars | {"finite": jnp.bool_(False)})
    jax.tree.map(np.testing.assert_array_equal, new, before)
    assert int(new_scalars["count"]) == 4


@pytest.mark.parametrize("size", [2**16, 2**18 + 3])
def test_every_output_reuses_a_donated_buffer_and_temporaries_are_of_blocks(size):
    program = jitted(adamw).lower(*example(adamw, (size,), jnp.float32)).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * 4 * size
    assert memory.temp_size_in_bytes < 4 * BLOCK_BYTES


def test_16_bit_parameters_cost_their_own_bytes_as_a_temporary_and_none_as_bits():
    size = 2**16 + 3
    memory = jitted(adamw).lower(*example(adamw, (size,))).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 14 * size
    assert memory.temp_size_in_bytes < 2 * size + 4 * BLOCK_BYTES

    def as_bits(arrays, read, scalars):
        new, scalars = adamw(
            arrays | {"param": jax.lax.bitcast_convert_type(arrays["param"], jnp.bfloat16)}, read, scalars
        )
        return new | {"param": jax.lax.bitcast_convert_type(new["param"], jnp.uint16)}, scalars

    memory = jitted(as_bits).lower(*example(adamw, (size,), jnp.uint16)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 14 * size
    assert memory.temp_size_in_bytes < 4 * BLOCK_BYTES


def test_chunks_at_once_give_what_they_give_alone():
    chunks = [example(adamw, (size,)) for size in (1000, 3000)]
    expected = [jax.jit(adamw)(*chunk) for chunk in chunks]
    jax.tree.map(np.testing.assert_array_equal, at_once(jitted(adamw), chunks), expected)
    assert at_once(jitted(adamw), []) == []


def test_arrays_of_several_shapes_are_named():
    arrays, read, scalars = example(sgd, (4,))
    with pytest.raises(ValueError, match=r"\['m'\] has \(5,\) and .* has \(4,\); call it once"):
        in_blocks(sgd)(arrays | {"m": jnp.zeros(5)}, read, scalars)


def test_an_update_that_returns_another_dtype_is_named():
    arrays, read, scalars = example(sgd, (4,))
    with pytest.raises(ValueError, match=r"\['m'\] as bfloat16\[4\], but was given float32\[4\]"):
        in_blocks(lambda a, r, s: ({"m": r.astype(jnp.bfloat16), "master": r}, s))(arrays, read, scalars)


def test_an_update_that_returns_other_arrays_is_refused():
    arrays, read, scalars = example(sgd, (4,))
    with pytest.raises(ValueError, match="return them as they were given"):
        in_blocks(lambda a, r, s: ({"m": r}, s))(arrays, read, scalars)
