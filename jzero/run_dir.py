"""The directory of a run: it is new, it can be written, and it belongs to one run alone."""

import platform
import time
from pathlib import Path

import jax

from jzero import together
from jzero.config import Config, ConfigError, to_yaml
from jzero.directories import obstacle

SEEN_WITHIN_S = 60.0  # network file systems may keep what a directory held for so long


def start_run_dir(config: Config) -> tuple[Path, Config]:
    """The directory of a new run, made and claimed by one process and seen by all, and the config that names it.

    Raises:
        ConfigError: it cannot be made, or another run was quicker.
        ProcessError: so it is in one of several processes, or one does not see what another writes.
    """
    named = config
    with together.agreed((ConfigError,)):
        if together.is_first():
            named = _named(config, make_run_dir(config.run.dir))
            claim(Path(str(named.run.dir)), to_yaml(named))
    if jax.process_count() > 1:
        named = _named(config, Path(together.broadcast_text(str(Path(str(named.run.dir)).absolute()))))
        with together.agreed((ConfigError,)):
            check_seen(Path(str(named.run.dir)), SEEN_WITHIN_S)
    return Path(str(named.run.dir)), named


def _named(config: Config, path: Path) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path)})})


def check_seen(run_dir: Path, within_s: float) -> None:
    """Whether a directory that another process has claimed is there for this one, too.

    Raises:
        ConfigError: it is not, `within_s` seconds later.
    """
    end = time.monotonic() + within_s
    while not (run_dir / "config.yaml").exists():
        if time.monotonic() > end:
            raise ConfigError(
                f"run.dir = {run_dir}: process 0 has made it and it is not there on {platform.node()}; "
                f"name a directory that all hosts share"
            )
        time.sleep(0.2)


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
