"""What the command line asks a plan of: settings of a run, each with the devices it is for."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jzero
from jzero import mesh, targets, watch
from jzero.build import make_run
from jzero.config import Config, ConfigError, resolve
from jzero.models.flops import flops_per_token
from jzero.plan.estimate import Tokens
from jzero.plan.report import Plan, of

HERE, CPU = "here", "cpu"
_SWEPT = {"stage": "stages", "mesh": "meshes", "micro_batch": "micro_batches", "model.remat": "remats"}
_BFLOAT16 = (8, 0)  # the first compute capability that multiplies it


@dataclass(frozen=True)
class Setting:
    """One run to plan.

    Attributes:
        config: resolved.
        gpu: what it is for; None for devices that are here.
        notes: what was assumed to resolve it.
    """

    config: Config
    gpu: targets.Gpu | None
    notes: tuple[str, ...] = ()

    @property
    def devices_here(self) -> str | None:
        """What the devices that are here call themselves; None where the setting is for others."""
        return None if self.gpu else jax.devices()[0].device_kind


def devices_of(sizes: Mapping[str, int], given: int | None, here: int) -> int:
    """How many devices a mesh is for: its product, or what is given, or what is here where an axis is left open.

    Args:
        sizes: axes as written.
        given: by the user.
        here: where neither says.
    """
    if -1 in sizes.values() or not sizes:
        return given or here
    return given or math.prod(sizes.values())


def combinations(
    config: Config,
    stages: Sequence[int] = (),
    meshes: Sequence[str] = (),
    micro_batches: Sequence[int] = (),
    remats: Sequence[str] = (),
) -> list[Config]:
    """`config` with every combination of what is given; what is not given stays as it is.

    Raises:
        ConfigError: a key is given once for all and several times over.
    """
    for (key, flag), several in zip(_SWEPT.items(), (stages, meshes, micro_batches, remats), strict=True):
        section, _, name = key.rpartition(".")
        if several and name in (getattr(config, section) if section else config).model_fields_set:
            raise ConfigError(f"--{key} and --{flag} exclude each other: give one of them")
    axes = {"mesh": meshes, "remat": remats, "micro_batch": micro_batches, "stage": stages}
    named = {key: values for key, values in axes.items() if values}
    return [_changed(config, dict(zip(named, values, strict=True))) for values in itertools.product(*named.values())]


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    remat = changes.pop("remat", config.model.remat)
    return config.model_copy(update={**changes, "model": config.model.model_copy(update={"remat": remat})})


def setting_of(config: Config, gpu: targets.Gpu | None, devices: int | None = None) -> Setting:
    """`config` resolved for its target.

    A batch that is not named is one microbatch of one row for every data-parallel device.

    Raises:
        ConfigError: settings that do not fit each other or the devices.
    """
    count = device_count(config, gpu, devices)
    if gpu:
        targets.check(gpu, count)
        _check_network(gpu, count)
    per_host = gpu.devices_per_host if gpu else count
    try:
        full = mesh.sizes_on(mesh.parse(config.mesh), count)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    notes: tuple[str, ...] = ()
    if "batch_size" not in config.model_fields_set:
        each = config.micro_batch or 1
        rows = each * full[mesh.NODE] * full[mesh.DP]
        config = config.model_copy(update={"batch_size": rows})
        notes = (f"batch_size is not named: {rows} sequences, one microbatch of {each} for every data-parallel device",)
    hosts = [str(i // per_host) for i in range(count)]
    resolved = resolve(config, count, "cuda" if gpu else jax.default_backend(), hosts)
    if gpu and gpu.capability < _BFLOAT16 and resolved.precision.params == "bfloat16":
        raise ConfigError(
            f"precision.params = bfloat16: {gpu.name} has no bfloat16 (compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]}); take --precision.params float32 or a newer GPU"
        )
    return Setting(resolved, gpu, notes)


def _check_network(gpu: targets.Gpu, count: int) -> None:
    if count > gpu.devices_per_host and not gpu.nic_gb_per_s:
        base = next((name for name, known in targets.GPUS.items() if known.name == gpu.name), gpu.name)
        raise targets.TargetError(
            f"target {base}: {count} devices stand in several hosts, and it has no network card: say how fast one is, "
            f"--target {base}:nic_gb_per_s=12.5, or take up to {gpu.devices_per_host} devices"
        )


def device_count(config: Config, gpu: targets.Gpu | None, devices: int | None = None) -> int:
    """How many devices a config is planned for.

    Raises:
        ConfigError: more than are here, where it is for those.
    """
    here = gpu.devices_per_host if gpu else jax.device_count()
    try:
        count = devices_of(mesh.parse(config.mesh), devices, here)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if gpu is None and count > jax.device_count():
        raise ConfigError(f"mesh = {config.mesh}: needs {count} devices, and here are {jax.device_count()}")
    return count


def plan_of(setting: Setting) -> Plan:
    """Compiles the setting's step and reads it.

    Raises:
        ConfigError: settings that the model refuses.
        TargetError: the devices cannot be described, or nothing is there to compile for them with.
    """
    config, gpu = setting.config, setting.gpu
    count = math.prod(mesh.parse(config.mesh).values())
    devices: Sequence[Any] = list(targets.gpu_devices(gpu, count)) if gpu else jax.devices()[:count]
    run = make_run(config, jzero.make_mesh(config.mesh, devices))
    label = {"stage": str(config.stage), "remat": config.model.remat, "micro_batch": str(config.micro_batch)}
    label |= {} if config.zero.regather else {"gathered": "kept"}
    sizes, seq_len = config.model.decoder(config.precision.params), config.data.seq_len
    tokens = Tokens(seq_len, flops_per_token(sizes, seq_len))
    plan = of(run, gpu, tokens=tokens, capacity_bytes=None if gpu else watch.memory_limit(), label=label)
    return dataclasses.replace(plan, notes=(*plan.notes, *setting.notes))
