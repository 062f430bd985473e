"""What a run begins from, a fresh state or a checkpoint of its own directory, and what it saves for the next session.

A run goes on exactly: same weights, optimizer state, random keys and counters, and the next sample of the stream.  So
what the samples and the state belong to must be as it was: model, data, seed.  What does not change the numbers may
change without a word (devices, stage, mesh, microbatches), and what does change them on purpose is said (learning
rate, batch size, precision, number of steps).
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic

import jzero
from jzero import data, together
from jzero.config import Config, profile_steps, show
from jzero.journal import Progress, RunError
from jzero.stored import CheckpointError, MismatchError

# Keys, and sections with a dot behind them.
_CHANGES_NOTHING = (
    *("stage", "mesh", "micro_batch", "zero.", "comm.", "offload.", "log.", "checkpoint.", "run.", "distributed."),
    *("data.prefetch", "data.eval_batches", "model.preset", "model.remat", "model.attention"),
)
_IS_SAID = ("model.dropout", "data.path", "data.glob", "data.tokenizer")  # fingerprints guard the data
_BELONGS = ("seed", "model.", "data.")
_LOOKED_AT = 64  # sequences of a source, for its fingerprint


@dataclass(frozen=True)
class Beginning:
    """What a session begins from.

    Attributes:
        state: the train state.
        progress: how far the run has come.
        lines: what a user should know of it.
    """

    state: jzero.TrainState
    progress: Progress
    lines: tuple[str, ...] = ()


def begin(config: Config, run: jzero.Run, sources: Sequence[str], checkpoints: jzero.Checkpoints) -> Beginning:
    """The newest checkpoint that is whole, or the one that is asked for; a fresh state where there is none.

    Args:
        config: resolved.
        run: what the state is for.
        sources: `fingerprints` of the config's data.
        checkpoints: of the run directory.

    Raises:
        ProcessError: in all processes: there is no such step, none can be read, or it is of another model or other
            data.
    """
    steps, asked = checkpoints.agreed_steps(), config.checkpoint.resume
    if not steps:
        return Beginning(run.init(), Progress(), ("begins at step 0",))
    try:
        found = checkpoints.restore(run.abstract_state, asked if isinstance(asked, int) else None)
        about = _About.read(found)
    except MismatchError as error:
        hint = _model_changes(checkpoints, asked if isinstance(asked, int) else steps[-1], config)
        raise _refused(f"checkpoint.resume = {asked}: {error}{hint}; start another run with run.dir") from error
    except CheckpointError as error:
        raise _refused(f"checkpoint.resume = {asked}: {error}") from error
    where = f"step {found.step} in {checkpoints.directory}"
    changes = _changes(about, config, sources, where)
    if found.step > config.steps:
        raise _refused(
            f"steps = {config.steps} is less than {where}, which this run would go on from; give more steps, "
            f"go back with checkpoint.resume, or start another run with run.dir"
        )
    later = [step for step in steps if step > found.step]
    if later and isinstance(asked, int):
        checkpoints.set_aside_after(found.step)  # at once: the metrics go back, too
    lines = (
        *(f"warning: {line}" for line in found.damaged),
        f"goes on from {where}: {about.samples:,} sequences trained on",
        *([f"set aside, as N.replaced in {checkpoints.directory}: {', '.join(map(str, later))}"] if later else []),
        *changes,
        *([found.converted] if found.converted else []),
        *_past_profile(config, found.step),
    )
    return Beginning(found.state, Progress(found.step, about.samples, int(found.state.skipped)), lines)


def _refused(message: str) -> together.ProcessError:
    """All processes have read the same, so all refuse it."""
    return together.ProcessError(message, bad_input=True)


class Saves:
    """The checkpoints that a session takes."""

    def __init__(self, config: Config, newest: int, sources: Sequence[str], checkpoints: jzero.Checkpoints) -> None:
        """Takes none yet.

        Args:
            config: resolved.
            newest: the step that the session begins from.
            sources: `fingerprints` of the config's data.
            checkpoints: where to.
        """
        self._config, self._newest = config, newest
        self._data, self._checkpoints = list(sources), checkpoints

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved."""
        every = self._config.checkpoint.every
        return every is not None and (step % every == 0 or step == self._config.steps)

    def save(self, progress: Progress, state: jzero.TrainState) -> None:
        """Begins to save the state of a run that has come so far, unless that is done already, or nothing is saved.

        Raises:
            CheckpointError: it cannot, or the save before has failed.
        """
        if self._config.checkpoint.every is not None and progress.step > self._newest:
            about = _About(progress.samples, self._data, self._config.model_dump(mode="json"))
            self._checkpoints.save(progress.step, state, vars(about))
            self._newest = progress.step


