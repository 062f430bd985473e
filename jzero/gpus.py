"""GPUs by a few numbers: what a compiler must know of one to compile for it, and what a time estimate asks for.

A table of known ones, and `parse`, which takes one of them with other numbers::

    parse("h100:memory_gb=94,hbm_gb_per_s=3938,nvlink_gb_per_s=300,bf16_tflops=835")  # an H100 NVL
"""

import difflib
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any


class TargetError(ValueError):
    """A target that is not known, or that cannot be compiled for on this machine."""


@dataclass(frozen=True)
class Gpu:
    """What the compiler and a time estimate need to know of one GPU.

    Attributes:
        name: the device's own name for itself.
        cores: streaming multiprocessors; `fpus_per_core` fp32 units in each, `threads_per_core` at most.
        memory_bytes, l2_bytes: device memory and second-level cache.
        shared_bytes_per_block, shared_bytes_per_core: shared memory, opt-in limit of a block, and of a core.
        capability: CUDA compute capability, (major, minor).
        hbm_gb_per_s: memory bandwidth, 10^9 bytes per second.
        clock_ghz: boost clock.
        bf16_tflops: dense 16-bit matrix throughput, 10^12 operations per second (fp16 where bf16 is not supported).
        nvlink_gb_per_s, pcie_gb_per_s, nic_gb_per_s: 10^9 bytes per second in one direction, per GPU; 0 where there is
            none.
        host_gb_per_s, disk_gb_per_s: of the memory and of the disks of a host, for all its GPUs together; disks in each
            direction.  Not of a GPU, and assumed.
        devices_per_host: GPUs of one host, joined by NVLink, or by PCIe where there is none; between hosts is the NIC.
    """

    name: str
    cores: int
    fpus_per_core: int
    memory_bytes: int
    hbm_gb_per_s: float
    l2_bytes: int
    clock_ghz: float
    shared_bytes_per_block: int
    shared_bytes_per_core: int
    capability: tuple[int, int]
    bf16_tflops: float
    nvlink_gb_per_s: float
    pcie_gb_per_s: float
    nic_gb_per_s: float
    threads_per_core: int = 2048
    devices_per_host: int = 8
    host_gb_per_s: float = 200.0
    disk_gb_per_s: float = 10.0


# Device columns of V100-16, A100, H100, H200 and B200 follow the XLA project's target files, the others the vendors'
# datasheets, as do throughput and links: leads for an estimate, not measurements.
# fmt: off
GPUS: dict[str, Gpu] = {
    "v100-16": Gpu("Tesla V100-SXM2-16GB", 80, 64, 16_935_682_048, 898, 6_291_456, 1.53,
                   98_304, 98_304, (7, 0), 125, 150, 16, 12.5),
    "v100-32": Gpu("Tesla V100-SXM2-32GB", 80, 64, 34_089_730_048, 898, 6_291_456, 1.53,
                   98_304, 98_304, (7, 0), 125, 150, 16, 12.5),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 128, 128, 25_386_352_640, 1008, 75_497_472, 2.52,
                   101_376, 102_400, (8, 9), 165, 0, 32, 0, threads_per_core=1536),
    "l40s": Gpu("NVIDIA L40S", 142, 128, 47_810_936_832, 864, 100_663_296, 2.52,
                101_376, 102_400, (8, 9), 362, 0, 32, 0, threads_per_core=1536),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 108, 64, 42_331_013_120, 1555, 41_943_040, 1.41,
                   166_912, 167_936, (8, 0), 312, 300, 32, 25),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 108, 64, 85_100_068_864, 2039, 41_943_040, 1.41,
                166_912, 167_936, (8, 0), 312, 300, 32, 25),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 132, 128, 84_942_979_072, 3352, 52_428_800, 1.98,
                232_448, 233_472, (9, 0), 989, 450, 64, 50),
    "h200": Gpu("NVIDIA H200", 132, 128, 151_397_597_184, 4800, 52_428_800, 1.98,
                232_448, 233_472, (9, 0), 989, 450, 64, 50),
    "b200": Gpu("NVIDIA B200", 148, 128, 191_514_411_008, 7672, 132_644_864, 1.965,
                232_448, 233_472, (10, 0), 2250, 900, 64, 50),
}
# fmt: on

