"""Several processes as one run: how they find each other, and which devices each has.

JAX starts them (`jax.distributed`); what is decided here is whether there are several at all, which devices each takes,
how long anybody waits, and what is said when it does not come to pass.  JAX ends a process that waited in vain, or that
lost another one, with `abort` and a stack trace; so far as can be, a line in words comes first.
"""

import os
import re
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

import jax

from jzero import ending
from jzero.launchers import Launcher, launcher

AUTO = "auto"
ALL = "all"
START_TIMEOUT_S = 120
HEARTBEAT_TIMEOUT_S = 30
_GRACE_S = 60  # beyond our own patience, after which JAX would abort
_PATIENT_S = 10  # without a word
FAKE_DEVICES = 8  # of all processes

_STATUS = re.compile("[A-Z_]+: ")  # all of XLA's errors begin with one
_DEVICE = re.compile("(INTERNAL|UNKNOWN|DATA_LOSS|ABORTED|UNAVAILABLE): ")
_PEER = re.compile("gloo|nccl|connection|coordination|heartbeat|unavailable", re.IGNORECASE)


class StartError(RuntimeError):
    """Processes that did not find each other; the message is one line for the user.

    Attributes:
        bad_input: whether settings are wrong, so that another try would fail as well.
    """

    def __init__(self, message: str, *, bad_input: bool = False) -> None:
        super().__init__(message)
        self.bad_input = bad_input


def start(
    coordinator: str | None = AUTO,
    processes: int | None = None,
    process: int | None = None,
    local_devices: str = AUTO,
    start_timeout_s: int = START_TIMEOUT_S,
    heartbeat_timeout_s: int = HEARTBEAT_TIMEOUT_S,
) -> int:
    """Joins this process to its peers, if it has any; to be called before JAX starts its backends.

    With "auto" and neither a launcher nor JAX_COORDINATOR_ADDRESS it does nothing.  From here on an exception that
    nobody catches ends the process at once.

    Args:
        coordinator: HOST:PORT at which process 0 listens and the others look for it; "auto": as the launcher says;
            None: this process is on its own, whatever the launcher says.
        processes, process: how many there are, and which of them this is; None: as the launcher says.
        local_devices: GPUs of this process, such as "0,1"; "all": those that it sees; "auto": all, or the one of its
            index where the launcher has several processes on a host.
        start_timeout_s: for how long to wait for all of them.
        heartbeat_timeout_s: a process that was silent for so long is taken for dead, and all others end.

    Returns:
        The number of processes; 0 if JAX alone knows it.

    Raises:
        StartError: they did not come together, or who they are is not known.
    """
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", AUTO) if coordinator == AUTO else coordinator
    found = launcher(os.environ)
    nothing_is_said = coordinator == AUTO and found is None and processes is None and process is None
    if coordinator is None or processes == 1 or nothing_is_said:
        return 1
    count = processes if processes is not None or found is None else found.processes
    index = process if process is not None or found is None else found.process
    if reason := _unknown(coordinator, count, index, found):
        raise StartError(reason, bad_input=True)
    if coordinator != AUTO and index == 0:
        _check_port(coordinator)
    _prepare_jax()
    peer = _Peer(coordinator, index, found)
    ending.is_one_of(index or 0, count)
    _initialize(
        peer,
        start_timeout_s,
        coordinator_address=None if coordinator == AUTO else coordinator,
        num_processes=count,
        process_id=index,
        local_device_ids=_local_devices(local_devices, found),
        cluster_detection_method=found.method if coordinator == AUTO and found else "deactivate",
        initialization_timeout=start_timeout_s + _GRACE_S,
        heartbeat_timeout_seconds=heartbeat_timeout_s,
    )
    return count or 0


def started() -> bool:
    """Whether this process has peers, or waits for them."""
    return jax.distributed.is_initialized()


