"""Pinned host memory: what a device copies from and to without its host's help, and how much of it a process may have.

XLA gives a process with GPUs at most 64 GiB of it, or what an environment variable says when JAX starts its backends.
It is taken as it is needed, so a high limit costs nothing.
"""

import os
from collections.abc import Mapping, MutableMapping

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_UNIT = 2**30
DEFAULT_BYTES = 64 * _UNIT


class HostMemoryError(ValueError):
    """A run that needs more host memory than there is, or than may be pinned."""


def machine_bytes() -> int | None:
    """Memory of this machine; None where nobody tells."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(names):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def raise_limit(environ: MutableMapping[str, str], machine: int | None) -> None:
    """Allows as much pinned memory as a machine has, unless `environ` says how much.

    To be called before JAX starts its backends.

    Args:
        environ: of this process; is changed.
        machine: bytes of its memory; None changes nothing.
    """
    if machine is not None and machine > DEFAULT_BYTES:
        environ.setdefault(VARIABLE, str(machine // _UNIT))


def limit_bytes(environ: Mapping[str, str]) -> int:
    """What a process with this environment may pin.

    Raises:
        HostMemoryError: the variable is no whole number.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return DEFAULT_BYTES
    if not text.strip().isdecimal():
        raise HostMemoryError(f"{VARIABLE}={text}: must be a whole number of GiB")
    return int(text) * _UNIT


def setting_for(needed: int) -> str:
    """What an environment must say for a process to pin so many bytes; "" where the default is enough."""
    return f"{VARIABLE}={-(-needed // _UNIT)}" if needed > DEFAULT_BYTES else ""


def check_pinned(needed: int, environ: Mapping[str, str]) -> None:
    """Refuses a run that pins more than its process may.

    Args:
        needed: bytes, of all devices of this process.

    Raises:
        HostMemoryError: names bytes and the variable.
    """
    limit = limit_bytes(environ)
    if needed > limit:
        raise HostMemoryError(
            f"offload: {needed:,} bytes of pinned host memory are needed for the devices of this process, and "
            f"{limit:,} may be pinned: set {VARIABLE}={-(-needed // _UNIT)} or more before JAX starts"
        )


def check_machine(needed: int, machine: int | None) -> None:
    """Refuses a run that keeps more in host memory than the machine has.

    Args:
        needed: bytes, of all devices of this process.
        machine: bytes of its memory; None refuses nothing.

    Raises:
        HostMemoryError: names both.
    """
    if machine is not None and needed > machine:
        raise HostMemoryError(
            f"offload: {needed:,} bytes of host memory are needed for the devices of this process, and the machine has "
            f"{machine:,}: take more machines, or offload.optimizer = nvme"
        )
