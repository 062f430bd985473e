"""What processes of one run know of each other: they go on together or not at all.

A process that fails alone leaves the others waiting for it in their next collective.  So whatever can go wrong before
the first step is done within `agreed`, and all learn of it.  Every function here is a collective: all processes call
it, in the same order.  With one process they cost nothing.
"""

import json
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.pace import in_turn

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessError(RuntimeError):
    """What ends all processes alike; one of them should say it.

    Attributes:
        bad_input: whether what failed was input.
    """

    def __init__(self, message: str, *, bad_input: bool) -> None:
        super().__init__(message)
        self.bad_input = bad_input


def is_first() -> bool:
    """Whether this is the process that speaks and writes: process 0."""
    return jax.process_index() == 0


@contextmanager
def agreed(bad_input: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What is done inside is done by all processes, or ends all of them.

    Args:
        bad_input: exceptions that say what was wrong with the input in their message.

    Raises:
        ProcessError: here or elsewhere `bad_input` or an OSError was raised.  Other exceptions of this process are
            raised as they are; so are all with one process.
    """
    failed = None
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        failed = error
    if jax.process_count() == 1:
        return
    expected = isinstance(failed, (*bad_input, OSError))
    text = "" if failed is None else str(failed) if expected else f"{type(failed).__name__}: {failed}"
    kind = "" if failed is None else "input" if isinstance(failed, bad_input) else "other"
    reports = [json.loads(report) for report in gather_texts(json.dumps([kind, text]))]
    if failed is not None and not expected:
        raise failed
    if any(kind for kind, _ in reports):
        raise ProcessError(_told(reports), bad_input=all(kind != "other" for kind, _ in reports)) from failed


def _told(reports: Sequence[tuple[str, str]]) -> str:
    """What failed and where, in one line: an error that all have is told once."""
    where: dict[str, list[int]] = {}
    for process, (kind, text) in enumerate(reports):
        if kind:
            where.setdefault(text, []).append(process)
    if all(len(processes) == len(reports) for processes in where.values()):
        return next(iter(where))
    return "; ".join(
        f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))} of {len(reports)}: {text}"
        for text, processes in where.items()
    )


def same_everywhere(values: Mapping[str, object]) -> None:
    """Holds all processes to the same values, such as settings.

    Raises:
        ProcessError: names what differs, in every process.
    """
    told = [json.loads(text) for text in gather_texts(json.dumps({key: str(value) for key, value in values.items()}))]
    for process, other in enumerate(told):
        for key in {**told[0], **other}:
            if other.get(key) != told[0].get(key):
                raise ProcessError(
                    f"{key} is {other.get(key)} in process {process} and {told[0].get(key)} in process 0: "
                    f"all processes must be started with the same settings, data and versions",
                    bad_input=True,
                )


def broadcast_text(text: str) -> str:
    """The text of process 0, in all of them."""
    return gather_texts(text if is_first() else "")[0]


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, by process.

    Raises:
        ProcessError: they have different numbers of devices.
    """
    if jax.process_count() == 1:
        return [text]
    _check_device_counts()
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(data.size)))
    padded = np.zeros(lengths.max() or 1, np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def _check_device_counts() -> None:
    counts = np.bincount([device.process_index for device in jax.devices()], minlength=jax.process_count())
    if len(set(counts.tolist())) > 1:
        odd = int(np.flatnonzero(counts != counts[0])[0])
        raise ProcessError(
            f"process {odd} of {len(counts)} has {counts[odd]} devices and process 0 has {counts[0]}: "
            f"all must have as many (CUDA_VISIBLE_DEVICES, distributed.local_devices)",
            bad_input=True,
        )


def devices_by_host() -> tuple[list[Any], list[str]]:
    """All devices, those of one host next to each other, and the name of each one's host.

    Launchers may deal processes out to hosts in turn, and a mesh filled in that order would have its neighbours on
    different hosts.
    """
    told = [json.loads(text) for text in gather_texts(json.dumps(_host()))]
    order = {boot: rank for rank, boot in reversed(list(enumerate(boot for boot, _ in told)))}
    devices = sorted(jax.devices(), key=lambda d: (order[told[d.process_index][0]], d.process_index, d.id))
    return devices, [told[device.process_index][1] for device in devices]


def _host() -> tuple[str, str]:
    """(what tells hosts apart, name); containers of one host have names of their own."""
    name = socket.gethostname()
    return (_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else name), name


class Flag:
    """A bool of each process, turned into whether any of them is set, some questions later and without waiting.

    All processes ask at the same steps and get the same answer.  The computation runs behind the steps that are already
    dispatched, so an answer that is `depth` steps old is there when it is read.  One process alone is told at once.
    """

    def __init__(self, depth: int) -> None:
        """A flag that nobody has set.

        Args:
            depth: by how many questions an answer lags where there are several processes.
        """
        self._depth = depth
        self._asked: deque[jax.Array] = deque()
        mesh = Mesh(np.asarray(jax.devices()), ("device",))
        shape, sharding = (jax.device_count(),), NamedSharding(mesh, P("device"))
        self._mine = [
            jax.make_array_from_callback(shape, sharding, lambda _, value=value: np.array([value], np.int32))
            for value in (0, 1)
        ]
        self._any = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def ask(self, mine: bool) -> bool:  # noqa: FBT001 (the one thing there is to say)
        """Says what is so in this process, and returns whether it was so in any process `depth` questions ago."""
        if jax.process_count() == 1:
            return mine
        self._asked.append(in_turn(self._any(self._mine[mine])))
        self._asked[-1].copy_to_host_async()
        return len(self._asked) > self._depth and bool(np.asarray(self._asked.popleft()))
