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

import functools
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jzero.gpus import GPUS, Gpu, TargetError, parse

__all__ = [
    "COMPILER_OPTIONS",
    "GPUS",
    "MAX_DEVICES",
    "Gpu",
    "TargetError",
    "available",
    "check",
    "gpu_devices",
    "known_options",
    "parse",
]

# The plugin would compare the installed CUDA libraries with a driver, fail where there is none, and log a traceback
# that looks like a crash. It does so when JAX starts its backends, once; so this stands where `import jzero` passes.
# Only an absent driver makes the check pointless: a machine with GPUs keeps it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

#: Pass as `compiler_options` to `.compile()`: autotuning would time kernels on the GPU that is absent.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}

#: The most devices of one mesh.  XLA counts them in 32 bits, and takes some larger numbers for small ones; long before
#: that, at 6 KB each for the smallest program, they are more than a planning machine holds.
MAX_DEVICES = 2**20

_INSTALL = "pip install 'jzero[aot]'"
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def available() -> str | None:
    """None where programs can be compiled for absent GPUs, else one line saying what to install."""
    if not any(_installed(plugin) for plugin in _PLUGINS):
        return f"compiling for a GPU that is not here needs JAX's CUDA plugin: {_INSTALL}"
    return None


def gpu_devices(target: str | Gpu, count: int) -> np.ndarray:
    """`count` devices of absent GPUs `target`, a flat object array in host order; nothing can run on them.

    Up to `devices_per_host` of them stand in one host, more in full hosts.

    Args:
        target: a text for `parse`, or a GPU of your own.

    Raises:
        TargetError: unknown target, a count that does not fill its hosts or is more than XLA describes, or no plugin to
            compile with.
    """
    g = parse(target) if isinstance(target, str) else target
    check(g, count)
    name, hosts = _name(g), max(count // g.devices_per_host, 1)
    topology = f"1x{hosts}x{min(count, g.devices_per_host)}"  # slices, hosts, devices of a host
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=name, topology=topology, target_config=_target_config(g)
        )
    except NotImplementedError as error:
        raise TargetError(
            f"target {name!r}: JAX started without its CUDA plugin; import jzero.targets before the first use of "
            "jax.devices(), or set JAX_PLATFORMS=cpu"
        ) from error
    return np.array(found.devices)


def check(gpu: Gpu, count: int) -> None:
    """Refuses what cannot be compiled for.

    Raises:
        TargetError: a count that does not fill its hosts or is more than XLA describes, or no plugin to compile with.
    """
    name, per_host = _name(gpu), gpu.devices_per_host
    if count < 1 or (count > per_host and count % per_host):
        raise TargetError(
            f"target {name!r}: {count} devices do not fill hosts of {per_host}: "
            f"take 1 to {per_host}, or a multiple of {per_host}"
        )
    if count > MAX_DEVICES:
        raise TargetError(f"target {name!r}: {count:,} devices; programs are compiled for at most {MAX_DEVICES:,}")
    if missing := available():
        raise TargetError(f"target {name!r}: {missing}")


def known_options(options: Mapping[str, Any], device: Any = None) -> dict[str, Any]:
    """Those of `options` that the compiler of `device` knows: flags come and go between versions of jaxlib.

    Each is tried once in a process, on a program of one addition.  Pass what is left as `compiler_options` to
    `.compile()`; an unknown name would raise there, and in XLA_FLAGS it would abort the process.

    Args:
        options: name -> value.
        device: present or absent; None for an absent H100.

    Raises:
        TargetError: a known option with a value that it does not take, or no plugin to compile with.
    """
    device = _absent() if device is None else device
    return {name: value for name, value in options.items() if _knows(device, name, value)}


@functools.cache
def _absent() -> Any:
    return gpu_devices("h100", 1)[0]


@functools.cache
def _knows(device: Any, name: str, value: Any) -> bool:
    x = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options={**COMPILER_OPTIONS, name: value})
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if f"No such compile option: '{name}'" in reason:
            return False
        raise TargetError(f"compiler option {name}={value}: {reason}") from None
    return True


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Not even the parent package is there.
        return False


def _name(gpu: Gpu) -> str:
    """What the table calls a GPU; one that it does not have, by its own name."""
    return next((name for name, known in GPUS.items() if known == gpu), gpu.name)


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
device_description_str: {json.dumps(g.name)}
"""
