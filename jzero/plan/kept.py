"""Plans that were made before, kept on disk by all that goes into them."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import platformdirs
import pydantic

from jzero import compile_cache
from jzero.directories import obstacle, write_whole
from jzero.plan.report import Plan
from jzero.plan.settings import Setting

_PLAN = pydantic.TypeAdapter(Plan)
# What a plan of a step does not depend on.
_ELSE: dict[str, Any] = dict.fromkeys(("seed", "steps", "data", "checkpoint", "distributed", "log", "run"), True)
_ELSE["optim"] = {"lr", "warmup_steps", "min_lr_ratio"}
_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "flax", "optax", "numpy")


class Kept:
    """A directory of plans, each under a digest of settings, target, versions and jzero's own code."""

    def __init__(self, directory: Path | None) -> None:
        """Makes nothing.

        Args:
            directory: None keeps them as long as this object lives.
        """
        self._directory, self._here = directory, dict[str, Plan]()

    def get(self, setting: Setting) -> Plan | None:
        """The plan of a setting, if it is there and can be read."""
        name = digest(setting)
        if name in self._here or self._directory is None:
            return self._here.get(name)
        try:
            return _PLAN.validate_json((self._directory / f"{name}.json").read_bytes())
        except (OSError, ValueError):  # not there, damaged, or of somebody else: made anew
            return None

    def put(self, setting: Setting, plan: Plan) -> None:
        """Keeps a plan.

        Raises:
            OSError: it cannot be written.
        """
        name = digest(setting)
        self._here[name] = plan
        if self._directory:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._directory / f"{name}.json", _PLAN.dump_json(plan))


def directory(cache_dir: str | None) -> Path | None:
    """Where plans are kept for the setting `run.cache_dir`.

    Raises:
        CacheError: they cannot be.
    """
    if cache_dir is None:
        return None
    automatic = cache_dir == compile_cache.AUTO
    path = Path(platformdirs.user_cache_dir("jzero") if automatic else cache_dir).absolute() / "plans"
    if reason := obstacle(path):
        raise compile_cache.CacheError(f"run.cache_dir = {cache_dir} ({path}): {reason}; name another, or none")
    return path


def digest(setting: Setting) -> str:
    """Of everything that a plan follows from."""
    config = setting.config.model_dump(mode="json", exclude=_ELSE)
    config["data"] = {"seq_len": setting.config.data.seq_len, "packing": setting.config.data.packing}
    gpu = setting.gpu and dataclasses.asdict(setting.gpu)
    text = json.dumps([config, gpu, setting.devices_here, _software()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _software() -> str:
    """Digest of jzero's sources and of the versions of what compiles them."""
    found = hashlib.sha256(sys.version.encode())
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode() + path.read_bytes())
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        found.update(f"{name} {version}".encode())
    return found.hexdigest()
