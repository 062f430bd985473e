"""What a resolved config describes, as the library's own objects: data, batches, run, optimizer.

Everything here is a call to the library with the config's values, as a program of your own would make it.
"""

import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib
from flax import nnx

import jzero
from jzero import data, host_memory, watch
from jzero import mesh as meshes
from jzero.config import Config, ConfigError, Data
from jzero.description import size
from jzero.models.decoder import Decoder, next_token_loss
from jzero.offload.separable import SeparationError
from jzero.zero import ShardingError


def open_data(config: Config) -> list[data.Part]:
    """The training and the held-out part of every source that a config names.

    Raises:
        DataError: data that cannot be trained on.
    """
    return data.open_parts(
        _sources(config.data),
        vocab=config.model.vocab,
        tokenizer=config.data.tokenizer,
        eos=config.data.eos,
        seq_len=config.data.seq_len,
        eval_fraction=config.data.eval_fraction,
        packing=config.data.packing,
    )


def make_batches(
    config: Config,
    mesh: jax.sharding.Mesh,
    parts: Sequence[data.Part],
    start_step: int = 0,
    first_sample: int = 0,
) -> tuple[Iterator[data.Batch], data.EvalBatches]:
    """(batches of the steps that are left, batches to evaluate), of each this process's own rows.

    Args:
        config: resolved.
        mesh: whose devices say which rows those are.
        parts: of the config's sources, in their order.
        start_step, first_sample: how many steps are done, and how many samples of the stream they were trained on.

    Raises:
        DataError: the weights of a mixture do not sum to 1.
    """
    reading = {"rows": meshes.process_rows(mesh, config.batch_size), "prefetch": config.data.prefetch}
    samples = data.all_training(parts, [source.weight for source in _sources(config.data)])
    left = max(0, config.steps - start_step)
    batches = data.batches(samples, config.batch_size, seed=config.seed, first=first_sample, count=left, **reading)
    evals = data.EvalBatches(data.all_held_out(parts), config.batch_size, config.data.eval_batches, **reading)
    return batches, evals


def make_run(config: Config, mesh: jax.sharding.Mesh) -> jzero.Run:
    """The ZeRO run that a resolved config describes; no array is made.

    Raises:
        ConfigError: a pattern that matches no parameter, or `zero.axes` of one device.
    """
    precision, dtype = config.precision, config.precision.params
    # Made in float32 whatever the precision, so that the masters are not rounded; `setup` brings them to rest.
    sizes = config.model.decoder(dtype, config.comm.layers_ahead)
    try:
        return jzero.setup(
            lambda: Decoder(sizes, rngs=nnx.Rngs(config.seed)),
            next_token_loss,
            functools.partial(make_optimizer, config),
            mesh,
            data.shapes(config.batch_size, config.data.seq_len, config.data.packing),
            stage=config.chosen_stage,
            micro_batches=config.batch_size // ((config.micro_batch or 1) * meshes.data_size(mesh)),
            clip_norm=config.optim.clip_norm,
            precision=jzero.Precision(params=dtype, grads=precision.grads, reduce=precision.reduce),
            zero=jzero.Zero(**config.zero.model_dump()),
            comm=jzero.Comm(**config.comm.model_dump(exclude={"layers_ahead"})),
            offload=jzero.Offload(**config.offload.model_dump()),
        )
    except (ShardingError, SeparationError, host_memory.HostMemoryError) as error:
        raise ConfigError(str(error)) from error


def check_memory(run: jzero.Run) -> None:
    """Refuses a run of which not even the state fits; activations and what is gathered come on top.

    Raises:
        ConfigError: names what a device needs and what it has.
    """
    needed, limit = sum(run.at_rest_bytes().values()) + run.grads_bytes(), watch.memory_limit()
    if limit is not None and needed > limit:
        raise ConfigError(
            f"a run takes {size(needed)} of each of {jax.device_count()} devices, which have {size(limit)}, "
            f"for state and gradients alone: take a higher stage, more devices, a smaller model or offload.optimizer "
            f"= host"
        )
    on_host = sum(tiers.get("host", 0) for tiers in run.tier_bytes().values()) + run.host_grads_bytes()
    try:
        host_memory.check_machine(on_host * jax.local_device_count(), host_memory.machine_bytes())
    except host_memory.HostMemoryError as error:
        raise ConfigError(str(error)) from error


def check_disks(config: Config, run: jzero.Run) -> None:
    """Refuses a run whose optimizer state and parameters have no room in `offload.dir`.

    Raises:
        ConfigError: names the directories, and the bytes that are needed and free.
    """
    directories = config.offload.dir
    for directory in map(Path, directories):
        _check_place(directory.absolute())
    disks = [_existing(Path(directory)) for directory in directories]
    for directory, disk in zip(directories, disks, strict=True):
        sharing = sum(other.stat().st_dev == disk.stat().st_dev for other in disks)
        needed, free = sharing * run.file_bytes // len(disks), shutil.disk_usage(disk).free
        if needed > free:
            raise ConfigError(
                f"offload.dir = {directory}: what rests in files takes {size(needed)} of that disk, which has "
                f"{size(free)} free; name another disk, or more of them, or raise offload.host_bytes"
            )


def _check_place(directory: Path) -> None:
    at = f"offload.dir = {directory}"
    if not directory.parent.is_dir():
        raise ConfigError(f"{at}: {directory.parent} is not there; make it, or mount the disk")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{at} is no directory; name another place")
    if not os.access(_existing(directory), os.W_OK):
        raise ConfigError(f"{at} cannot be written; name a directory that can be")


def _existing(path: Path) -> Path:
    """The directory, or the one in which it will be made."""
    return path if path.exists() else path.absolute().parent


def make_optimizer(config: Config, per_layer: Any) -> optax.GradientTransformation:
    """The optimizer that a resolved config describes.

    Args:
        per_layer: the parameters as layers read them.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    optim = config.optim
    schedule = jzero.make_schedule(
        optim.schedule, optim.lr or 0.0, optim.warmup_steps or 0, config.steps, optim.min_lr_ratio
    )
    plateau = optim.plateau_patience and optax.contrib.reduce_on_plateau(
        optim.plateau_factor,
        optim.plateau_patience,
        accumulation_size=optim.plateau_window,
        min_scale=optim.min_lr_ratio,
    )
    try:
        tx = jzero.make_optimizer(optim.name, schedule, per_layer, plateau=plateau or None, **optim.settings())
    except ValueError as error:
        raise ConfigError(f"optim.{error}") from None
    return tx if optim.ema is None else jzero.averaged(tx, optim.ema)


def _sources(settings: Data) -> list[data.Source]:
    common: dict[str, Any] = {key: getattr(settings, key) for key in ("glob", "format", "text_key", "dtype")}
    if not settings.mixture:
        return [data.Source(path=settings.path, **common)]
    own = [source.model_dump(exclude_none=True) for source in settings.mixture]
    return [data.Source(**(common | keys), key="data.mixture") for keys in own]
