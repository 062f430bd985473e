"""Plans by other processes, as many at a time as there are cores.

One plan for absent GPUs is made so, too: their compiler speaks of what this process could do nothing about.
"""

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import jax

from jzero import targets
from jzero.config import Config, ConfigError
from jzero.hlo import HloError
from jzero.plan.kept import Kept
from jzero.plan.report import Plan
from jzero.plan.settings import Setting, plan_of

Result = Plan | ConfigError | targets.TargetError
_TASKS = 16  # of a process: what compilers keep does not pile up
_IS_NOISE = re.compile(r"cudart_stub|absl::InitializeLog|^[IWE]\d{4} ")
_SHOWN = 2000  # last characters of what a process said that has died


class PlanError(RuntimeError):
    """A compiler that failed, or that ended its process."""


def plans(settings: Sequence[Setting], kept: Kept, done: Callable[[], Any] = lambda: None) -> list[Result]:
    """The plan of each setting, or why it can have none, in their order.

    Args:
        kept: where plans of earlier calls are, and these will be.
        done: called after each.

    Raises:
        PlanError: a compiler has failed, or has ended its process.
    """
    found: dict[int, Result] = {}
    for i, setting in enumerate(settings):
        if plan := kept.get(setting):
            found[i] = plan
            done()
    left = {i: setting for i, setting in enumerate(settings) if i not in found}
    for i, result in _each(left):
        found[i] = result
        if isinstance(result, Plan):
            kept.put(settings[i], result)
        done()
    return [found[i] for i in range(len(settings))]


def _each(settings: dict[int, Setting]) -> Iterator[tuple[int, Result]]:
    workers = min(cores(), len(settings))
    if workers == 0 or (workers == 1 and all(setting.gpu is None for setting in settings.values())):
        yield from ((i, _plan_or_reason(setting)) for i, setting in settings.items())
        return
    numbers = list(settings)
    for start in range(0, len(numbers), workers * _TASKS):
        yield from _in_a_pool({i: settings[i] for i in numbers[start : start + workers * _TASKS]}, workers)


def _in_a_pool(settings: dict[int, Setting], workers: int) -> Iterator[tuple[int, Result]]:
    """Plans of as many settings as new processes make before they end.

    Not `max_tasks_per_child`: up to Python 3.14 a pool may end all its processes so, start none, and wait for ever
    (CPython issue 115634).
    """
    with tempfile.TemporaryDirectory() as said:
        arguments = (jax.config.jax_platforms, jax.config.jax_num_cpu_devices, said)  # pyright: ignore[reportAttributeAccessIssue]
        context = get_context("spawn")  # what JAX has started does not survive a fork
        with ProcessPoolExecutor(workers, context, initializer=_start, initargs=arguments) as pool:
            futures: dict[Future[Result], int] = {
                pool.submit(_plan_or_reason, setting): i for i, setting in settings.items()
            }
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BrokenProcessPool:
                open_ones = [name_of(settings[i].config) for future, i in futures.items() if not _is_whole(future)]
                words = _last_words(Path(said).iterdir())
                raise PlanError(
                    f"a process that compiled has ended, as where memory runs out ({words}); without a plan are "
                    f"{'; '.join(open_ones)}"
                ) from None


def name_of(config: Config) -> str:
    """A setting among others, in words."""
    rows = "" if config.micro_batch is None else f", micro_batch {config.micro_batch}"
    words = f"stage {config.stage} on {config.mesh}{rows}, remat {config.model.remat}"
    return words if config.zero.regather else f"{words}, kept gathered"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(platforms: str | None, cpu_devices: int, said: str) -> None:
    """What a process has to know before its first plan; what plugins print when they start is kept out of the way."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(Path(said) / str(os.getpid()), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stderr.fileno())
    jax.config.update("jax_platforms", platforms)
    if cpu_devices > 0:
        jax.config.update("jax_num_cpu_devices", cpu_devices)


def _end_with_parent() -> None:
    """A planner that is ended at once leaves nobody behind who compiles on."""
    parent = parent_process()
    if parent:
        wait([parent.sentinel])
        os._exit(1)


def _plan_or_reason(setting: Setting) -> Result:
    try:
        return plan_of(setting)
    except (ConfigError, targets.TargetError) as error:
        return error
    except (jax.errors.JaxRuntimeError, HloError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlanError(f"{name_of(setting.config)}: {words}") from None


def _is_whole(future: Future[Result]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _last_words(files: Iterable[Path]) -> str:
    """What processes said, without what a plugin says at its start and a compiler on its way."""
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
    told = [line for line in lines if not _IS_NOISE.search(line)]
    return " ".join(told)[-_SHOWN:].strip() or "it said nothing"