@contextmanager
def telling_what_is_left(checkpoints: jzero.Checkpoints) -> Iterator[None]:
    """Adds to a RunError what the next session would begin from, and how it begins before what went wrong.

    The counters of skipped steps are part of a state: a session that begins among steps that went wrong soon ends, too.

    Raises:
        RunError: it was raised inside.
    """
    try:
        yield
    except RunError as error:
        checkpoints.wait()  # all processes are here, and none is gone
        raise RunError(f"{error}; {_left(checkpoints.steps(), error.good)}", error.good) from None


def _left(steps: Sequence[int], good: int) -> str:
    if not steps:
        return "nothing is saved, and the next session begins anew"
    if steps[-1] <= good:
        return f"the next session goes on from step {steps[-1]}"
    before = [step for step in steps if step <= good]
    earlier = f"go back with --checkpoint.resume {before[-1]}" if before else "no earlier one is kept"
    return f"the next session would go on from step {steps[-1]}, which is after the last good one, {good}: {earlier}"


@dataclass(frozen=True)
class _About:
    """What is saved beside the state.

    Attributes:
        samples: of the training stream, that the state was trained on.
        data: fingerprint of each source.
        config: resolved, as JSON has it.
    """

    samples: pydantic.NonNegativeInt
    data: list[str]
    config: dict[str, Any]

    @classmethod
    def read(cls, found: jzero.Restored) -> "_About":
        try:
            return pydantic.TypeAdapter(cls).validate_python(found.about)
        except pydantic.ValidationError:
            raise CheckpointError(f"step {found.step} was not saved by jzero.train") from None


def fingerprints(parts: Sequence[data.Part]) -> list[str]:
    """Of each source: how many training sequences it has, and a digest of 64 of them, evenly spread."""
    return [f"{len(part.train):,} training sequences, digest {_digest(part.train)}" for part in parts]


def _digest(samples: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for index in np.unique(np.linspace(0, len(samples) - 1, _LOOKED_AT).astype(int)) if len(samples) else ():
        digest.update(samples[int(index)]["tokens"].tobytes())
    return digest.hexdigest()


def _changes(about: _About, config: Config, now: Sequence[str], where: str) -> list[str]:
    """A line for every setting that changes what is learnt from here on.

    Raises:
        ProcessError: one has changed that the state or the order of samples belongs to.
    """
    lines: list[str] = []
    for key, change in _differences(about.config, config).items():
        if _is_among(key, _CHANGES_NOTHING):
            continue
        if _is_among(key, _BELONGS) and key not in _IS_SAID:
            raise _refused(
                f"{change} at {where}: a run goes on with the same model, data and seed; set it back, or start "
                f"another run with run.dir"
            )
        lines.append(f"changed: {change}")
    if about.data != list(now):
        own = " (the standard library is that of the Python that runs)" if config.data.path is None else ""
        raise _refused(
            f"data.path: {' + '.join(now)}, and was {' + '.join(about.data)} at {where}{own}: a run goes on with the "
            f"same data; bring it back, or start another run with run.dir"
        )
    return lines


def _model_changes(checkpoints: jzero.Checkpoints, step: int, config: Config) -> str:
    """The settings of a model or optimizer that make it another one than a step was saved with, in words."""
    try:
        changes = _differences(dict(checkpoints.about(step).get("config", {})), config)
    except (CheckpointError, TypeError, ValueError):
        return ""
    own = [change for key, change in changes.items() if _is_among(key, ("model.", "optim.name"))]
    return f" ({'; '.join(own)})" if own else ""


def _differences(old: dict[str, Any], config: Config) -> dict[str, str]:
    """Key -> "KEY = value, and was VALUE", of all settings that are not as in `old`, a config as JSON has it."""
    before, now = _flat(old), _flat(config.model_dump(mode="json"))
    return {
        key: f"{key} = {show(value)}, and was {show(before.get(key))}"
        for key, value in now.items()
        if before.get(key) != value
    }


def _past_profile(config: Config, step: int) -> list[str]:
    profile = profile_steps(config)
    if profile is None or profile[0] > step:
        return []
    return [f"no profiler trace: log.profile = {config.log.profile} begins before the first step of this session"]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _is_among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)
