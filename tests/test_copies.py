"""Memory that arrays have left: filled again without a copy where it fits, and never under an array that is in use."""

import gc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jzero.offload.copies import Copies

SHAPE, DTYPE = (3, 1000), np.dtype(np.float32)


def values(seed):
    return np.random.default_rng(seed).standard_normal(SHAPE, DTYPE)


def fill(memory, x):
    memory[:] = x.reshape(-1).view(np.uint8)


def taken(copies, x, device):
    """By way of memory to be filled, as a group is read."""
    memory = copies.memory(x.shape, x.dtype, device)
    fill(memory, x)
    array = jax.block_until_ready(copies.take(memory.view(x.dtype).reshape(x.shape), device))
    copies.returned([memory])
    return array


@pytest.fixture
def device():
    return jax.devices()[0]


def test_an_array_is_taken_in_the_memory_that_one_like_it_has_left(device):
    copies = Copies()
    first = taken(copies, values(0), device)
    place = first.unsafe_buffer_pointer()
    copies.give([first])
    second = taken(copies, values(1), device)
    assert second.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(second, values(1))
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(second)
    assert after.unsafe_buffer_pointer() == place  # a program reuses it like any other
    np.testing.assert_array_equal(after, values(1) + 1)


def test_what_was_taken_keeps_its_values_while_others_are_taken(device):
    copies = Copies()
    arrays = [taken(copies, values(seed), device) for seed in range(2)]
    copies.give([jnp.zeros(SHAPE)])
    arrays += [taken(copies, values(seed), device) for seed in range(2, 5)]  # one in what was left
    for seed, x in enumerate(arrays):
        np.testing.assert_array_equal(x, values(seed))


@pytest.mark.parametrize(
    "left", [((1000, 3), DTYPE, 0), (SHAPE, np.dtype(np.int32), 0), (SHAPE, DTYPE, 1)], ids=["shape", "dtype", "device"]
)
def test_what_was_left_by_another_kind_of_array_is_not_taken(left, device):
    shape, dtype, number = left
    copies, other = Copies(), jnp.zeros(shape, dtype, device=jax.devices()[number])
    copies.give([other])
    x = taken(copies, values(0), device)
    np.testing.assert_array_equal(x, values(0))
    assert x.devices() == {device}
    np.testing.assert_array_equal(other, np.zeros(shape, dtype))


def test_a_second_device_gets_a_copy_of_what_was_filled_for_the_first(device):
    copies, second = Copies(), jax.devices()[1]
    copies.give([jnp.zeros(SHAPE, DTYPE, device=device)])
    memory = copies.memory(SHAPE, DTYPE, device)
    fill(memory, values(0))
    x = memory.view(DTYPE).reshape(SHAPE)
    arrays = jax.block_until_ready([copies.take(x, at) for at in (device, second)])
    assert [y.devices() for y in arrays] == [{device}, {second}]
    jax.block_until_ready(jax.jit(lambda y: y * 0, donate_argnums=0)(arrays[0]))
    np.testing.assert_array_equal(arrays[1], values(0))


def test_memory_to_be_filled_stays_as_long_as_anybody_has_it(device):
    copies, left = Copies(), jnp.zeros(SHAPE, DTYPE, device=device)
    alive = weakref.ref(left)
    copies.give([left])
    del left
    memory = copies.memory(SHAPE, DTYPE, device)
    copies.returned([])  # as after a read that failed
    gc.collect()
    assert alive() is not None
    del memory
    gc.collect()
    assert alive() is None


def test_elements_of_less_than_a_byte_come_out_as_they_went_in(device):
    copies, dtype = Copies(), np.dtype(ml_dtypes.int4)
    copies.give([jnp.zeros(1000, dtype, device=device)])
    x = (np.arange(1000) % 7).astype(dtype)
    np.testing.assert_array_equal(np.asarray(taken(copies, x, device)).astype(np.int8), x.astype(np.int8))


def test_nothing_is_made_of_an_array_that_a_program_has_used_up(device):
    copies, x = Copies(), jnp.zeros(SHAPE)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    copies.give([x])
    np.testing.assert_array_equal(taken(copies, values(0), device), values(0))
