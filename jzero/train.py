"""Trains the built-in decoder on text or tokens: `python -m jzero.train`.

Read `train` top-down: settings, devices, data, run, loop.  Everything it does is a call to the library, in the order in
which a program of your own would make the calls; `build.py` has those that take the config apart.

Exit status: 0, the run reached its last step; 1, it failed, and would again; 2, the input was wrong and nothing was
written; 75, another process or a device was lost, and another start may go on; 143 and 130, SIGTERM and SIGINT (Ctrl-C)
ended it.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax

import jzero
from jzero import compile_cache, data, distributed, ending, host_memory, together, watch
from jzero.build import check_disks, check_memory, make_batches, make_run, open_data
from jzero.checkpoint import quiet
from jzero.config import Config, ConfigError, load, profile_steps, resolve, values_of
from jzero.description import describe
from jzero.journal import Journal, RunError
from jzero.loop import IN_FLIGHT, Loop, fit
from jzero.models.flops import flops_per_token
from jzero.plan.auto import settled
from jzero.resume import Saves, begin, fingerprints, telling_what_is_left
from jzero.run_dir import CHECKPOINTS, check_run_dir, session, write_config
from jzero.stop import Interrupted, Stop

BAD_INPUT = (ConfigError, data.DataError, compile_cache.CacheError)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as `argv` says and returns the exit status."""
    quiet()
    try:
        with Stop() as stop:
            return _status(sys.argv[1:] if argv is None else argv, stop)
    except Interrupted as interrupted:
        return ending.ended(interrupted, interrupted.status)


def _status(argv: Sequence[str], stop: Stop) -> int:
    try:
        return train(load(argv), stop)
    except BAD_INPUT as error:
        return ending.failed(error, 2)
    except together.ProcessError as error:  # all processes have it
        return ending.all_failed(error, 2 if error.bad_input else 1)
    except RunError as error:  # so it is with what they all computed
        return ending.all_failed(error, 1)
    except distributed.StartError as error:
        return ending.failed(error, 2 if error.bad_input else ending.LOST)
    except (jzero.CheckpointError, jzero.TierError, OSError) as error:  # OSError: a full disk, data that is gone
        everywhere = isinstance(error, jzero.CheckpointError) and error.everywhere
        return ending.all_failed(error, 1) if everywhere else ending.failed(error, 1)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        if distributed.lost_peer(error):
            return ending.failed(f"another process is gone, see what it said last ({first_line})", ending.LOST)
        if not distributed.lost_device(error):
            raise
        traceback.print_exc()
        return ending.failed(f"a device or XLA has failed ({first_line})", ending.LOST)


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
        TierError: optimizer state that rests in files is lost.
        Interrupted: a signal came while data was tokenized.
    """
    # Processes and devices.
    host_memory.raise_limit(os.environ, host_memory.machine_bytes())
    distributed.start_cpu_devices(distributed.start(**config.distributed.model_dump()))
    devices, hosts = together.devices_by_host()

    # Settings, data and the run: three specs per parameter, one compiled step.  Nothing is written yet, and what one
    # process cannot do ends all of them.
    with together.agreed(BAD_INPUT):
        config, choice = settled(config, devices, hosts)
        config = resolve(config, len(devices), jax.default_backend(), hosts)
        check_run_dir(config.run.dir, config.checkpoint.resume)
        compile_cache.directory(config.run.cache_dir)
        with stop.unwinding():
            parts = open_data(config)
        run = make_run(config, jzero.make_mesh(config.mesh, devices))
        check_memory(run)
        check_disks(config, run)
    if choice and together.is_first():
        print("\n".join(["stage = auto:", *(f"  {line}" for line in choice)]))
    sources = fingerprints(parts)
    together.same_everywhere({"jax": jax.__version__, **dict(values_of(config)), "data": sources})

    # From here on the run leaves traces.
    with contextlib.closing(run), session(config) as (run_dir, config):
        journal, ended_by = train_in(run_dir, config, run, parts, sources, stop)
    journal.say(journal.summary())
    if ended_by:
        journal.say(farewell(ended_by, journal.progress.step, run_dir, config))
        return 128 + ended_by
    with telling_what_is_left(jzero.Checkpoints(run_dir / CHECKPOINTS)):
        journal.check()
    return 0


def farewell(ended_by: int, step: int, run_dir: Path, config: Config) -> str:
    """What a run says that a signal has ended: where, and how it goes on."""
    where = f"stopped by {signal.Signals(ended_by).name} after step {step} of {config.steps}"
    if config.checkpoint.every is None:
        return f"{where}; nothing is saved (checkpoint.every = none)"
    if jax.process_count() > 1:
        return f"{where}, which is saved; to go on, start all {jax.process_count()} processes again"
    command = f"python -m jzero.train --config {run_dir / 'config.yaml'}"
    return f"{where}, which is saved; to go on: {command} (on other devices with --mesh dp=-1)"


def train_in(
    run_dir: Path, config: Config, run: jzero.Run, parts: Sequence[data.Part], sources: Sequence[str], stop: Stop
) -> tuple[Journal, int]:
    """A session of a run in its directory, from the state that it begins from to its last checkpoint.

    Returns:
        What was written of it, closed, and the number of the signal that ended it, 0 for none.
    """
    kept = compile_cache.use(config.run.cache_dir)
    speed = watch.utilization(flops_per_token(config.model.decoder(config.precision.params), config.data.seq_len))
    traced = profile_steps(config) if together.is_first() else None
    with jzero.Checkpoints(run_dir / CHECKPOINTS, config.checkpoint.keep) as checkpoints:
        beginning = begin(config, run, sources, checkpoints)
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
            saves = Saves(config, start.step, sources, checkpoints)
            averages, agreed = config.optim.ema is not None, together.Flag(IN_FLIGHT).ask
            loop = Loop(run, batches, evals, journal, trace, saves, stop, averages, agreed)
            with telling_what_is_left(checkpoints):
                _, ended_by = fit(loop, beginning.state)
    return journal, ended_by


if __name__ == "__main__":
    status = main()
    if status:  # a thread that waits for what does not come would keep the process
        ending.leave(status)
