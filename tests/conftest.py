"""Eight fake CPU devices for the whole suite, unless XLA_FLAGS already says how many; set before JAX is imported."""

import os

_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
# Programs of these tests run for milliseconds and compile for seconds: machine code need not be fast.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The aot extra brings a CUDA plugin that finds no GPU here, on purpose; this keeps its checks quiet.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# A run of a test neither reads nor fills the user's cache of compiled programs; the tests of the cache switch it on.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
