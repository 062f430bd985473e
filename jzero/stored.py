"""A train state as a checkpoint holds it: arrays by name, the same names at every stage, on every mesh.

The names are the paths of the train state, such as `params/layers/mlp/up`, with one exception that makes them the same
at every precision, too: float32 masters stand under `master/`, beside the state of the optax transformation, and a
leaf that rests in float32 has none.  A checkpoint in bfloat16 with masters and one in float32 differ by nothing else,
and each restores to the other: what is wanted in another dtype than it is held in comes from the master.

Random keys are stored as the integers that they are made of, and arrays without elements not at all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from jzero.offload import at_rest
from jzero.offload.pieces import AbstractPieces, is_pieces
from jzero.optim import WithMaster
from jzero.step import TrainState

_MASTER = "master/"
_PARAMS = "params/"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or read; the message is one line for the user.

    Attributes:
        everywhere: whether all processes have the same error.
    """

    everywhere = False


class DamagedError(CheckpointError):
    """A step whose files are not as they were written."""


class MismatchError(CheckpointError):
    """A checkpoint holds another state than the one that is wanted; the message names the leaf."""


def leaves(state: TrainState) -> dict[str, Any]:
    """Name -> array as it is stored, of a train state or of an abstract one; what rests in pieces is `Pieces`."""
    paths, _ = tree_flatten_with_path(_document(state), is_leaf=is_pieces)
    return {_name(path): _data(x) for path, x in paths if x.size}


def sources(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """Which stored array each wanted leaf comes from, by name.

    Args:
        held, wanted: name -> anything with shape and dtype.

    Raises:
        MismatchError: a leaf is missing, has another shape or another kind of dtype, or the checkpoint holds one that
            nobody wants.
    """
    found = {name: _source(name, x, held) for name, x in wanted.items()}
    for name, source in found.items():
        if tuple(held[source].shape) != tuple(wanted[name].shape):
            raise MismatchError(
                f"{name!r} has shape {tuple(held[source].shape)} in the checkpoint and {tuple(wanted[name].shape)} in "
                f"this run"
            )
        _check_convertible(name, held[source].dtype, wanted[name].dtype)
    left = [name for name in held if name not in wanted and not name.startswith(_MASTER)]
    if left:
        raise MismatchError(f"the checkpoint holds {_and_more(left)}, which this run does not have")
    return found


def restored(state: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """The train state that `arrays` make up.

    Args:
        state: abstract, with shardings.
        arrays: name -> array as it is stored, in the shardings of `leaves(state)`.
    """
    paths, treedef = tree_flatten_with_path(_document(state))
    document = jax.tree.unflatten(
        treedef, [_undata(x, arrays[_name(path)]) if x.size else _empty(x) for path, x in paths]
    )
    opt_state, master = document.pop("opt_state"), document.pop("master")
    if isinstance(state.opt_state, WithMaster):
        opt_state = WithMaster(master, opt_state)
    return TrainState(opt_state=opt_state, **document)


def _document(state: TrainState) -> dict[str, Any]:
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    opt_state = fields["opt_state"]
    if isinstance(opt_state, WithMaster):
        return {**fields, "opt_state": opt_state.inner, "master": opt_state.master}
    return {**fields, "master": {}}


def _name(path: Any) -> str:
    """The keys of a path with slashes between them; one that stands in a key is escaped as in an address."""
    keys = (keystr((key,), simple=True) for key in path)
    return "/".join(key.replace("%", "%25").replace("/", "%2F") for key in keys)


def _empty(x: Any) -> Any:
    if isinstance(x, AbstractPieces):
        return at_rest.empty(x)
    return jax.jit(lambda: jnp.zeros(x.shape, x.dtype), out_shardings=x.sharding)()


def _source(name: str, leaf: Any, held: Mapping[str, Any]) -> str:
    """The stored array for a leaf: its own, or the master, which rounds least, if the dtype changes."""
    if name.startswith(_PARAMS):
        master = _MASTER + name.removeprefix(_PARAMS)
        changes = name in held and held[name].dtype != leaf.dtype
        if master in held and changes:
            return master
    if name.startswith(_MASTER) and name not in held:
        name = _PARAMS + name.removeprefix(_MASTER)
    if name not in held:
        raise MismatchError(
            f"{name!r} of shape {tuple(leaf.shape)} is not in the checkpoint (another model or optimizer, or layers "
            f"stacked in one and not in the other)"
        )
    return name


def _check_convertible(name: str, held: Any, wanted: Any) -> None:
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (held, wanted))
    if held != wanted and not floating:
        raise MismatchError(f"{name!r} is {held} in the checkpoint and {wanted} in this run")


def _and_more(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more leaves" if len(names) > 1 else "")


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _data(x: Any) -> Any:
    if not _is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=NamedSharding(x.sharding.mesh, x.sharding.spec))


def _undata(x: Any, array: jax.Array) -> jax.Array:
    if not _is_key(x):
        return array
    impl = _key_impl(x)
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=x.sharding)(array)


def _key_impl(keys: jax.ShapeDtypeStruct) -> Any:
    found: list[Any] = []  # JAX tells it of keys alone, not of their shape and dtype
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), keys)
    return found[0]
