"""Files are for state that memory has no room for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jzero

SCRIPT = Path(__file__).with_name("state_beyond_memory.py")
LIMIT = 1_200_000_000  # bytes, less than the state


def under_the_limit(where: str, directory: Path) -> subprocess.CompletedProcess[str]:
    one_device = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment = {**os.environ, **one_device, "PYTHONPATH": str(Path(jzero.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), str(LIMIT), where, str(directory)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_state_larger_than_a_limit_of_memory_trains_from_files_and_from_nowhere_else(tmp_path):
    from_files = under_the_limit("nvme", tmp_path)
    assert from_files.returncode == 0, from_files.stderr[-2000:]
    assert from_files.stdout.startswith("loss ")
    on_the_device = under_the_limit("device", tmp_path)
    assert on_the_device.returncode != 0
    # Whichever allocation comes last says so: XLA's of an array, or C++'s of anything else.
    assert any(words in on_the_device.stderr for words in ("RESOURCE_EXHAUSTED", "bad_alloc", "MemoryError"))
