"""Checkpoints of a run: written while training goes on, complete or absent, restored onto any mesh.

A step is a directory of `directory` that is named by its number, and holds

- `state/`: every array of the train state, by name (`stored.py`), written by Orbax, each shard by the process that has
  it;
- `about/`: what the caller wants to know again, as JSON;
- `seal.json`: the size of every file, and a checksum of every array that holds on any mesh (`checksums.py`).

Orbax writes into a directory beside it, and renames that when all is there.  So a step that has its name is whole, as
far as its writer saw; what happened to it since is found by its seal.  Older steps go when a newer one has its name.
"""

import contextlib
import functools
import itertools
import json
import logging
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import orbax.checkpoint as ocp

from jzero import seal, stored, together
from jzero.checksums import checksums
from jzero.step import TrainState
from jzero.stored import MismatchError
from jzero.writer import WriteError, Writer, reason

_T = TypeVar("_T")

_UNFINISHED = ".orbax-checkpoint-tmp"  # in the names that Orbax writes under
_GONE = f"{_UNFINISHED}-removed"  # so that what is left of a step is cleaned up with the rest
_CLEARINGS = 20  # tries, a tenth of a second apart
_IN_PASSING_BYTES = 2**30  # on a host, of arrays on their way from a file to a device
_CHUNK_BYTES = (
    2**26
)  # of a file, read whole: a device that wants less of it than another has written reads the rest, too


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or read; the message is one line for the user.

    Attributes:
        everywhere: whether all processes have the same error.
    """

    everywhere = False


class DamagedError(CheckpointError):
    """A step whose files are not as they were written."""


@dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found.

    Attributes:
        step: its number.
        state: the train state, in the shardings that were asked for.
        about: what was saved with it.
        damaged: a line for every newer step that cannot be read.
        converted: a line if arrays came in another dtype than they were saved in, else "".
    """

    step: int
    state: TrainState
    about: dict[str, Any]
    damaged: tuple[str, ...] = ()
    converted: str = ""