def start_cpu_devices(processes: int = 1) -> None:
    """Eight CPU devices for machines without an accelerator, unless XLA_FLAGS already says how many.

    Has no effect on accelerators, nor once JAX has started its backends.

    Args:
        processes: what `start` returns; among them the devices are divided, so that a run in several processes is the
            run that one would be.
    """
    count = max(1, FAKE_DEVICES // (processes or FAKE_DEVICES))
    if make_cpu_devices(count) and jax.default_backend() == "cpu" and jax.process_index() == 0:
        total = f"{jax.process_count()} x {count}" if jax.process_count() > 1 else str(count)
        print(
            f"no accelerator: {total} fake CPU devices "
            "(another number: XLA_FLAGS=--xla_force_host_platform_device_count=N)"
        )


def make_cpu_devices(count: int) -> bool:
    """Has JAX start so many CPU devices; False where the environment says how many, or JAX has started them."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in os.environ:
        return False
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return False
    return True


def lost_peer(error: Exception) -> bool:
    """Whether an error of a computation says that another process is gone, not that this one did something wrong.

    Args:
        error: a JaxRuntimeError; from a computation so small that it runs as it is called, a ValueError.
    """
    return started() and bool(_STATUS.match(str(error)) and _PEER.search(str(error)))


def lost_device(error: Exception) -> bool:
    """Whether an error says that a device or its driver failed: one of XLA's that is not of the program or its size."""
    return isinstance(error, jax.errors.JaxRuntimeError) and bool(_DEVICE.match(str(error)))


def _unknown(coordinator: str, count: int | None, index: int | None, found: Launcher | None) -> str | None:
    """What is not known of the processes, or cannot be; None if all is."""
    explicit = "distributed.coordinator = HOST:PORT, distributed.processes and distributed.process"
    if coordinator == AUTO and found is None:
        key, value = ("processes", count) if count is not None else ("process", index)
        return f"distributed.{key} = {value}, and no launcher that JAX knows started them: set {explicit}"
    if coordinator == AUTO and found and found.missing:
        return (
            f"this is process {found.process} of a job of {found.name}, and JAX needs {found.missing} to find the "
            f"others: install it, or set {explicit}; distributed.coordinator = none if it trains on its own"
        )
    if coordinator != AUTO and None in (count, index):
        key = "processes" if count is None else "process"
        return f"distributed.coordinator = {coordinator} needs distributed.{key}, which no launcher tells"
    try:
        check_index(index, count)
    except ValueError as error:
        return str(error)
    return None


def _check_port(coordinator: str) -> None:
    """Whether process 0 can listen there: JAX would end it without a word."""
    port = int(coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise StartError(
            f"distributed.coordinator = {coordinator}: process 0 cannot listen on port {port}: {error.strerror}"
        ) from None


def check_address(text: str) -> None:
    """Whether `text` is HOST:PORT.

    Raises:
        ValueError: it is not.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"distributed.coordinator = {text}: must be HOST:PORT, auto or none")


def check_index(process: int | None, processes: int | None) -> None:
    """Whether there is such a process, as far as is known.

    Raises:
        ValueError: there is not.
    """
    if process is not None and processes is not None and not 0 <= process < processes:
        raise ValueError(f"distributed.process = {process}: must be below distributed.processes = {processes}")


def device_numbers(text: str) -> list[int]:
    """ "0,1" as [0, 1]; empty for "all" and "auto".

    Raises:
        ValueError: it is none of them.
    """
    if text in (ALL, AUTO):
        return []
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(f"distributed.local_devices = {text}: must be numbers such as 0,1, or all or auto")
    return numbers


def _local_devices(setting: str, found: Launcher | None) -> list[int] | None:
    """Numbers of GPUs as JAX takes them; empty for all that are visible."""
    if setting != AUTO:
        return device_numbers(setting)
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None  # JAX reads it
    # Left to itself JAX takes one GPU per process, by its index on the host, even where a process has a host's all.
    if found is None or found.local_process is None or found.local_processes == 1:
        return []
    return [found.local_process]


def _prepare_jax() -> None:
    """Settings of JAX for several processes; XLA reads its flags when the first backend starts."""
    # Its handler of SIGTERM would take the place of the run's own.
    jax.config.update("jax_enable_preemption_service", False)
    # Before 0.12 collectives between CPU processes that are scheduled at the same time gave other numbers in every run.
    # The flag is known to 0.10 to 0.12; later versions need not know it, and an unknown flag ends the process.
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler"
    if jax.__version_info__ < (0, 12) and flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=false".strip()


@dataclass(frozen=True)
class _Peer:
    """One of several processes, and what it looks for."""

    coordinator: str
    process: int | None
    found: Launcher | None

    @property
    def address(self) -> str:
        if self.coordinator != AUTO:
            return self.coordinator
        return f"the address that {self.found.name if self.found else 'JAX'} gives"


def _initialize(peer: _Peer, timeout_s: int, **settings: Any) -> None:
    """`jax.distributed.initialize`, for at most `timeout_s` and with an exception at the end, not an abort."""
    failed: list[Exception] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(**settings)
        except Exception as error:  # noqa: BLE001 (raised again, in the thread that waits)
            failed.append(error)

    thread = threading.Thread(target=connect, name="jax.distributed", daemon=True)
    thread.start()
    thread.join(min(_PATIENT_S, timeout_s))
    if thread.is_alive() and timeout_s > _PATIENT_S:
        # Of many processes, the one that does not say this is the one that is missing.
        line = f"waits for the others at {peer.address}, on {socket.gethostname()}"
        print(ending.named(line), file=sys.stderr, flush=True)
    # Process 0 leaves last, so that the others can say what they could reach.
    thread.join(max(0, timeout_s - _PATIENT_S) + (2 if peer.process == 0 else 0))
    if failed:
        raise StartError(f"could not be started: {failed[0]}") from failed[0]
    if thread.is_alive():
        raise StartError(_why_alone(peer, timeout_s))


def _why_alone(peer: _Peer, timeout_s: int) -> str:
    limit = f"within {timeout_s} s (distributed.start_timeout_s)"
    if peer.process == 0:
        return f"not all processes came to {peer.address} {limit}: look at what the missing ones say"
    reason = "" if peer.coordinator == AUTO else _unreachable(peer.coordinator)
    if peer.coordinator == AUTO or reason:
        return f"did not reach the coordinator, process 0, at {peer.address} {limit}{reason}"
    return f"reached the coordinator at {peer.address}, but not all processes did {limit}"


def _unreachable(coordinator: str) -> str:
    host, _, port = coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError as error:
        return f": {error.strerror or error}"
    return ""
