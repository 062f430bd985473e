"""Eight fake CPU devices for the whole suite, unless XLA_FLAGS already says how many; set before JAX is imported."""

import gc
import os
import platform
from importlib import metadata
from pathlib import Path

_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
# Programs of these tests run for milliseconds and compile for seconds: machine code need not be fast.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
if metadata.version("jaxlib").startswith("0.10.") and platform.machine() == "x86_64":
    # Has XLA:CPU's earlier code generator, too, which compiles in half the time; in later ones the flag is unknown.
    # It contracts a product and a sum as fusions fall, differently in two programs for the same numbers, which are
    # compared bit for bit: so without the instruction for it.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The aot extra brings a CUDA plugin that finds no GPU here, on purpose; this keeps its checks quiet.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# A run of a test neither reads nor fills the user's cache of compiled programs; the tests of the cache switch it on.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

import jax  # noqa: E402 (reads these)
import pytest  # noqa: E402

_MAPS = Path("/proc/self/maps")
_MANY = 20_000  # regions of memory; a process may have 65,530, and XLA dies of the next program


@pytest.fixture(scope="module", autouse=True)
def _programs_of_other_modules_go(request):
    """Each program that XLA:CPU compiles maps memory, and what JAX and a module's own caches hold stays mapped."""
    yield
    for x in vars(request.module).values():
        if hasattr(x, "cache_clear") and x.__module__ == request.module.__name__:
            x.cache_clear()
    if _MAPS.exists() and len(_MAPS.read_bytes().splitlines()) > _MANY:
        jax.clear_caches()
        gc.collect()
