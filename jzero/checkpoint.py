"""Checkpoints of a run: written while training goes on, complete or absent, restored onto any mesh.

A step is a directory of `directory` that is named by its number, and holds

- `state/`: every array of the train state, by name (`stored.py`), written by Orbax, each shard by the process that has
  it;
- `about/`: what the caller wants to know again, as JSON;
- `seal.json`: size or digest of every file, and a checksum of every array that holds on any mesh (`checksums.py`).

Orbax writes into a directory beside it, and renames that when all is there.  So a step that has its name is whole, as
far as its writer saw; what happened to it since is found by its seal.  Older steps go when a newer one has its name.
"""

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from jzero import piecewise, reader, seal, step_dirs, stored, together
from jzero.checksums import checksums
from jzero.offload import at_rest
from jzero.pace import in_turn
from jzero.reader import CHUNK_BYTES
from jzero.run import check_alive
from jzero.step import TrainState
from jzero.stored import CheckpointError, DamagedError
from jzero.writer import WriteError, Writer, reason


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
        if keep is not None and not (_is_number(keep) and keep >= 1):
            raise ValueError(f"keep={keep!r} must be a whole number, at least 1; None keeps all")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._writer: Writer | None = None
        self._in_pieces = False  # what the writer takes
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
        return step_dirs.numbers(self.directory)

    def agreed_steps(self) -> list[int]:
        """`steps` as the first process sees them, in all: a network file system may show others what it held before."""
        return json.loads(together.broadcast_text(json.dumps(self.steps())))

    def about(self, step: int) -> dict[str, Any]:
        """What was saved with a step.

        Raises:
            DamagedError: it cannot be read.
        """
        return reader.about(self.directory / str(step))

    def save(self, step: int, state: TrainState, about: Mapping[str, Any] | None = None) -> None:
        """Begins to write a step and returns; the state may be used, and donated, at once.

        A state of which something rests outside of the device is written when this returns: it is read from where it
        rests, which the next step overwrites, and there is no room for another one.

        Waits for the step before, if that is not written yet.  Steps after the one that the run went back to are set
        aside.

        Args:
            step: its number, above that of the step restored or saved before.
            state: of any stage and mesh.
            about: what JSON can hold.

        Raises:
            ValueError: no number of a step, or a state that an earlier step has used up.
            CheckpointError: this save cannot begin, or the one before has failed, in this process or in another; or
                this one, where it waits.
            ProcessError: another process cannot begin.
        """
        _check_number(step)
        _check_state(state)
        check_alive(state)
        self.wait()
        beside = _jsonable(step, about or {})
        arrays = stored.leaves(state)
        with together.agreed():
            if together.is_first():
                self._make_room(step)
        away = [name for name, x in arrays.items() if at_rest.rests_on_host(x)]
        arrays |= {name: piecewise.Leaf(name, at_rest.in_pieces(arrays[name])) for name in away}
        if self._writer is None or self._in_pieces != bool(away):
            self._make_writer(in_pieces=bool(away))
        assert self._writer is not None
        self._writing = step, in_turn(checksums({name: x for name, x in arrays.items() if name not in away}))
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(  # pyright: ignore[reportCallIssue] (dataclasses made by a decorator)
                arrays, save_args={name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
            ),
            about=ocp.args.JsonSave(beside),  # pyright: ignore[reportCallIssue]
        )
        with self._failing():
            self._writer.save(self.directory / str(step), args)
        if away:
            self.wait()

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
                step_dirs.remove(self.directory / str(number))

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

        What is to rest outside of the device is brought there piece by piece; in files it takes the place of any other
        state of that run.

        Args:
            abstract_state: `run.abstract_state`, which says where everything rests.
            step: None for the newest that is whole.

        Raises:
            CheckpointError: there is no step, or no such step, or none that can be read; names each and its fault.
            MismatchError: it is of another model or optimizer; names the leaf, and both shapes.
        """
        _check_state(abstract_state)
        self.wait()
        steps = self.agreed_steps()
        if not steps:
            raise CheckpointError(f"there is no complete step in {self.directory}")
        if step is not None and (not _is_number(step) or step not in steps):
            raise CheckpointError(f"there is no step {step!r} in {self.directory}; there are {_listed(steps)}")
        damaged: list[str] = []
        for number in reversed(steps) if step is None else [step]:
            path = self.directory / str(number)
            try:
                state, converted = reader.read(path, abstract_state)
                about = reader.by_all(functools.partial(reader.about, path))
            except DamagedError as error:
                damaged.append(f"step {number} in {self.directory} is damaged: {error}")
                continue
            self._ours = number
            return Restored(number, state, about, tuple(damaged), converted)
        others = [number for number in steps if step is not None and number != step]
        hint = f"; also there: {_listed(others)}" if others else ""
        raise CheckpointError("; ".join(damaged) + hint)

    def set_aside_after(self, step: int) -> None:
        """Gives all later steps names under which nobody looks for them, such as `12.replaced`.

        Raises:
            CheckpointError: they cannot be renamed.
            ProcessError: so it is, of several processes, with the first.
        """
        with together.agreed():
            if together.is_first():
                with self._of_the_system():
                    step_dirs.set_aside_after(self.directory, step)

    def _make_room(self, step: int) -> None:
        """Room for a step: what a killed run left goes, what stands in the way of new steps moves.

        Raises:
            CheckpointError: the directory cannot be written, or holds steps that this run did not begin from.
        """
        steps = self.steps()
        if self._ours is None and steps:
            raise CheckpointError(
                f"{self.directory} holds {_listed(steps)} of another run: restore from there, or save elsewhere"
            )
        if self._ours is not None and step <= self._ours:
            raise CheckpointError(
                f"step {step} is not after step {self._ours} in {self.directory}, which this run began from or saved"
            )
        with self._of_the_system():
            step_dirs.check_writable(self.directory)
            if self._writer is None:
                for path in self.directory.glob(f"*{step_dirs.UNFINISHED}*"):
                    step_dirs.clear(path)
            step_dirs.set_aside_after(self.directory, -1 if self._ours is None else self._ours)

    @contextlib.contextmanager
    def _of_the_system(self) -> Iterator[None]:
        """Turns what the system refuses into a CheckpointError that names the directory."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.directory}: {reason(error)}") from error

    def _make_writer(self, *, in_pieces: bool) -> None:
        """A writer of states of which something is in pieces, or nothing; an earlier one has nothing left to do."""
        self._drop_writer()
        types = {"type_handler_registry": piecewise.registry()} if in_pieces else {}
        # Weights compress by a tenth, and compressing is slower than a disk.
        states = ocp.PyTreeCheckpointHandler(use_compression=False, **types)
        handler = ocp.CompositeCheckpointHandler(state=states, about=ocp.JsonCheckpointHandler())
        self._writer, self._in_pieces = Writer(handler, self._seal), in_pieces

    def _drop_writer(self) -> None:
        """Ends its threads; a next one finds whatever this one leaves."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # of a directory that went away while it wrote
                writer.close()

    def _seal(self) -> None:
        """Runs on process 0, in the writer's thread, when all have written and before the step has its name."""
        assert self._writing is not None
        step, sums = self._writing
        (unfinished,) = (
            path for path in self.directory.glob(f"{step}{step_dirs.UNFINISHED}*") if step_dirs.GONE not in path.name
        )
        of_arrays = {name: int(x) for name, x in jax.device_get(sums).items()}
        seal.write(unfinished, of_arrays | piecewise.written_sums(unfinished / "state"))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns what goes wrong in the writer into a CheckpointError, and frees the space of the step it failed at."""
        try:
            yield
        except WriteError as error:
            assert self._writing is not None
            (step, _), self._writing = self._writing, None
            self._drop_writer()  # before what it wrote: its threads make directories again
            if together.is_first():
                for path in self.directory.glob(f"{step}{step_dirs.UNFINISHED}*"):
                    with contextlib.suppress(OSError):
                        step_dirs.clear(path)
            steps = self.steps()
            newest = f"the newest complete one is {steps[-1]}" if steps else "there is no other"
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


def _jsonable(step: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read.

    Raises:
        CheckpointError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(dict(about)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"JSON cannot hold what is to be saved beside step {step} ({error})") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(step: object) -> None:
    if not _is_number(step) or int(str(step)) < 0:
        raise ValueError(f"step={step!r} must be a whole number, at least 0")


def _check_state(state: object) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"a {type(state).__name__} is no train state: pass what run.init() or run.step(...) returned, and "
            f"run.abstract_state to restore"
        )


def _listed(steps: list[int]) -> str:
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))
