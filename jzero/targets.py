"""GPUs that are not here, as devices to compile for.

XLA compiles for a GPU from a description of it; no GPU, driver or cluster is needed. What comes out is the program the
cluster would run, with its schedule, its collectives and its memory, so a plan for 4,096 GPUs is a measurement of a
program and not a guess::

    mesh = Mesh(gpu_devices("h100", 16).reshape(4, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        lowered = step.lower(abstract_state, abstract_batch)
    compiled = lowered.compile(compiler_options=COMPILER_OPTIONS)

Nothing can run on these devices. Keep `jax.set_mesh` round `eval_shape` and `lower` only: an eager operation under it
tries to run there.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jax.experimental import topologies

# The plugin would compare the installed CUDA libraries with a driver, fail where there is none, and log a traceback
# that looks like a crash. It does so when JAX starts its backends, once; so this stands where `import jzero` passes.
# Only an absent driver makes the check pointless: a machine with GPUs keeps it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

#: Pass as `compiler_options` to `.compile()`: autotuning would time kernels on the GPU that is absent.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}

#: Devices in one host, joined by NVLink (or PCIe); a larger count is spread over hosts.
DEVICES_PER_HOST = 8

_INSTALL = "pip install 'jzero[aot]'"
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


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


def gpu(target: str) -> Gpu:
    """The description of GPU `target`, one of `GPUS`.

    Raises:
        TargetError: the name is not in the table; the message lists those that are.
    """
    if target not in GPUS:
        raise TargetError(f"unknown target {target!r}: known GPUs are {', '.join(GPUS)}")
    return GPUS[target]


def bf16_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 operations per second of the device that calls itself `device_kind`; None if not known.

    The name must be the table's to the letter: variants of one chip (PCIe, less memory) have other peaks.  Nor is there
    a peak for what has no bfloat16 matrix units, before compute capability 8.
    """
    known = {g.name: g for g in GPUS.values() if g.capability >= (8, 0)}
    return known[device_kind].bf16_tflops * 1e12 if device_kind in known else None


def available() -> str | None:
    """None where programs can be compiled for absent GPUs, else one line saying what to install."""
    if not any(_installed(plugin) for plugin in _PLUGINS):
        return f"compiling for a GPU that is not here needs JAX's CUDA plugin: {_INSTALL}"
    return None


def gpu_devices(target: str, count: int) -> np.ndarray:
    """`count` devices of absent GPUs `target`, a flat object array in host order; nothing can run on them.

    Below 8 they stand in one host, above in hosts of 8.

    Raises:
        TargetError: unknown target, a count that does not fill its hosts, or no plugin to compile with.
    """
    description = _target_config(gpu(target))
    topology = _topology(target, count)
    if missing := available():
        raise TargetError(f"target {target!r}: {missing}")
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=target, topology=topology, target_config=description
        )
    except NotImplementedError as error:
        raise TargetError(
            f"target {target!r}: JAX started without its CUDA plugin; import jzero.targets before the first use of "
            "jax.devices(), or set JAX_PLATFORMS=cpu"
        ) from error
    return np.array(found.devices)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Not even the parent package is there.
        return False


def _topology(target: str, count: int) -> str:
    """XLA's "SLICESxHOSTSxDEVICES_PER_HOST"."""
    if count < 1 or (count > DEVICES_PER_HOST and count % DEVICES_PER_HOST):
        raise TargetError(
            f"target {target!r}: {count} devices; 1 to {DEVICES_PER_HOST}, or a multiple of {DEVICES_PER_HOST}"
        )
    return f"1x{max(count // DEVICES_PER_HOST, 1)}x{min(count, DEVICES_PER_HOST)}"


def _target_config(g: Gpu) -> str:
    """XLA's GpuTargetConfigProto in text form. The limits that are equal on all GPUs of the table stand here."""
    major, minor = g.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {g.threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {g.shared_bytes_per_block}
  shared_memory_per_core: {g.shared_bytes_per_core}
  core_count: {g.cores} fpus_per_core: {g.fpus_per_core} clock_rate_ghz: {g.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {round(g.hbm_gb_per_s * 1e9)} l2_cache_size: {g.l2_bytes} device_memory_size: {g.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{g.name}"
"""
