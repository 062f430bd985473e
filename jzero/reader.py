"""Reading a step into the shardings of a run, and telling a damaged step from a machine that cannot read it now."""

import errno
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jzero import piecewise, seal, stored, together
from jzero.block_files import TierError
from jzero.checksums import checksums, total
from jzero.offload import at_rest
from jzero.pace import in_turn
from jzero.step import TrainState
from jzero.stored import CheckpointError, DamagedError, MismatchError
from jzero.writer import reason

_T = TypeVar("_T")

CHUNK_BYTES = 2**26  # of a file, read whole: a device that wants a part of it reads the rest, too
_IN_PASSING_BYTES = 2**30  # on a host, of arrays on their way from a file to a device
# What the machine lacks at the moment; the files may be as they were.
_NOT_THE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


def read(path: Path, abstract_state: TrainState) -> tuple[TrainState, str]:
    """The train state of a step, and a line if arrays came in another dtype than they were saved in, else "".

    Args:
        path: of the step.
        abstract_state: with the shardings to read into.

    Raises:
        DamagedError: the files are not as they were written.
        MismatchError: it is of another model or optimizer.
        CheckpointError: it cannot be read now.
    """
    sums = by_all(lambda: seal.read(path))
    held = by_all(lambda: _held(path / "state"), "state")
    wanted = stored.leaves(abstract_state)
    try:
        found = stored.sources(held, wanted)
    except MismatchError as error:
        raise MismatchError(f"{path}: {error}") from None
    on_host = {name: at_rest.in_pieces(x) for name, x in wanted.items() if at_rest.rests_on_host(x)}
    # Each stored array once, in the sharding of the first leaf that comes from it, and in the dtype that it has.
    first = {source: name for name, source in reversed(found.items()) if name not in on_host}
    targets = {
        source: jax.ShapeDtypeStruct(held[source].shape, held[source].dtype, sharding=wanted[name].sharding)
        for source, name in first.items()
    }
    arrays = by_all(lambda: _arrays(path / "state", targets), "state")
    for name, found_sum in jax.device_get(checksums(arrays)).items():
        _check_sum(name, int(found_sum), sums)
    leaves = {name: _as(arrays[source], wanted[name]) for name, source in found.items() if name not in on_host}
    del arrays
    leaves |= _pieces(path / "state", held, {name: (found[name], x) for name, x in on_host.items()}, sums)
    leaves |= {name: at_rest.as_wanted(leaves[name], wanted[name]) for name in on_host}
    changed = [name for name, source in found.items() if held[source].dtype != wanted[name].dtype]
    text = f"{len(changed)} leaves converted, such as {changed[0]!r}" if changed else ""
    return stored.restored(abstract_state, leaves), text


def about(path: Path) -> dict[str, Any]:
    """What was saved with the step at `path`.

    Raises:
        DamagedError: it cannot be read.
    """
    file = path / "about" / "metadata"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read ({reason(error)})") from error


def by_all(read: Callable[[], _T], what: str = "") -> _T:
    """What `read` returns, if it succeeds in every process.

    Args:
        what: is read, where the error does not say so.

    Raises:
        DamagedError: it does not, here or elsewhere, because of the files.
        CheckpointError: it does not, for want of memory, of file descriptors, or of permission.
    """
    result, fault, damage = None, "", True
    try:
        result = read()
    except Exception as error:  # noqa: BLE001 (of files that went bad, Orbax raises anything)
        fault, damage = reason(error) or type(error).__name__, not _is_of_the_machine(error)
    told = [json.loads(text) for text in together.gather_texts(json.dumps([fault, damage]))]
    faults = [
        (f"process {i} of {len(told)}: {text}" if i else text, damage) for i, (text, damage) in enumerate(told) if text
    ]
    if faults:
        (text, _), damaged = faults[0], all(damage for _, damage in faults)
        text = f"{what} cannot be read ({text})" if what else text
        raise DamagedError(text) if damaged else CheckpointError(text)
    return result  # pyright: ignore[reportReturnType] (without a fault it is what read returned)


def _is_of_the_machine(error: BaseException | None) -> bool:
    if error is None:
        return False
    if isinstance(error, MemoryError | TierError) or (isinstance(error, OSError) and error.errno in _NOT_THE_FILES):
        return True
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return True
    return _is_of_the_machine(error.__cause__)


def _held(path: Path) -> dict[str, Any]:
    """Name -> shape and dtype of the arrays that are stored."""
    # Orbax takes any path.
    tree = ocp.PyTreeCheckpointHandler().metadata(path).tree  # pyright: ignore[reportArgumentType]
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tree.items()}


def _arrays(path: Path, targets: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    args = ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue] (a dataclass made by a decorator)
        targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
    )
    largest = max((math.prod(x.shape) * x.dtype.itemsize for x in targets.values()), default=0)
    # A shard is read whole or not at all, and Orbax takes none that does not stay below the limit.
    limit = max(_IN_PASSING_BYTES, largest + CHUNK_BYTES)
    reader = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit / 1e9)  # pyright: ignore[reportArgumentType]
    return reader.restore(path, args=args)  # pyright: ignore[reportArgumentType]


def _pieces(
    path: Path, held: dict[str, Any], targets: dict[str, tuple[str, Any]], sums: Mapping[str, int]
) -> dict[str, Any]:
    """What rests on the host, checked."""
    if not targets:
        return {}
    pieces, mine = by_all(lambda: piecewise.restore(path, held, targets), "state")
    of_all = [json.loads(text) for text in together.gather_texts(json.dumps(mine))]
    for name, (source, _) in mine.items():
        _check_sum(source, total(found[name][1] for found in of_all), sums)
    return dict(pieces)


def _check_sum(name: str, found: int, sums: Mapping[str, int]) -> None:
    if found != sums.get(name):
        raise DamagedError(f"{name!r} is not what was saved")


def _as(x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype == target.dtype and x.sharding == target.sharding:
        return x
    return in_turn(jax.jit(lambda x: x.astype(target.dtype), out_shardings=target.sharding)(x))
