"""All settings of a run, what must fit among them, and what must fit the devices."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from jzero import distributed, mesh, placement, recipes
from jzero.config.errors import ConfigError
from jzero.config.sections import (
    Checkpoint,
    Comm,
    Count,
    Data,
    Distributed,
    Log,
    Model,
    Offload,
    Optim,
    Precision,
    Run,
    Section,
    Zero,
)

_OF_ONE_PROCESS = {
    "coordinator": distributed.AUTO,
    "processes": None,
    "process": None,
    "local_devices": distributed.AUTO,
}
_MIXTURE_TOLERANCE = 1e-6  # thirds are written with a few digits


class Config(Section):
    """All settings of a run."""

    stage: Literal[0, 1, 2, 3, "auto"] = Field(
        3,
        description="ZeRO: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too; auto: the cheapest "
        "setting of stage, micro_batch, zero.regather and model.remat that fits the devices",
    )
    mesh: str = Field("dp=-1", description="axis sizes such as node=2,dp=4,tp=2; -1 is what is left")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of parameters, dropout and data order")
    steps: Count = Field(600, description="optimizer steps")
    batch_size: Count = Field(16, description="sequences per optimizer step, over the whole mesh")
    micro_batch: int | None = Field(
        None, ge=1, description="sequences per data-parallel device and microbatch; none: no accumulation"
    )
    model: Model = Field(default_factory=Model.defaults)
    data: Data = Field(default_factory=Data.defaults)
    optim: Optim = Field(default_factory=Optim.defaults)
    precision: Precision = Field(default_factory=Precision.defaults)
    zero: Zero = Field(default_factory=Zero.defaults)
    comm: Comm = Field(default_factory=Comm.defaults)
    offload: Offload = Field(default_factory=Offload.defaults)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.defaults)
    distributed: Distributed = Field(default_factory=Distributed.defaults)
    log: Log = Field(default_factory=Log.defaults)
    run: Run = Field(default_factory=Run.defaults)

    @pydantic.field_validator("stage", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        """To Python, true is 1."""
        if isinstance(value, bool):
            raise ValueError(f"stage = {str(value).lower()}: must be one of 0, 1, 2, 3, auto")
        return value

    @property
    def chosen_stage(self) -> int:
        """The stage, which is no longer `auto`.

        Raises:
            ConfigError: it is.
        """
        if self.stage == "auto":
            raise ConfigError("stage = auto: is for jzero.train and jzero.plan, which choose one")
        return self.stage

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> Self:
        model, sizes = self.model, mesh.parse(self.mesh)
        model.decoder("float32" if self.precision.params == "float32" else "bfloat16")
        if model.learned_positions and self.data.seq_len > model.learned_positions:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len} is more than model.learned_positions = {model.learned_positions}"
            )
        _check_tensor_parallel(model, sizes.get(mesh.TP, 1))
        _check_optimizer(self.optim)
        if self.optim.warmup_steps is not None and self.optim.warmup_steps > self.steps:
            raise ValueError(f"optim.warmup_steps = {self.optim.warmup_steps} is more than steps = {self.steps}")
        if len(set(self.zero.axes)) != len(self.zero.axes):
            raise ValueError(f"zero.axes = {','.join(self.zero.axes)} names an axis twice")
        profile_steps(self)
        _check_mixture(self.data)
        _check_distributed(self.distributed)
        placement.Offload(**self.offload.model_dump())
        return self


def profile_steps(config: Config) -> tuple[int, int] | None:
    """(first, last) step of the profiler trace that `config` asks for.

    Raises:
        ValueError: `log.profile` does not name steps of the run.
    """
    text = config.log.profile
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    if not found:
        raise ValueError(f"log.profile = {text}: must be the first and the last step, such as 10-13, or none")
    first, last = int(found[1]), int(found[2])
    if not 1 <= first <= last <= config.steps:
        raise ValueError(f"log.profile = {text}: must be steps of the run, which go from 1 to steps = {config.steps}")
    return first, last


def resolve(config: Config, device_count: int, platform: str, hosts: Sequence[str] = ()) -> Config:
    """`config` with nothing left open: mesh sizes, microbatch, number format and optimizer settings are of this run.

    Which of several processes this is says nothing about the run, and is forgotten.

    Args:
        config: as loaded.
        device_count: devices of all processes.
        platform: `jax.default_backend()`.
        hosts: of each device, in the order in which they fill the mesh; empty: all are of one host.

    Raises:
        ConfigError: the mesh does not make `device_count` devices, `tp` does not divide the heads or lies across hosts,
            or the batch is not a multiple of `micro_batch` times the data-parallel size.
    """
    try:
        sizes = mesh.sizes_on(mesh.parse(config.mesh), device_count)
        mesh.check_tp_inside_hosts(mesh.parse(config.mesh), sizes, hosts)
        _check_tensor_parallel(config.model, sizes[mesh.TP])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_comm(config.comm, platform)
    data_parallel = sizes[mesh.NODE] * sizes[mesh.DP]
    micro_batch = config.micro_batch or max(1, config.batch_size // data_parallel)
    if config.batch_size % (micro_batch * data_parallel):
        raise ConfigError(
            f"batch_size = {config.batch_size} must be a multiple of micro_batch x data-parallel devices = "
            f"{micro_batch} x {data_parallel} = {micro_batch * data_parallel}"
        )
    open_params, open_warmup = config.precision.params == "auto", config.optim.warmup_steps is None
    params = ("float32" if platform == "cpu" else "bfloat16") if open_params else config.precision.params
    if config.model.attention == "cudnn" and platform not in ("gpu", "cuda"):
        raise ConfigError(f"model.attention = cudnn: runs on NVIDIA GPUs, not on {platform}")
    warmup_steps = config.steps // 20 if open_warmup else config.optim.warmup_steps
    optim = {"lr": recipes.RECIPES[config.optim.name].lr} if config.optim.lr is None else {}
    optim |= {"warmup_steps": warmup_steps, **config.optim.settings()}
    return config.model_copy(
        update={
            "mesh": ",".join(f"{axis}={size}" for axis, size in sizes.items()),
            "micro_batch": micro_batch,
            "precision": config.precision.model_copy(update={"params": params}),
            "optim": config.optim.model_copy(update=optim),
            "distributed": config.distributed.model_copy(update=_OF_ONE_PROCESS),
        }
    )


def _check_comm(comm: Comm, platform: str) -> None:
    for key in ("reduce_bucket_bytes", "gather_bucket_bytes"):
        if getattr(comm, key) is not None and platform not in ("gpu", "cuda"):
            raise ConfigError(f"comm.{key} = {getattr(comm, key)}: is for GPUs, on {platform} there is no such size")


def _check_mixture(data: Data) -> None:
    weights = [source.weight for source in data.mixture]
    if data.mixture and data.path is not None:
        raise ValueError(f"data.path = {data.path} and data.mixture exclude each other: give one of them")
    if data.mixture and abs(math.fsum(weights) - 1) > _MIXTURE_TOLERANCE:
        shown = " + ".join(map(str, weights))
        raise ValueError(f"data.mixture: the weights {shown} sum to {math.fsum(weights):g}; they must sum to 1")


def _check_distributed(settings: Distributed) -> None:
    if settings.coordinator not in (None, distributed.AUTO):
        distributed.check_address(settings.coordinator)
    distributed.device_numbers(settings.local_devices)
    for key in ("processes", "process"):
        if settings.coordinator is None and getattr(settings, key) is not None:
            value = getattr(settings, key)
            raise ValueError(f"distributed.{key} = {value}: distributed.coordinator = none, so there is one process")
    distributed.check_index(settings.process, settings.processes)


def _check_optimizer(optim: Optim) -> None:
    """Refuses what the chosen optimizer and schedule would not look at."""
    try:
        optim.settings()
    except ValueError as error:
        raise ValueError(f"optim.{error}") from None
    for key in ("plateau_factor", "plateau_window"):
        if optim.plateau_patience is None and getattr(optim, key) != Optim.model_fields[key].default:
            raise ValueError(f"optim.{key} = {getattr(optim, key)} needs optim.plateau_patience, which is none")
    unread = optim.schedule == "constant" and optim.plateau_patience is None
    if unread and optim.min_lr_ratio != Optim.model_fields["min_lr_ratio"].default:
        raise ValueError(f"optim.min_lr_ratio = {optim.min_lr_ratio}: optim.schedule = constant does not go there")


def _divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        raise ValueError(f"{small_key} = {small} must divide {large_key} = {large}")


def _check_tensor_parallel(model: Model, tp: int) -> None:
    for key in ("heads", "kv_heads", "mlp_width"):
        if tp > 1:
            _divides("mesh axis tp", tp, f"model.{key}", getattr(model, key))
