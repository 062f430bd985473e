"""What launchers say in the environment: how many processes there are, and which one this is."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Launcher:
    """What started this process as one of several.

    Attributes:
        name: for messages.
        method: JAX's name of its way to find the coordinator; None: JAX finds it without a name.
        processes: how many there are; None where JAX has to ask.
        process: index of this one.
        local_processes, local_process: the same on this host; None where a process sees no GPUs but its own.
        missing: what JAX would need to find the coordinator, and is not there.
    """

    name: str
    method: str | None
    processes: int | None
    process: int
    local_processes: int | None = None
    local_process: int | None = None
    missing: str | None = None


def launcher(env: Mapping[str, str]) -> Launcher | None:
    """The launcher that `env` tells of, None for a process on its own: an allocation with one task is nobody's peer."""
    if env.keys() >= set(_OPEN_MPI):
        return _open_mpi(env)
    if env.keys() >= set(_SLURM):
        return _slurm(env)
    if env.keys() >= set(_KUBERNETES):
        missing = None if importlib.util.find_spec("kubernetes") else "the package kubernetes"
        return Launcher("Kubernetes", None, None, int(env["JOB_COMPLETION_INDEX"]), missing=missing)
    return None


def _open_mpi(env: Mapping[str, str]) -> Launcher | None:
    size, rank, local = (int(env[name]) for name in _OPEN_MPI)
    if size == 1:
        return None
    # From version 5 on there is no address in the environment: JAX asks mpi4py.
    method = "ompi" if "OMPI_MCA_orte_hnp_uri" in env else "mpi4py"
    found = method == "ompi" or importlib.util.find_spec("mpi4py") is not None
    local_size = int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", size))
    return Launcher("Open MPI", method, size, rank, local_size, local, None if found else "the package mpi4py")


def _slurm(env: Mapping[str, str]) -> Launcher | None:
    # Within `salloc` the number of tasks may be the allocation's, of which an interactive shell is one alone.
    tasks = int(env["SLURM_NTASKS"])
    if min(tasks, int(env.get("SLURM_STEP_NUM_TASKS", tasks))) == 1:
        return None
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(tasks))))
    here = counts[min(int(env.get("SLURM_NODEID", 0)), len(counts) - 1)]
    bound = "SLURM_GPUS_PER_TASK" in env  # then a task sees its own GPUs alone, numbered from 0
    local = (None, None) if bound else (here, int(env["SLURM_LOCALID"]))
    return Launcher("Slurm", "slurm", tasks, int(env["SLURM_PROCID"]), *local)


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]
