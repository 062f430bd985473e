"""Instruments of a run: device memory, model FLOPs utilization, TensorBoard events, a profiler trace.

Each says what is known or nothing: a device without a known peak has no utilization, and a backend that does not count
its memory has no figure for it.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax

from jzero import gpus

FLUSH_S = 10  # of events; each waits for the disk
VIEW = "pip install xprof && xprof --logdir"


def device_memory() -> dict[str, int]:
    """`memory_bytes` and `peak_memory_bytes`, of the fullest device of this process; empty where nobody counts."""
    found: dict[str, int] = {}
    for stats in (device.memory_stats() or {} for device in jax.local_devices()):
        for name, key in (("memory_bytes", "bytes_in_use"), ("peak_memory_bytes", "peak_bytes_in_use")):
            if key in stats:
                found[name] = max(found.get(name, 0), stats[key])
    return found


def memory_limit() -> int | None:
    """Bytes that a device of this process may hold, None where nobody tells; fake CPU devices share the machine's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def utilization(flops_per_token: float) -> Callable[[float], dict[str, float]]:
    """Tokens per second over all devices -> {"mfu": part of the bfloat16 peak}; {} where the peak is not known.

    Args:
        flops_per_token: operations that the model needs per trained token, recomputed ones not counted
            (Chowdhery et al. 2022, appendix B).
    """
    peaks = [gpus.bf16_flops(device.device_kind) for device in jax.devices()]
    if None in peaks:
        return lambda _: {}
    peak = sum(filter(None, peaks))
    return lambda tokens_per_s: {"mfu": tokens_per_s * flops_per_token / peak}


class Events:
    """TensorBoard event file of one session of a run; scalars have the names of metrics.jsonl.

    Viewers read the files of a directory in the order of their names, and where a session starts they forget what
    earlier files have of its steps.
    """

    def __init__(self, directory: Path, first_step: int = 0) -> None:
        """Opens the file.

        Args:
            directory: may hold the files of earlier sessions.
            first_step: from here on, what earlier sessions wrote counts no more.
        """
        from tensorboardX.proto.event_pb2 import SessionLog  # noqa: PLC0415 # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter  # noqa: PLC0415 (imports torch where it is installed: seconds)

        # Not SummaryWriter: its thread dies of a full disk, and whoever writes then waits for it for ever.
        self._records = RecordWriter(str(directory / _events_name(directory)))
        self._flushed = -math.inf
        self._add(file_version="brain.Event:2")
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, line: Mapping[str, float]) -> None:
        """The values of one line at its `step`.

        Raises:
            OSError: they cannot be written.
        """
        from tensorboardX.proto.summary_pb2 import Summary  # noqa: PLC0415 # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in line.items() if name != "step"]
        self._add(step=int(line["step"]), summary=Summary(value=values))

    def close(self) -> None:
        """No more will be written."""
        self._records.close()

    def _add(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415 # pyright: ignore[reportAttributeAccessIssue]

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        if time.monotonic() - self._flushed > FLUSH_S:
            self._records.flush()
            self._flushed = time.monotonic()


def _events_name(directory: Path) -> str:
    """Behind the names that are there, also where two sessions start in one second, or on hosts whose clocks differ."""
    earlier = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*.*")]
    stamp = max([int(time.time()), *(int(second) + 1 for second in earlier if second.isdigit())])
    return f"events.out.tfevents.{stamp}.{platform.node()}.{os.getpid()}"


class Trace(AbstractContextManager["Trace"]):
    """Profiler trace of a run's steps `first` to `last`, and of nothing else.

    The devices are idle where it starts and ends: a step before the first is not in it, and the last is whole.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        directory: Path,
        say: Callable[[str], object] = print,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """A trace to be taken.

        Args:
            steps: first and last; None for no trace.
            directory: where it is written.
            say: is given the line that tells where it is and how to view it.
            aside: context in which time is spent that is no part of training.
        """
        self._first, self._last = steps or (0, 0)
        self._directory, self._say, self._aside = directory, say, aside
        self._running = False

    def dispatched(self, step: int, results: Any) -> None:
        """To be told of the step before the first, and of every step when it is dispatched, with arrays it computes."""
        if step == self._last and self._running:
            jax.block_until_ready(results)
            with self._aside():
                self._stop()
            self._say(f"trace of steps {self._first} to {self._last}: {VIEW} {self._directory}")
        elif step == self._first - 1:
            jax.block_until_ready(results)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call: slows what is measured, and nothing views it
            with self._aside():
                jax.profiler.start_trace(self._directory, profiler_options=options)
            self._running = True

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._stop()

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()
