"""Trains the built-in decoder on text or tokens: `python -m jzero.train`.

Read `train` top-down: settings, devices, data, run, loop.  Everything it does is a call to the library, in the order in
which a program of your own would make the calls; `build.py` has those that take the config apart.

Exit status: 0, the run reached its last step; 1, it failed; 2, the input was wrong and nothing was written; 143 and
130, SIGTERM and SIGINT (Ctrl-C) ended it.
"""

import math
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jzero
from jzero import compile_cache, data, distributed, together, watch
from jzero.build import check_memory, make_batches, make_run, open_data
from jzero.checkpoint import quiet
from jzero.config import Config, ConfigError, load, profile_steps, resolve, values_of
from jzero.description import describe
from jzero.journal import Journal, RunError, Waiting
from jzero.models.flops import flops_per_token
from jzero.resume import Saves, begin, sequences
from jzero.run_dir import CHECKPOINTS, check_run_dir, session, write_config
from jzero.stop import Interrupted, Stop

FAKE_DEVICES = 8  # of all processes
IN_FLIGHT = 2  # steps dispatched beyond the one whose metrics are read
BAD_INPUT = (ConfigError, data.DataError, compile_cache.CacheError)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as `argv` says and returns the exit status."""
    quiet()
    try:
        with Stop() as stop:
            return _status(sys.argv[1:] if argv is None else argv, stop)
    except Interrupted as interrupted:
        print(f"{distributed.name()}: {interrupted}" if distributed.started() else interrupted, file=sys.stderr)
        if distributed.started():
            distributed.leave(interrupted.status)
        return interrupted.status


def _status(argv: Sequence[str], stop: Stop) -> int:
    try:
        return train(load(argv), stop)
    except BAD_INPUT as error:
        return _failed(error, 2)
    except together.ProcessError as error:  # all processes have it
        return _say(error, 2 if error.bad_input else 1)
    except RunError as error:  # so it is with what they all computed
        return _say(error, 1)
    except distributed.StartError as error:
        return _failed(error, 2 if error.bad_input else 1, named=False)
    except (jzero.CheckpointError, OSError) as error:  # OSError: a full disk, data that is gone
        return _failed(error, 1)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not distributed.lost_peer(error):
            raise
        return _failed(f"another process is gone, see what it said last ({str(error).splitlines()[0]})", 1)


def _say(error: object, status: int) -> int:
    """What all processes have to say, said by the first."""
    if together.is_first():
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _failed(error: object, status: int, *, named: bool = True) -> int:
    """What this process alone has to say, under its name; if it has peers, it leaves them."""
    me = f"{distributed.name()}: " if named and distributed.started() else ""
    print(f"error: {me}{' '.join(str(error).split())}\n", end="", file=sys.stderr)  # one write: JAX may print meanwhile
    if distributed.started():
        distributed.leave(status)
    return status


def train(config: Config, stop: Stop) -> int:
    """One run, from its settings to its last evaluation.

    Returns:
        The exit status: 0, or 128 + number of the signal that ended it before its last step.

    Raises:
        ConfigError: a setting that cannot be honoured; nothing is written.
        DataError: data that cannot be trained on; nothing is written.
        CacheError: compiled programs cannot be kept where they should; nothing is written.
        StartError: the processes did not come together; nothing is written.
        ProcessError: one of several processes had one of these; nothing is written.
        RunError: too many steps in a row had a non-finite gradient, or the run ended without a finite loss.
        CheckpointError: one could not be written.
        Interrupted: a signal came while data was tokenized.
    """
    # Processes and devices.
    start_cpu_devices(distributed.start(**config.distributed.model_dump()))
    devices, hosts = together.devices_by_host()

    # Settings, data and the run: three specs per parameter, one compiled step.  Nothing is written yet, and what one
    # process cannot do ends all of them.
    with together.agreed(BAD_INPUT):
        config = resolve(config, len(devices), jax.default_backend(), hosts)
        check_run_dir(config.run.dir, config.checkpoint.resume)
        compile_cache.directory(config.run.cache_dir)
        with stop.unwinding():
            parts = open_data(config)
        run = make_run(config, jzero.make_mesh(config.mesh, devices))
        check_memory(run)
    together.same_everywhere({"jax": jax.__version__, **dict(values_of(config)), "data": sequences(parts)})

    # From here on the run leaves traces.
    with session(config) as (run_dir, config):
        journal, ended_by = train_in(run_dir, config, run, parts, stop)
    journal.say(journal.summary())
    if ended_by:
        journal.say(farewell(ended_by, journal.progress.step, run_dir, config))
        return 128 + ended_by
    journal.check()
    return 0


def farewell(ended_by: int, step: int, run_dir: Path, config: Config) -> str:
    """What a run says that a signal has ended: where, and how it goes on."""
    where = f"stopped by {signal.Signals(ended_by).name} after step {step} of {config.steps}"
    if config.checkpoint.every is None:
        return f"{where}; nothing is saved (checkpoint.every = none)"
    return f"{where}, which is saved; to go on: python -m jzero.train --config {run_dir / 'config.yaml'}"


def train_in(
    run_dir: Path, config: Config, run: jzero.Run, parts: Sequence[data.Part], stop: Stop
) -> tuple[Journal, int]:
    """A session of a run in its directory, from the state that it begins from to its last checkpoint.

    Returns:
        What was written of it, closed, and the number of the signal that ended it, 0 for none.
    """
    kept = compile_cache.use(config.run.cache_dir)
    speed = watch.utilization(flops_per_token(config.model.decoder(config.precision.params), config.data.seq_len))
    traced = profile_steps(config) if together.is_first() else None
    with jzero.Checkpoints(run_dir / CHECKPOINTS, config.checkpoint.keep) as checkpoints:
        with together.agreed(BAD_INPUT):
            beginning = begin(config, run, parts, checkpoints)
        start = beginning.progress
        batches, evals = make_batches(config, run.mesh, parts, start.step, start.samples)  # each process its own rows
        if together.is_first():
            write_config(run_dir, config)
            print("\n".join([*describe(config, run), *data.describe(parts, evals), *beginning.lines]))
            print(f"files: {run_dir}" + (f"; compiled programs: {kept}" if kept else ""), flush=True)
        with (
            Journal(run_dir / "metrics.jsonl", config, speed, start, writes=together.is_first()) as journal,
            watch.Trace(traced, run_dir / "profile", journal.say, journal.aside) as trace,
        ):
            saves = Saves(config, start, parts, checkpoints)
            averages, agreed = config.optim.ema is not None, together.Flag(IN_FLIGHT).ask
            loop = Loop(run, batches, evals, journal, trace, saves, stop, averages, agreed)
            _, ended_by = fit(loop, beginning.state)
    return journal, ended_by


@dataclass(frozen=True)
class Loop:
    """What the loop works with, beside the state.

    Attributes:
        run: the compiled step.
        batches: of the steps that are left.
        evals: batches of an evaluation.
        journal: knows how far the run has come.
        trace: of the steps to profile.
        saves: the checkpoints.
        stop: whether a signal asks this process to end.
        averages: whether the run keeps an average of its weights, which is evaluated too.
        agreed: given whether this process is asked to end, says whether all processes end.
    """

    run: jzero.Run
    batches: Iterable[data.Batch]
    evals: Iterable[data.Batch]
    journal: Journal
    trace: watch.Trace
    saves: Saves
    stop: Stop
    averages: bool = False
    agreed: Callable[[bool], bool] = bool

    def ends(self) -> bool:
        """Whether all processes end after this step; True once, True from then on."""
        return self.agreed(self.stop.asked is not None)


def fit(loop: Loop, state: jzero.TrainState) -> tuple[jzero.TrainState, int]:
    """The loop: dispatches steps, and reads the metrics of a step when later ones are on their way.

    Returns:
        The state after the last step, and the number of the signal that ended the loop, 0 for none.
    """
    run, journal, waiting = loop.run, loop.journal, Waiting(IN_FLIGHT)
    step = journal.progress.step
    if journal.evaluation_is_due(step):
        take_evaluation(loop, state)
    loop.trace.dispatched(step, None)
    for step, batch in enumerate(loop.batches, start=journal.progress.step + 1):
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, metrics = run.step(state, run.put(batch))
        loop.stop.hold()  # what comes from here on finds a state that is worth keeping
        loop.trace.dispatched(step, metrics)
        waiting.put(step, metrics)
        journal.trained(waiting.ready())
        if loop.saves.due(step):
            journal.trained(waiting.rest())  # first: the next session begins with the lines after this step
            loop.saves.save(step, state)
        if journal.evaluation_is_due(step):
            journal.trained(waiting.rest())
            take_evaluation(loop, state)
        if loop.ends():
            journal.trained(waiting.rest())
            loop.saves.save(step, state)
            return state, loop.stop.asked or signal.SIGTERM  # the second: another process was asked
    return state, 0


def take_evaluation(loop: Loop, state: jzero.TrainState) -> None:
    """Tells the journal the held-out loss of the weights and, if the run keeps one, of their average.

    A run that is asked to end does not stay for it; the session that goes on from here takes it.
    """
    states = [state, loop.run.averaged(state)] if loop.averages else [state]
    with loop.journal.aside():
        results = [evaluate(loop.run, each, loop.evals, loop.ends) for each in states]
    if None not in results:
        loop.journal.evaluated(*filter(None, results))


def evaluate(
    run: jzero.Run,
    state: jzero.TrainState,
    evals: Iterable[data.Batch],
    ends: Callable[[], bool] = lambda: False,
) -> tuple[float, float] | None:
    """(loss per token in nats, number of tokens) over all batches: the sum of losses over the sum of weights.

    Args:
        ends: asked before every batch; the answer True ends the evaluation, without a result.
    """
    waiting, losses, weights = deque[Any](), [0.0], [0.0]

    def read() -> None:
        result = waiting.popleft()
        weights.append(float(result["weight"]))
        losses.append(float(result["loss"]) * weights[-1])

    for batch in evals:
        if ends():
            return None
        waiting.append(run.evaluate(state, run.put(batch)))
        if len(waiting) > IN_FLIGHT:  # a long evaluation does not wait in device memory
            read()
    while waiting:
        read()
    tokens = math.fsum(weights)
    return (math.fsum(losses) / tokens if tokens else math.nan), tokens


def start_cpu_devices(processes: int = 1) -> None:
    """Eight CPU devices for machines without an accelerator, unless XLA_FLAGS already says how many.

    Has no effect on accelerators, nor once JAX has started its backends.

    Args:
        processes: among which they are divided, so that a run in several processes is the run that one would be.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    count = max(1, FAKE_DEVICES // (processes or FAKE_DEVICES))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return
    if jax.default_backend() == "cpu" and together.is_first():
        total = f"{jax.process_count()} x {count}" if jax.process_count() > 1 else str(count)
        print(
            f"no accelerator: {total} fake CPU devices "
            "(another number: XLA_FLAGS=--xla_force_host_platform_device_count=N)"
        )


if __name__ == "__main__":
    sys.exit(main())
