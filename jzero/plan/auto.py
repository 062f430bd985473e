"""`--stage auto`: the cheapest setting that fits, with the largest microbatch that fits.

Settings are tried in the order of what they cost in time.  Stages 0 and 1 send once per step, stage 2 once per
microbatch, stage 3 three times per microbatch, or twice if it keeps what it has gathered; then rematerialisation takes
up to a third more arithmetic.  For a mesh of one data-parallel device there is nothing to shard, and stage 0 is all
there is.  Last comes what PCIe slows down: the optimizer's state in host memory, then the parameters there, too; only
where `offload` is left at its defaults, and as far as the machine is known to have the memory.  A step of a setting is
compiled for its microbatch of one row first; what does not fit then is rejected, with the bytes that were missing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jzero
from jzero import host_memory, watch
from jzero import mesh as meshes
from jzero.build import make_run
from jzero.config import Config, ConfigError, resolve
from jzero.plan.fit import remedies
from jzero.plan.report import MARGIN, Plan, of

_REMAT = ("none", "dots", "full")
_DOUBT = 0.05  # of the peak: what a peak may be off the line through two others
_OPEN_ROWS = (1, 2, 3, 4, 5, 6, 7, *(n * 2**k for k in range(1, 6) for n in (4, 5, 6, 7)), 256)  # where none is named


@dataclass(frozen=True)
class Choice:
    """What `choose` has found.

    Attributes:
        config: with stage, microbatch, `zero.regather`, `model.remat` and `offload` as chosen.
        plan: of that.
        lines: what was rejected, and for how many bytes, and what was taken.
    """

    config: Config
    plan: Plan
    lines: tuple[str, ...]


def choose(
    config: Config,
    device_count: int,
    plan_of: Callable[[Config], Plan],
    margin: float = MARGIN,
    host_bytes: int | None = None,
) -> Choice:
    """The cheapest setting of `config` that fits.

    Args:
        config: whose stage is `auto`; a `micro_batch` that is given stays.
        device_count: devices of the mesh.
        plan_of: of a setting with its stage and microbatch named; called as often as it takes.
        margin: part of a device's memory that is to stay free.
        host_bytes: memory of a machine; None where nobody tells.

    Raises:
        ConfigError: nothing fits; says by how much, and what would.
    """
    sizes = meshes.sizes_on(meshes.parse(config.mesh), device_count)
    data_parallel = sizes[meshes.NODE] * sizes[meshes.DP]
    rows = rows_that_divide(config, data_parallel)

    def sized(kind: Config, count: int) -> Config:
        open_batch = {} if "batch_size" in config.model_fields_set else {"batch_size": count * data_parallel}
        return kind.model_copy(update={"micro_batch": count, **open_batch})

    lines: list[str] = []
    plan: Plan | None = None
    for kind in ladder(config, data_parallel):
        try:
            plan = plan_of(sized(kind, rows[0]))
        except ConfigError as error:
            if kind.offload == config.offload:
                raise
            lines.append(f"{name_of(kind)}: {error}")
            continue
        capacity = plan.capacity_bytes
        if capacity is None:
            raise ConfigError("stage = auto: nobody tells how much memory a device has; name a stage, or a --target")
        if (missing := plan.missing_bytes(margin)) > 0:
            lines.append(f"{name_of(kind)}: {missing / 1e9:,.2f} GB missing at a microbatch of {rows[0]}")
            continue
        if host_bytes is not None and plan.memory.host_bytes_per_machine > host_bytes:
            lacking = plan.memory.host_bytes_per_machine - host_bytes
            lines.append(f"{name_of(kind)}: {lacking / 1e9:,.2f} GB of host memory missing")
            continue
        count, plan = _largest(lambda n, kind=kind: plan_of(sized(kind, n)), rows, plan, margin)
        lines.append(
            f"{name_of(kind)}, micro_batch {count}: fits, {plan.memory.peak_bytes / 1e9:,.2f} of "
            f"{capacity / 1e9:,.2f} GB, {margin:.0%} to stay free"
        )
        return Choice(sized(kind, count), plan, tuple(lines))
    assert plan is not None  # the ladder is never empty
    raise ConfigError(f"stage = auto: nothing fits ({'; '.join(lines)}); {remedies(plan, margin)}")


def settled(config: Config, devices: Sequence[Any], hosts: Sequence[str]) -> tuple[Config, tuple[str, ...]]:
    """A config for devices that are here with nothing left to `auto`, and what there is to say of the choice.

    The batch stays what it is, so that training is what it was meant to be; it may be taken in more microbatches.

    Raises:
        ConfigError: nothing fits.
    """
    if config.stage != "auto":
        return config, ()
    limit = watch.memory_limit()

    def plan_of(one: Config) -> Plan:
        one = resolve(one, len(devices), jax.default_backend(), hosts)
        return of(make_run(one, jzero.make_mesh(one.mesh, devices)), capacity_bytes=limit)

    choice = choose(
        config.model_copy(update={"batch_size": config.batch_size}),
        len(devices),
        plan_of,
        host_bytes=host_memory.machine_bytes(),
    )
    return choice.config, choice.lines


def ladder(config: Config, data_parallel: int) -> Iterator[Config]:
    """Settings in the order of what a step of them costs.

    Args:
        data_parallel: devices that a batch is split over.
    """

    def kind(stage: int, *, regather: bool = True, remat: Any = config.model.remat) -> Config:
        zero, model = (
            config.zero.model_copy(update={"regather": regather}),
            config.model.model_copy(update={"remat": remat}),
        )
        return config.model_copy(update={"stage": stage, "zero": zero, "model": model})

    more = _REMAT[_REMAT.index(config.model.remat) + 1 :]
    if data_parallel == 1:
        kinds = [kind(0), *(kind(0, remat=remat) for remat in more)]
    else:
        kinds = [kind(1), kind(2), kind(3, regather=False), kind(3), *(kind(3, remat=remat) for remat in more)]
    yield from kinds
    if config.offload == type(config.offload).defaults():
        for where in ({"optimizer": "host"}, {"optimizer": "host", "params": "host"}):
            yield kinds[-1].model_copy(update={"offload": config.offload.model_copy(update=where)})


def rows_that_divide(config: Config, data_parallel: int) -> tuple[int, ...]:
    """Rows that a microbatch of one device may have, ascending.

    Raises:
        ConfigError: the batch is no multiple of the data-parallel devices.
    """
    if config.micro_batch is not None:
        return (config.micro_batch,)
    if "batch_size" not in config.model_fields_set:
        return _OPEN_ROWS
    if config.batch_size % data_parallel:
        raise ConfigError(
            f"batch_size = {config.batch_size} must be a multiple of {data_parallel} data-parallel devices"
        )
    each = config.batch_size // data_parallel
    return tuple(n for n in range(1, each + 1) if each % n == 0)


def name_of(config: Config) -> str:
    """A setting of the ladder, in words."""
    words = [f"stage {config.stage}", *([] if config.zero.regather else ["kept gathered"])]
    elsewhere = [f"{key} on the host" for key in ("optimizer", "params") if getattr(config.offload, key) == "host"]
    return ", ".join([*words, f"remat {config.model.remat}", *elsewhere])


def _largest(plan_of: Callable[[int], Plan], rows: Sequence[int], smallest: Plan, margin: float) -> tuple[int, Plan]:
    """The most rows that fit, and their plan.

    Activations grow with the rows, so two sizes tell where the limit is about; what is taken has been compiled.
    """
    found = {0: smallest}

    def plan_at(i: int) -> Plan:
        if i not in found:
            found[i] = plan_of(rows[i])
        return found[i]

    low, high = 0, len(rows)  # low fits, high does not
    while high - low > 1:
        i = _guess(rows, found, low, high, margin)
        if i is None:
            break
        if plan_at(i).missing_bytes(margin) <= 0:
            low = i
        else:
            high = i
    return rows[low], found[low]


def _guess(rows: Sequence[int], found: dict[int, Plan], low: int, high: int, margin: float) -> int | None:
    """Which size to compile next, above `low` and below `high`; None if the next is clearly too large."""
    if len(found) == 1:
        return low + 1
    (i, first), (j, second) = sorted(found.items())[-2:]
    slope = (second.memory.peak_bytes - first.memory.peak_bytes) / (rows[j] - rows[i])
    room = -found[low].missing_bytes(margin)
    fitting = [k for k in range(low + 1, high) if slope * (rows[k] - rows[low]) <= room]
    if fitting:
        return fitting[-1]
    too_much = slope * (rows[low + 1] - rows[low]) - room
    return low + 1 if too_much <= _DOUBT * found[low].memory.peak_bytes else None
