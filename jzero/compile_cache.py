"""Compiled programs that survive the process: JAX's persistent compilation cache, switched on.

Compiling is most of a cold start; the second start of a run reads its programs from here.  JAX does the work and knows
when a program is another one.  What is decided here is where the programs lie, that all of them are kept (by default
only those that took a second), and that the directory stays bounded.  With a bound JAX takes a file lock round every
access, so runs that start at the same time may share the directory.
"""

from pathlib import Path
from typing import Any

import jax
import platformdirs

from jzero.directories import obstacle

AUTO = "auto"
MAX_BYTES = 10 * 2**30  # what was not used for longest goes first


class CacheError(ValueError):
    """A directory that cannot hold compiled programs; the message is one line for the user."""


def directory(setting: str | None) -> Path | None:
    """Where jzero keeps compiled programs; None if it keeps none itself.  Makes nothing.

    Args:
        setting: a directory; "auto" for the user's cache directory, unless JAX was given one of its own
            (JAX_COMPILATION_CACHE_DIR) and keeps them there; None for nowhere.

    Raises:
        CacheError: it is not a directory, or cannot be written.
    """
    if setting is None or not _of_jax("jax_enable_compilation_cache"):
        return None
    path = Path(platformdirs.user_cache_dir("jzero") if setting == AUTO else setting).absolute()
    if setting == AUTO and _of_jax("jax_compilation_cache_dir") not in (None, "", str(path)):
        return None
    if reason := obstacle(path):
        raise _error(setting, path, reason)
    return path


def use(setting: str | None) -> Path | None:
    """Makes `directory(setting)` and has JAX keep programs there; to be called before anything is compiled.

    The directory is its user's alone: who can write there can have this user's runs execute any code.

    Returns:
        The directory; None if jzero keeps no programs.

    Raises:
        CacheError: it cannot be made.
    """
    path = directory(setting)
    if path is None:
        if setting is None:
            jax.config.update("jax_enable_compilation_cache", False)
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _error(setting, path, error.strerror) from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    if _has_names(path):
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return path


def _has_names(path: Path) -> bool:
    """Whether user and group of `path` have names, which those of a container may lack.

    Before 0.12 JAX asks for them to bound a cache, and without them writes nothing.
    """
    try:
        return bool(path.owner() and path.group())
    except (KeyError, NotImplementedError):
        return False


def _of_jax(name: str) -> Any:
    return getattr(jax.config, name)  # attributes that JAX adds at run time


def _error(setting: str | None, path: Path, reason: object) -> CacheError:
    where = f"{setting} ({path})" if setting == AUTO else str(setting)
    return CacheError(f"run.cache_dir = {where}: {reason}; name another directory, or none")
