"""What a run says while it trains: metrics on their way to the host, metrics.jsonl, TensorBoard, a progress bar."""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import jax
import numpy as np
from tqdm import tqdm

from jzero.config import Config
from jzero.watch import Events, device_memory


class RunError(RuntimeError):
    """A run that cannot go on; the message is one line for the user."""


class Waiting:
    """Metrics on their way to the host.  Those of a step are read when `depth` later steps are dispatched.

    Reading waits for the step to end; by then the devices have work for `depth` steps, so they never wait for the host,
    and the host is never further ahead.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: deque[tuple[int, Mapping[str, jax.Array]]] = deque()

    def put(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Starts the copy of a step's metrics, which may not be computed yet."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._steps.append((step, metrics))

    def ready(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics) of the steps that are `depth` behind, in order."""
        while len(self._steps) > self._depth:
            yield self._read()

    def rest(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics) of all steps; waits for the last."""
        while self._steps:
            yield self._read()

    def _read(self) -> tuple[int, dict[str, float]]:
        step, metrics = self._steps.popleft()
        return step, {name: np.asarray(value).item() for name, value in metrics.items()}


class Journal:
    """What is written of a run: lines of metrics.jsonl, the same as TensorBoard events, and a progress bar.

    A line of training has step, loss (nats per token), grad_norm (before clipping), lr (of the last update that was not
    skipped), skipped (steps so far), tokens (trained on so far), tokens_per_s and step_s (seconds per step since the
    line before, without what was done `aside`; the first line's include compilation), what `speed` adds (mfu), and
    memory_bytes and peak_memory_bytes of the fullest device where the backend counts.  A line of evaluation has step,
    eval_loss, eval_tokens and, if the run keeps an average of the weights, its ema_eval_loss.  What is not finite is
    null.
    """

    def __init__(
        self, path: Path, config: Config, speed: Callable[[float], Mapping[str, float]] = lambda _: {}
    ) -> None:
        """Opens the files: `path` and, beside it, events.

        Args:
            path: of metrics.jsonl, which is not there yet.
            config: resolved.
            speed: tokens per second -> what else to say about them.
        """
        self._config = config
        self._speed_of = speed
        self._tokens_per_step = config.batch_size * config.data.seq_len
        self._file = path.open("x", encoding="utf-8")
        self._events = Events(path.parent) if config.log.tensorboard else None
        quiet = 0.1 if sys.stderr.isatty() else 15.0
        self._bar = tqdm(total=config.steps, unit="step", desc="compiling", dynamic_ncols=True, mininterval=quiet)
        self._speed = ""
        self._skipped = 0
        self._evals: list[tuple[int, float]] = []
        self._start = self._clock = time.perf_counter()
        self._logged = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._file.close()
        if self._events:
            self._events.close()

    def trained(self, steps: Iterable[tuple[int, dict[str, float]]]) -> None:
        """Takes in the metrics of steps that ended.

        Raises:
            RunError: `optim.max_skipped` steps in a row were skipped.
        """
        for step, metrics in steps:
            self._skipped += bool(metrics["skipped_in_row"])
            failed = metrics["skipped_in_row"] >= self._config.optim.max_skipped
            if failed or step in (1, self._config.steps) or step % self._config.log.every == 0:
                self._log(step, metrics)
            self._bar.set_description("training", refresh=False)
            self._bar.update()
            self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}{self._speed}", refresh=False)
            if failed:
                raise RunError(
                    f"step {step}: the gradient was not finite in {metrics['skipped_in_row']:.0f} steps in a row "
                    f"(optim.max_skipped); try a lower optim.lr, a longer warm-up or precision.params = float32"
                )

    def evaluated(self, step: int, result: tuple[float, float], average: tuple[float, float] | None = None) -> None:
        """Takes in an evaluation after `step`, and one of the average of the weights; over no tokens, no trace is left.

        Args:
            result, average: (loss in nats per token, number of tokens).
        """
        loss, tokens = result
        if tokens:
            of_average = {} if average is None else {"ema_eval_loss": average[0]}
            self._write({"step": step, "eval_loss": loss, **of_average, "eval_tokens": int(tokens)})
            self._evals.append((step, loss))
            also = "".join(f", of the averaged weights {value:.4f}" for value in of_average.values())
            self.say(f"step {step}: held-out loss {loss:.4f} nats per token{also}")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile, with idle devices, does not count as time of steps."""
        start = time.perf_counter()
        yield
        self._clock += time.perf_counter() - start

    def say(self, line: str) -> None:
        """Prints `line` above the bar."""
        self._bar.write(line)

    def summary(self) -> str:
        """The run in two lines."""
        tokens, seconds = self._config.steps * self._tokens_per_step, time.perf_counter() - self._start
        lines = [
            f"done: {self._config.steps} steps, {tokens:,} tokens in {seconds:.1f} s, {self._skipped} steps skipped"
        ]
        if self._evals:
            lines.append(f"held-out loss: {self._evals[0][1]:.4f} -> {self._evals[-1][1]:.4f} nats per token")
        return "\n".join(lines)

    def check(self) -> None:
        """Whether the run came to anything.

        Raises:
            RunError: all steps were skipped, or the last held-out loss is not finite.
        """
        if self._skipped == self._config.steps:
            raise RunError(f"all {self._skipped} steps were skipped: no gradient was finite")
        if self._evals and not math.isfinite(self._evals[-1][1]):
            raise RunError(f"the held-out loss after step {self._evals[-1][0]} is {self._evals[-1][1]}")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        step_s = (now - self._clock) / (step - self._logged)
        speed = {
            "tokens": step * self._tokens_per_step,
            "tokens_per_s": self._tokens_per_step / step_s,
            "step_s": step_s,
            **self._speed_of(self._tokens_per_step / step_s),
        }
        self._write({"step": step, **metrics, **speed, **device_memory()})
        mfu = speed.get("mfu")
        if step > 1:  # the first has compiled
            self._speed = f", {speed['tokens_per_s']:,.0f} tokens/s" + (f", mfu {mfu:.1%}" if mfu else "")
        self._clock, self._logged = now, step

    def _write(self, line: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
        print(json.dumps(finite), file=self._file, flush=True)
        if self._events:
            self._events.write(line)
