"""The directory of a run: it is new, it can be written, and it belongs to one run alone."""

import time
from pathlib import Path

from jzero.config import ConfigError
from jzero.directories import obstacle


def check_run_dir(name: str | None) -> None:
    """Refuses a directory that cannot take a new run; writes nothing.

    Raises:
        ConfigError: it holds a run, is not a directory, or cannot be written.
    """
    path = Path(name or "runs").absolute()
    if reason := obstacle(path):
        raise ConfigError(f"run.dir = {name or path}: {reason}; name another directory")
    held = [f for f in ("config.yaml", "metrics.jsonl", "checkpoints") if name and (path / f).exists()]
    if held:
        raise ConfigError(f"run.dir = {name}: already holds a run ({', '.join(held)}); name a new directory")


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


def claim(run_dir: Path, resolved: str) -> None:
    """Writes config.yaml, which makes the directory this run's and nobody else's.

    Raises:
        ConfigError: another run was quicker.
    """
    try:
        with (run_dir / "config.yaml").open("x", encoding="utf-8") as file:
            file.write(resolved)
    except FileExistsError:
        raise ConfigError(f"run.dir = {run_dir}: another run has just started there; name a new directory") from None
