"""The directory of a run: it can be written, it belongs to one run, and one session at a time works in it."""

import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import jax
from filelock import FileLock, Timeout

from jzero import together
from jzero.checkpoint import Checkpoints
from jzero.config import Config, ConfigError, to_yaml
from jzero.directories import obstacle, write_whole

CHECKPOINTS = "checkpoints"
SEEN_WITHIN_S = 60.0  # network file systems may keep what a directory held for so long
_LOCK = ".lock"


@contextmanager
def session(config: Config) -> Iterator[tuple[Path, Config]]:
    """The directory of the run, made by one process and seen by all, and the config that names it.

    The name is absolute, so that config.yaml means this directory wherever it is used.  While the block runs, no other
    session starts there; a killed process lets go of it, too.

    Raises:
        ConfigError: it cannot be made, or another session is at work there.
        ProcessError: so it is in one of several processes, or one does not see what another writes.
    """
    run_dir = Path()
    with ExitStack() as stack:
        with together.agreed((ConfigError,)):
            if together.is_first():
                run_dir = make_run_dir(config.run.dir).absolute()
                stack.enter_context(locked(run_dir))
        if jax.process_count() > 1:
            run_dir = Path(together.broadcast_text(str(run_dir)))
            with together.agreed((ConfigError,)):
                check_seen(run_dir, SEEN_WITHIN_S)
        yield run_dir, config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})


def locked(run_dir: Path) -> AbstractContextManager[object]:
    """The lock of a directory, taken; the context lets go of it.

    Raises:
        ConfigError: another session has it.
    """
    try:
        return FileLock(run_dir / _LOCK).acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"run.dir = {run_dir}: another run is at work there; name another directory") from None


def check_seen(run_dir: Path, within_s: float) -> None:
    """Refuses a directory that another process has locked and that is not there for this one.

    Raises:
        ConfigError: it is not, `within_s` seconds later.
    """
    end = time.monotonic() + within_s
    while not (run_dir / _LOCK).exists():
        if time.monotonic() > end:
            raise ConfigError(
                f"run.dir = {run_dir}: process 0 has made it and it is not there on {platform.node()}; "
                f"name a directory that all hosts share"
            )
        time.sleep(0.2)


def check_run_dir(name: str | None, resume: str | int) -> None:
    """Refuses a directory that cannot take the run; writes nothing.

    Args:
        name: `run.dir`; None for a new one.
        resume: `checkpoint.resume`.

    Raises:
        ConfigError: it is not a directory, cannot be written, or has not what `resume` asks for.
    """
    path = Path(name or "runs").absolute()
    if reason := obstacle(path) or obstacle(path / CHECKPOINTS):
        raise ConfigError(f"run.dir = {name or path}: {reason}; name another directory")
    if path.name == CHECKPOINTS and (path.parent / "config.yaml").exists():
        raise ConfigError(f"run.dir = {name}: holds the checkpoints of a run; did you mean {path.parent}?")
    held = [f for f in ("config.yaml", "metrics.jsonl", CHECKPOINTS) if name and (path / f).exists()]
    if resume == "never" and held:
        raise ConfigError(
            f"run.dir = {name}: already holds a run ({', '.join(held)}), and checkpoint.resume = never; name a new "
            f"directory, or go on with checkpoint.resume = auto"
        )
    if resume in ("auto", "never"):
        return
    if name is None:
        raise ConfigError(f"checkpoint.resume = {resume}: run.dir says of which run, and is none")
    steps = Checkpoints(path / CHECKPOINTS).steps()
    if not steps:
        raise ConfigError(f"checkpoint.resume = {resume}: there is no complete checkpoint in {path / CHECKPOINTS}")
    if resume != "must" and resume not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(
            f"checkpoint.resume = {resume}: there is no such step in {path / CHECKPOINTS}; there are {there}"
        )


def make_run_dir(name: str | None) -> Path:
    """The directory of a new run, made; without a name it is runs/ and the time, and a number if that is taken.

    Raises:
        ConfigError: it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = [name] if name else [f"runs/{stamp}{suffix}" for suffix in ("", *(f"-{i}" for i in range(1, 100)))]
    for path in map(Path, names):
        try:
            path.mkdir(parents=True, exist_ok=name is not None)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run.dir = {path}: {error.strerror}") from None
    raise ConfigError(f"run.dir = {names[0]}: is taken, and so are {len(names) - 1} like it")


def write_config(run_dir: Path, config: Config) -> None:
    """Writes config.yaml, whole or not at all; it is that of the last session, and goes on from where that ends."""
    checkpoint = config.checkpoint.model_copy(update={"resume": "auto"})
    write_whole(run_dir / "config.yaml", to_yaml(config.model_copy(update={"checkpoint": checkpoint})).encode())