_MEMORY_GB = "memory_gb"  # how memory_bytes is written
_MAY_BE_ZERO = frozenset({"nvlink_gb_per_s", "pcie_gb_per_s", "nic_gb_per_s"})
_LARGEST, _LARGEST_BYTES = 10**6, 2**31 - 1  # what the compiler's own fields hold


def parse(target: str) -> Gpu:
    """A GPU of the table by its name, or one with other numbers, as ``"h100:memory_gb=94,nvlink_gb_per_s=300"``.

    The numbers have the names of `Gpu`'s fields, but for `memory_gb` (10^9 bytes), which sets `memory_bytes`;
    `capability` is written 9.0.  A GPU with other numbers is named by the text that describes it.

    Raises:
        TargetError: a name that is not in the table, a field that a GPU does not have, a number that is none or that
            does not fit the field; the message says what there is.
    """
    base, colon, rest = target.strip().partition(":")
    if base not in GPUS:
        raise TargetError(
            f"unknown target {base!r}{_meant(base, GPUS)}: known GPUs are {', '.join(GPUS)}; "
            f"one with other numbers is written h100:{_MEMORY_GB}=94,..."
        )
    if not colon:
        return GPUS[base]
    changed: dict[str, Any] = {}
    for part in rest.split(","):
        field, value = _field(target, part)
        if field in changed:
            raise TargetError(f"target {target!r}: {part.partition('=')[0].strip()} is given twice")
        changed[field] = value
    return replace(GPUS[base], **{"name": target.strip(), **changed})


def by_name(device_kind: str) -> Gpu | None:
    """The GPU of the table that calls itself `device_kind`, to the letter; None if there is none.

    Variants of one chip (PCIe, less memory) have other rates.
    """
    return next((g for g in GPUS.values() if g.name == device_kind), None)


def bf16_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 operations per second of the device that calls itself `device_kind`; None if not known.

    There is no peak for what has no bfloat16 matrix units, before compute capability 8.
    """
    found = by_name(device_kind)
    return found.bf16_tflops * 1e12 if found and found.capability >= (8, 0) else None


def _field(target: str, part: str) -> tuple[str, Any]:
    """(field of Gpu, its value) of a part such as ``"memory_gb=94"``."""
    kinds = {_MEMORY_GB if f.name == "memory_bytes" else f.name: f.type for f in fields(Gpu) if f.name != "name"}
    key, equals, text = (word.strip() for word in part.partition("="))
    if not equals:
        raise TargetError(f"target {target!r}: {part.strip()!r} is not FIELD=NUMBER, as in {_MEMORY_GB}=94")
    if key not in kinds:
        raise TargetError(f"target {target!r}: a GPU has no {key!r}{_meant(key, kinds)}; it has {', '.join(kinds)}")
    if key == "capability":
        found = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
        if not found:
            raise TargetError(f"target {target!r}: capability={text}: must be MAJOR.MINOR, such as 9.0")
        return key, (int(found[1]), int(found[2]))
    value = _number(target, key, text, whole=kinds[key] is int and key != _MEMORY_GB)
    return ("memory_bytes", round(value * 1e9)) if key == _MEMORY_GB else (key, value)


def _number(target: str, key: str, text: str, *, whole: bool) -> float:
    largest = _LARGEST_BYTES if "bytes" in key else _LARGEST
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and (value > 0 or (value == 0 and key in _MAY_BE_ZERO)) and value <= largest:
        return value
    kind, least = "a whole number" if whole else "a number", "from 0" if key in _MAY_BE_ZERO else "above 0"
    raise TargetError(f"target {target!r}: {key}={text}: must be {kind} {least}, at most {largest:,}")


def _meant(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
