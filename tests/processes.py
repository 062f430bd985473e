"""Real processes of one run, on this machine over loopback."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jzero

ROOT = Path(jzero.__file__).parents[1]
TRAIN = ("-m", "jzero.train")
_OF_THIS_SUITE = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")  # its device count is not that of a process

# Lines of Gloo's threads may run into each other.
_NOISE = re.compile(r"\[Gloo\] Rank|is connected to \d|connected peer ranks|cudart_stub|before absl::InitializeLog")


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        status: exit status, negative: the signal that killed it.
        out, err: what it printed, without what Gloo and the CUDA plugin of a machine without a GPU print as they start.
        seconds: from the start of all to its end, as it was seen.
    """

    status: int
    out: str
    err: str
    seconds: float


def free_address() -> str:
    """HOST:PORT that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def environment(**more: str) -> dict[str, str]:
    """Of a process that starts as a user would start it."""
    env = {name: value for name, value in os.environ.items() if name not in _OF_THIS_SUITE}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return env | {"XLA_FLAGS": "--xla_backend_optimization_level=0"} | more


def spawn(words: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts `python WORDS`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=cwd, env=environment(**(env or {})), **pipes)


def peer_flags(address: str, count: int, process: int) -> list[str]:
    """What tells a process which of how many it is."""
    flags = ["--distributed.coordinator", address, "--distributed.processes", str(count)]
    return [*flags, "--distributed.process", str(process)]


def spawn_run(
    count: int,
    argv: Sequence[str],
    cwd: Path,
    own: Mapping[int, Sequence[str]] | None = None,
    program: Sequence[str] = TRAIN,
    **env: str,
):
    """Starts `count` processes of one training run, or those of them that `own` names.

    Args:
        own: process -> flags that it alone is given.
        program: what takes the flags.
    """
    started, address = [], free_address()
    for process in range(count) if own is None else own:
        mine = [*peer_flags(address, count, process), *argv, *(own or {}).get(process, [])]
        started.append(spawn([*program, *mine], cwd, env))
    return started


def wait(started: Sequence[subprocess.Popen[str]], timeout_s: float = 120) -> list[Ended]:
    """What became of them; none is left behind."""
    begun, ended = time.monotonic(), []
    try:
        for process in started:
            out, err = process.communicate(timeout=max(1.0, timeout_s - (time.monotonic() - begun)))
            ended.append(Ended(process.returncode, _said(out), _said(err), time.monotonic() - begun))
    finally:
        for process in started:
            end(process)
    return ended


def _said(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not _NOISE.search(line))


def end(process: subprocess.Popen[str]) -> None:
    """Kills it, if it still runs."""
    process.kill()
    with process:  # waits, and closes its pipes
        pass