class Checkpoints:
    """The steps in one directory, which all processes see, and which one run writes to at a time.

    Args:
        directory: made at the first save.
        keep: so many of the newest steps stay, None for all.  The oldest goes when the next save begins, so that while
            one is being written there is always another.

    Raises:
        ValueError: `keep` is not a positive number.
    """

    def __init__(self, directory: str | Path, keep: int | None = 2) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep!r} must be at least 1; None keeps all")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._writer: Writer | None = None
        self._writing: tuple[int, dict[str, jax.Array]] | None = None
        self._ours: int | None = None  # the newest step that this run began from or has written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        elif jax.process_count() == 1:  # of several, one may be gone, and the others would wait for it
            with contextlib.suppress(CheckpointError):  # there is a worse error on its way
                self.close()

    def steps(self) -> list[int]:
        """Numbers of the complete steps, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._named_as_steps() if path.is_dir())

    def agreed_steps(self) -> list[int]:
        """`steps` as the first process sees them, in all: a network file system may show others what it held before."""
        return json.loads(together.broadcast_text(json.dumps(self.steps())))

    def _named_as_steps(self) -> list[Path]:
        return [path for path in self.directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name)]

    def about(self, step: int) -> dict[str, Any]:
        """What was saved with a step.

        Raises:
            DamagedError: it cannot be read.
        """
        path = self.directory / str(step) / "about" / "metadata"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise DamagedError(f"{path} cannot be read ({reason(error)})") from error

    def save(self, step: int, state: TrainState, about: Mapping[str, Any] | None = None) -> None:
        """Begins to write a step and returns; the state may be used, and donated, at once.

        Waits for the step before, if that is not written yet.

        Args:
            step: its number.
            state: of any stage and mesh.
            about: what JSON can hold.

        Raises:
            CheckpointError: this save cannot begin, or the one before has failed, in this process or in another.
            ProcessError: another process cannot begin.
        """
        self.wait()
        beside = _jsonable(step, about or {})
        arrays = stored.leaves(state)
        target = self.directory / str(step)
        with together.agreed():
            if self._writer is None:
                self._writer = self._open_for_writing()
            # The others may see what the first has just set aside.
            if together.is_first() and target.exists():
                raise CheckpointError(
                    f"step {step} is in {self.directory} already: restore from there, or save elsewhere"
                )
        self._writing = step, checksums(arrays)
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(  # pyright: ignore[reportCallIssue] (dataclasses made by a decorator)
                arrays, save_args={name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
            ),
            about=ocp.args.JsonSave(beside),  # pyright: ignore[reportCallIssue]
        )
        with self._failing():
            self._writer.save(target, args)

    def wait(self) -> None:
        """Waits until the step that is being written is complete, and removes the steps that are no longer kept.

        Raises:
            CheckpointError: it cannot be written, by one process at least; the steps before are as they were.
        """
        if self._writing is None or self._writer is None:
            return
        with self._failing():
            self._writer.wait()
        self._ours, self._writing = self._writing[0], None
        if together.is_first() and self._keep is not None:
            for number in self.steps()[: -self._keep]:
                _remove(self.directory / str(number))

    def close(self) -> None:
        """`wait`, and ends the threads that write.

        Raises:
            CheckpointError: the last step cannot be written.
        """
        try:
            self.wait()
        finally:
            self._drop_writer()

    def restore(self, abstract_state: TrainState, step: int | None = None) -> Restored:
        """Reads a step straight into the shardings of `abstract_state`, whatever mesh and stage it was saved on.

        What is saved next replaces the steps after this one: they are set aside under another name.

        Args:
            abstract_state: `run.abstract_state`.
            step: None for the newest that is whole.

        Raises:
            CheckpointError: there is no step, or no such step, or none that can be read; names each and its fault.
            MismatchError: it is of another model or optimizer; names the leaf, and both shapes.
        """
        steps = self.agreed_steps()
        if not steps:
            raise CheckpointError(f"there is no complete step in {self.directory}")
        if step is not None and step not in steps:
            raise CheckpointError(f"there is no step {step} in {self.directory}; there are {_listed(steps)}")
        damaged: list[str] = []
        for number in reversed(steps) if step is None else [step]:
            try:
                state, converted = self._read(number, abstract_state)
                about = _by_all(lambda number=number: self.about(number))
            except DamagedError as error:
                damaged.append(f"step {number} in {self.directory} is damaged: {error}")
                continue
            self._ours = number
            return Restored(number, state, about, tuple(damaged), converted)
        others = [number for number in steps if step is not None and number != step]
        hint = f"; there are also {_listed(others)}" if others else ""
        raise CheckpointError("; ".join(damaged) + hint)

    def _read(self, step: int, abstract_state: TrainState) -> tuple[TrainState, str]:
        path = self.directory / str(step)
        sums = _by_all(lambda: seal.read(path))
        held = _by_all(lambda: _held(path / "state"), "state")
        wanted = stored.leaves(abstract_state)
        try:
            found = stored.sources(held, wanted)
        except MismatchError as error:
            raise MismatchError(f"step {step} in {self.directory}: {error}") from None
        # Each stored array once, in the sharding of the first leaf that comes from it, and in the dtype that it has.
        first = {source: name for name, source in reversed(found.items())}
        targets = {
            source: jax.ShapeDtypeStruct(held[source].shape, held[source].dtype, sharding=wanted[name].sharding)
            for source, name in first.items()
        }
        arrays = _by_all(lambda: _arrays(path / "state", targets), "state")
        for name, found_sum in jax.device_get(checksums(arrays)).items():
            if int(found_sum) != sums.get(name):
                raise DamagedError(f"{name!r} is not what was saved")
        leaves = {name: _as(arrays[source], wanted[name]) for name, source in found.items()}
        changed = [name for name, source in found.items() if held[source].dtype != wanted[name].dtype]
        text = f"{len(changed)} leaves converted, such as {changed[0]!r}" if changed else ""
        return stored.restored(abstract_state, leaves), text

    def _open_for_writing(self) -> Writer:
        """A writer, and room for its steps: what a killed run left goes, what stands in the way of new steps moves.

        Raises:
            CheckpointError: the directory cannot be made, or holds steps that this run did not begin from.
        """
        later = [number for number in self.agreed_steps() if self._ours is None or number > self._ours]
        if self._ours is None and later:
            raise CheckpointError(
                f"{self.directory} holds {_listed(later)} of another run: restore from there, or save elsewhere"
            )
        if together.is_first():
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                for path in self.directory.glob(f"*{_UNFINISHED}*"):
                    _clear(path)
                for path in self._named_as_steps():
                    if int(path.name) in later or not path.is_dir():
                        _set_aside(path)
            except OSError as error:
                raise CheckpointError(f"{error.filename}: {error.strerror}") from error
        handler = ocp.CompositeCheckpointHandler(
            # Weights compress by a tenth, and compressing is slower than a disk.
            state=ocp.PyTreeCheckpointHandler(use_compression=False),
            about=ocp.JsonCheckpointHandler(),
        )
        return Writer(handler, self._seal)

    def _drop_writer(self) -> None:
        """Ends its threads; a next one finds whatever this one leaves."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _seal(self) -> None:
        """Runs on process 0, in the writer's thread, when all have written and before the step has its name."""
        assert self._writing is not None
        step, sums = self._writing
        (unfinished,) = (path for path in self.directory.glob(f"{step}{_UNFINISHED}*") if _GONE not in path.name)
        seal.write(unfinished, {name: int(x) for name, x in jax.device_get(sums).items()})

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns what goes wrong in the writer into a CheckpointError, and frees the space of the step it failed at."""
        try:
            yield
        except WriteError as error:
            assert self._writing is not None
            (step, _), self._writing = self._writing, None
            if together.is_first():
                for path in self.directory.glob(f"{step}{_UNFINISHED}*"):
                    with contextlib.suppress(OSError):
                        _clear(path)
            self._drop_writer()
            newest = f"the newest complete one is {self.steps()[-1]}" if self.steps() else "there is no other"
            failed = CheckpointError(f"step {step} could not be written to {self.directory} ({error}); {newest}")
            failed.everywhere = True
            raise failed from error


@functools.cache
def quiet() -> None:
    """Keeps off the terminal what Orbax and its threads print of an error, which is raised as a CheckpointError anyway.

    For programs, not for libraries: it silences the loggers of absl and asyncio, and one message of
    `sys.unraisablehook`.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    earlier = sys.unraisablehook

    def hook(unraisable: Any) -> None:  # sys.UnraisableHookArgs is a name for type checkers alone
        # Of writes that end after another one has failed.
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            earlier(unraisable)

    sys.unraisablehook = hook


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
    limit = max(_IN_PASSING_BYTES, largest + _CHUNK_BYTES)
    reader = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit / 1e9)  # pyright: ignore[reportArgumentType]
    return reader.restore(path, args=args)  # pyright: ignore[reportArgumentType]


