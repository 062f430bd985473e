"""Instruments of a run: device memory, model FLOPs utilization, TensorBoard events, a profiler trace.

Each says what is known or nothing: a device without a known peak has no utilization, and a backend that does not count
its memory has no figure for it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import jax

from jzero import targets

VIEW = "pip install xprof && xprof --logdir"


def device_memory() -> dict[str, int]:
    """`memory_bytes` and `peak_memory_bytes`, of the fullest device of this process; empty where nobody counts."""
    found: dict[str, int] = {}
    for stats in (device.memory_stats() or {} for device in jax.local_devices()):
        for name, key in (("memory_bytes", "bytes_in_use"), ("peak_memory_bytes", "peak_bytes_in_use")):
            if key in stats:
                found[name] = max(found.get(name, 0), stats[key])
    return found


def utilization(flops_per_token: float) -> Callable[[float], dict[str, float]]:
    """Tokens per second over all devices -> {"mfu": part of the bfloat16 peak}; {} where the peak is not known.

    Args:
        flops_per_token: operations that the model needs per trained token, recomputed ones not counted
            (Chowdhery et al. 2022, appendix B).
    """
    peaks = [targets.bf16_flops(device.device_kind) for device in jax.devices()]
    if None in peaks:
        return lambda _: {}
    peak = sum(filter(None, peaks))
    return lambda tokens_per_s: {"mfu": tokens_per_s * flops_per_token / peak}


class Events:
    """TensorBoard event file of one run; scalars have the names of metrics.jsonl."""

    def __init__(self, directory: Path) -> None:
        from tensorboardX import SummaryWriter  # noqa: PLC0415 (imports torch where it is installed: seconds)

        self._writer = SummaryWriter(str(directory), flush_secs=10)

    def write(self, line: Mapping[str, float]) -> None:
        """The values of one line at its `step`."""
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(line["step"]))

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


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

    def __enter__(self) -> Self:
        self.dispatched(0, None)
        return self

    def dispatched(self, step: int, results: Any) -> None:
        """To be told of every step when it is dispatched, with arrays that it computes."""
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
