"""An elementwise update that goes through memory once on the CPU backend: block by block, in place.

XLA:CPU makes one loop per output.  AdamW on whole arrays therefore reads the gradient three times, m and v twice, and
first copies m and v, which a later loop reads after they were overwritten: about 66 bytes per element and a temporary
of 8, where 30 and none would do (read gradient, m, v, master of 4 bytes each; write m, v, master and 2 of parameters).
Here all loops of one block run while its data is in the cache of a core, and memory sees each array once:

    bytes per element = the donated arrays, once read and once written + the arrays that are only read

The blocks of the next iteration are read behind the writes of this one and carried to it.  A block that is sliced where
it is used would be fused into the loops that use it, and XLA would copy the whole array, in each iteration, to keep
its old values for them.

XLA:CPU has no 16-bit floats to write a block of, so they go through the loop as integers: converting them before and
after costs 4 bytes per element each way and a temporary of 2, whose fresh pages cost more than all the rest (AdamW took
twice the time).  An update that is given their bits (uint16, and `lax.bitcast_convert_type` inside) does not pay that.

A loop over blocks runs on one core.  To use several, hold the elements in as many chunks, arrays of their own, and run
the program on all of them `at_once`.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_BYTES = 2**19  # of all arrays together: half of a common 1 MiB of L2, since results lie beside operands

_BITS = {1: jnp.uint8, 2: jnp.uint16}
Update = Callable[[Any, Any, Any], tuple[Any, Any]]  # (arrays, read, scalars) -> (arrays, scalars)


def in_blocks(update: Update, block_bytes: int = BLOCK_BYTES) -> Update:
    """`update`, with the same results, in place and block by block; to be jitted for a CPU device.

    Jit it with `donate_argnums=0` and `keep_unused=True`: every array that it returns then reuses the buffer of the one
    it stands for, the old values of which need not be used.

    Args:
        update: (arrays, read, scalars) -> (arrays, scalars), elementwise: what it makes of an element hangs on that
            element and the scalars alone, and the scalars that it returns on scalars alone.  The arrays it returns
            have the structure, shapes and dtypes of those it is given.  It is called on 1-D blocks.
        block_bytes: of all arrays together, given and read, that are in the cache at a time.

    Returns:
        The same for arrays of one shape, any shape.

    Raises (when traced):
        ValueError: arrays of several shapes, or an update that returns others than it was given.
    """

    def blocked(arrays: Any, read: Any, scalars: Any) -> tuple[Any, Any]:
        shape = _one_shape(arrays, read)
        flat, read = jax.tree.map(lambda x: x.reshape(-1), (arrays, read))
        _check(update, flat, read, scalars)
        flat, scalars = _through(update, flat, read, scalars, block_bytes)
        return jax.tree.map(lambda x: x.reshape(shape), flat), scalars

    return blocked


def at_once(program: Callable[..., Any], chunks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What a compiled or jitted program returns for each chunk's arguments, when all have ended; a thread for each.

    Programs dispatched one after the other by one thread share a CPU device worse: 18 against 30 GB/s on 2 cores.
    """
    if len(chunks) <= 1:
        return [jax.block_until_ready(program(*chunk)) for chunk in chunks]
    return list(_threads(len(chunks)).map(lambda chunk: jax.block_until_ready(program(*chunk)), chunks))


@functools.lru_cache(maxsize=4)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="at_once")


def _through(update: Update, arrays: Any, read: Any, scalars: Any, block_bytes: int) -> tuple[Any, Any]:
    size, block = _sizes(arrays, read, block_bytes)
    if size <= block:
        return update(arrays, read, scalars)
    steps, rest = divmod(size, block)
    dtypes = jax.tree.map(lambda x: x.dtype, arrays)

    def slices(tree: Any, i: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice(x, (i * block,), (block,)), tree)

    def step(i: Any, carry: Any) -> Any:
        bits, parts, read_parts = carry
        new, _ = update(_floats(parts, dtypes), read_parts, scalars)
        bits = jax.tree.map(lambda x, part: lax.dynamic_update_slice(x, part, (i * block,)), bits, _bits(new))
        following = jnp.minimum(i + 1, steps - 1)
        return bits, slices(bits, following), slices(read, following)

    bits = _bits(arrays)
    start = (bits, slices(bits, 0), slices(read, 0))
    _, new_scalars = update(_floats(start[1], dtypes), start[2], scalars)  # of this call the scalars alone are computed
    bits, _, _ = lax.fori_loop(0, steps, step, start)
    if rest:
        bits = _last(update, bits, read, scalars, dtypes, size - rest)
    return _floats(bits, dtypes), new_scalars


def _last(update: Update, bits: Any, read: Any, scalars: Any, dtypes: Any, at: int) -> Any:
    """What the blocks left over.

    Written twice from the same old values, since XLA makes a loop of one iteration straight code, in which the slices
    would be fused into their uses.
    """
    old, read = jax.tree.map(lambda x: x[at:], (bits, read))

    def step(_: Any, bits: Any) -> Any:
        new, _ = update(_floats(old, dtypes), read, scalars)
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice(x, part, (at,)), bits, _bits(new))

    return lax.fori_loop(0, 2, step, bits)


def _sizes(arrays: Any, read: Any, block_bytes: int) -> tuple[int, int]:
    """Elements of an array, and of a block: a power of two, whole cache lines."""
    leaves = jax.tree.leaves((arrays, read))
    fit = block_bytes // max(1, sum(x.dtype.itemsize for x in leaves))
    return (leaves[0].size if leaves else 0), 2 ** max(6, int(fit).bit_length() - 1)


def _bits(tree: Any) -> Any:
    """Narrow floats as integers: a block of them is written by converting the whole array to float32 and back."""
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]) if _narrow(x.dtype) else x, tree)


def _floats(tree: Any, dtypes: Any) -> Any:
    return jax.tree.map(lambda x, d: lax.bitcast_convert_type(x, d) if x.dtype != d else x, tree, dtypes)


def _narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in {8, 16}


def _one_shape(arrays: Any, read: Any) -> tuple[int, ...]:
    shapes = {x.shape: jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path((arrays, read))}
    if len(shapes) > 1:
        (shape, name), (other, other_name), *_ = shapes.items()
        raise ValueError(
            f"in_blocks goes through arrays of one shape: {name} has {shape} and {other_name} has {other}; "
            f"call it once for each shape"
        )
    return next(iter(shapes), ())


def _check(update: Update, arrays: Any, read: Any, scalars: Any) -> None:
    given = jax.eval_shape(lambda x: x, arrays)
    new, _ = jax.eval_shape(update, arrays, read, scalars)
    if jax.tree.structure(new) != jax.tree.structure(given):
        raise ValueError(
            f"the update returns arrays in {jax.tree.structure(new)}, but was given {jax.tree.structure(given)}: "
            f"return them as they were given"
        )
    for (path, x), y in zip(jax.tree.leaves_with_path(given), jax.tree.leaves(new), strict=True):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"the update returns {jax.tree_util.keystr(path)} as {y.dtype}{list(y.shape)}, but was given "
                f"{x.dtype}{list(x.shape)}: its buffer cannot be reused; convert it inside the update"
            )
