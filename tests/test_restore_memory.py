"""The state that is restored is in memory once, and beside it a small part of it on its way."""

import json
import sys
from pathlib import Path

import pytest
from processes import spawn, wait

# Of the state: the largest array and a piece of a file on their way, and what the C library keeps of what it has freed.
BESIDE = 0.4


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_restoring_holds_the_state_once(tmp_path):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "MALLOC_MMAP_THRESHOLD_": "131072"}
    script = Path(__file__).with_name("restore_memory.py")
    (ended,) = wait([spawn([str(script), str(tmp_path / "checkpoints")], env=env)])
    assert ended.status == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    print(
        {name: f"{state / 1e6:.0f} MB, and {added / 1e6:.0f} MB more at most" for name, (state, added) in found.items()}
    )
    for name in ("same", "mesh", "precision"):
        state, added = found[name]
        assert state > 3e8
        assert added < state * (1 + BESIDE), name
    state, added = found["save"]
    assert added < state * (1 + BESIDE)  # the copy that is written while training goes on