def _as(x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype == target.dtype and x.sharding == target.sharding:
        return x
    return jax.jit(lambda x: x.astype(target.dtype), out_shardings=target.sharding)(x)


def _by_all(read: Callable[[], _T], what: str = "") -> _T:
    """What `read` returns, if it succeeds in every process.

    Args:
        what: is read, where the error does not say so.

    Raises:
        DamagedError: it does not, here or elsewhere.
    """
    try:
        result, fault = read(), ""
    except Exception as error:  # noqa: BLE001 (of files that went bad, Orbax raises anything)
        result, fault = None, reason(error)
    faults = [f"{text} (process {i})" if i else text for i, text in enumerate(together.gather_texts(fault)) if text]
    if faults:
        raise DamagedError(f"{what} cannot be read ({faults[0]})" if what else faults[0])
    return result  # pyright: ignore[reportReturnType] (without a fault it is what read returned)


def _jsonable(step: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read.

    Raises:
        CheckpointError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(dict(about)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"JSON cannot hold what is to be saved beside step {step} ({error})") from None


def _set_aside(path: Path) -> None:
    """Gives a step another name, under which nobody looks for it: `12.replaced`, or `12.replaced-2` if there is one."""
    names = (f"{path.name}.replaced{suffix}" for suffix in itertools.chain([""], (f"-{i}" for i in itertools.count(2))))
    path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))


def _remove(path: Path) -> None:
    """Removes a step; a kill in between leaves no step that is half there."""
    gone = path.with_name(f"{path.name}{_GONE}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _clear(path: Path) -> None:
    """Removes an unfinished step, into which writes may still go that end after another one has failed.

    Raises:
        OSError: it cannot be removed.
    """
    for _ in range(_CLEARINGS):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.1)
    shutil.rmtree(path)


def _listed(steps: list[int]) -> str:
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))
