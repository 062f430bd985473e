"""What a run says while it trains: metrics.jsonl, TensorBoard, a progress bar."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tqdm import tqdm

from jzero import together
from jzero.config import Config
from jzero.metrics_file import Line, rewind
from jzero.waiting import Ended
from jzero.watch import Events, device_memory


class RunError(RuntimeError):
    """A run that cannot go on; the message is one line for the user.

    Attributes:
        good: the last step after which all was well.
    """

    def __init__(self, message: str, good: int) -> None:
        super().__init__(message)
        self.good = good


@dataclass(frozen=True)
class Progress:
    """How far a run has come: what a session starts from, and what a checkpoint says beside the state.

    Attributes:
        step: optimizer steps done, skipped ones too.
        samples: of the training stream, consumed by them; the next step reads on from there.
        skipped: steps whose gradient was not finite.
        evaluated: whether the evaluation after `step` is in the metrics.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    evaluated: bool = False


class Journal:
    """What is written of a run: lines of metrics.jsonl, the same as TensorBoard events, and a progress bar.

    A line of training has step, loss (nats per token), grad_norm (before clipping), lr (of the last update that was not
    skipped), skipped (steps so far), tokens (trained on so far), tokens_per_s and step_s (seconds per step since the
    line before, without what was done `aside`; the first line's include compilation), what `speed` adds (mfu), and
    memory_bytes and peak_memory_bytes of the fullest device where the backend counts.  A line of evaluation has step,
    eval_loss, eval_tokens and, if the run keeps an average of the weights, its ema_eval_loss.  What is not finite is
    null.

    A run in several sessions has the lines of one that never stopped: a session goes on after the lines of the step it
    starts from, and what an earlier one wrote beyond it is set aside (`metrics_file.py`).

    Attributes:
        progress: of the run, up to the metrics taken in.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        speed: Callable[[float], Mapping[str, float]] = lambda _: {},
        start: Progress = Progress(),
        *,
        writes: bool = True,
    ) -> None:
        """Opens the files: `path` and, beside it, events.

        Args:
            path: of metrics.jsonl.
            config: resolved.
            speed: tokens per second -> what else to say about them.
            start: what the session starts from.
            writes: whether anything is written and said; of several processes one does.
        """
        self._start = start
        self._config = config
        self._speed_of = speed
        earlier = rewind(path, self._stays) if writes else []
        self._evals = [(line["step"], math.nan if line["eval_loss"] is None else line["eval_loss"]) for line in earlier]
        evaluated = any(step == start.step for step, _ in self._evals)
        self.progress = dataclasses.replace(start, evaluated=bool(together.broadcast_text("1" if evaluated else "")))
        self._file = path.open("a", encoding="utf-8") if writes else None
        first = start.step + 1 if start.step else 0
        self._events = Events(path.parent, first) if writes and config.log.tensorboard else None
        shown = {"dynamic_ncols": True, "mininterval": 0.1 if sys.stderr.isatty() else 15.0, "disable": not writes}
        self._bar = tqdm(total=config.steps, initial=start.step, unit="step", desc="compiling", **shown)
        self._speed = ""
        self._began, self._aside_s = time.perf_counter(), 0.0
        self._stands_at: float | None = None
        self._logged, self._logged_at = start.step, self.now()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._file:
            self._file.close()
        if self._events:
            self._events.close()

    def trained(self, steps: Iterable[Ended]) -> None:
        """Takes in the metrics of steps that ended, at times of `now`.

        Raises:
            RunError: `optim.max_skipped` steps in a row were skipped.
        """
        for step, metrics, at in steps:
            samples = self.progress.samples + self._config.batch_size
            self.progress = Progress(step, samples, int(metrics["skipped"]))
            failed = metrics["skipped_in_row"] >= self._config.optim.max_skipped
            if failed or step in (1, self._config.steps) or step % self._config.log.every == 0:
                self._log(step, metrics, at)
            elif step == self._start.step + 1:  # it has compiled: no part of the speed of the steps after it
                self._logged, self._logged_at = step, at
            self._bar.set_description("training", refresh=False)
            self._bar.update()
            self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}{self._speed}", refresh=False)
            if failed:
                in_row = int(metrics["skipped_in_row"])
                raise RunError(
                    f"step {step}: the gradient was not finite in {in_row} steps in a row (optim.max_skipped); try a "
                    f"lower optim.lr, a longer warm-up or precision.params = float32",
                    step - in_row,
                )

    def evaluation_is_due(self, step: int) -> bool:
        """Whether an evaluation after `step`, the last one taken in or a later one, belongs in the metrics."""
        due = step in (0, self._config.steps) or step % self._config.log.eval_every == 0
        return due and not (self.progress.evaluated and self.progress.step == step)

    def evaluated(self, result: tuple[float, float], average: tuple[float, float] | None = None) -> None:
        """Takes in an evaluation after the steps taken in, and one of the average of the weights.

        Over no tokens it leaves no trace.

        Args:
            result, average: (loss in nats per token, number of tokens).
        """
        step, (loss, tokens) = self.progress.step, result
        if tokens:
            of_average = {} if average is None else {"ema_eval_loss": average[0]}
            self._write({"step": step, "eval_loss": loss, **of_average, "eval_tokens": int(tokens)})
            self._evals.append((step, loss))
            also = "".join(f", of the averaged weights {value:.4f}" for value in of_average.values())
            self.say(f"step {step}: held-out loss {loss:.4f} nats per token{also}")
        self.progress = dataclasses.replace(self.progress, evaluated=True)

    def now(self) -> float:
        """Seconds on a clock that stands still while something is done `aside`; also for other threads."""
        stands_at = self._stands_at
        return time.perf_counter() - self._aside_s if stands_at is None else stands_at

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile, with idle devices, does not count as time of steps."""
        self._stands_at = at = self.now()
        yield
        self._aside_s, self._stands_at = time.perf_counter() - at, None

    def say(self, line: str) -> None:
        """Prints `line` above the bar."""
        if self._file:
            self._bar.write(line)

    def summary(self) -> str:
        """What the session did, what the whole run did, and what came of it, in two or three lines."""
        start, now, seconds = self._start, self.progress, time.perf_counter() - self._began
        done = "done" if now.step >= self._config.steps else "stopped"
        if start.step:
            here = f"{self._tokens(now) - self._tokens(start):,} tokens"
            lines = [
                f"{done}: {now.step - start.step} steps after step {start.step}, {here} in {seconds:.1f} s",
                f"the whole run: {now.step} steps, {self._tokens(now):,} tokens, {now.skipped} steps skipped",
            ]
        else:
            here = f"{now.step} steps, {self._tokens(now):,} tokens in {seconds:.1f} s"
            lines = [f"{done}: {here}, {now.skipped} steps skipped"]
        if self._evals:
            (_, first), (step, last) = self._evals[0], self._evals[-1]
            at = "" if step == now.step else f", the last after step {step}"
            lines.append(f"held-out loss: {first:.4f} -> {last:.4f} nats per token{at}")
        return "\n".join(lines)

    def check(self) -> None:
        """Whether the run came to anything.

        Raises:
            RunError: all steps, of all sessions, were skipped, or the last held-out loss is not finite.
        """
        if self.progress.step and self.progress.skipped == self.progress.step:
            raise RunError(f"all {self.progress.skipped} steps were skipped: no gradient was finite", 0)
        if self._evals and not math.isfinite(self._evals[-1][1]):
            good = max((step for step, loss in self._evals if math.isfinite(loss)), default=0)
            raise RunError(f"the held-out loss after step {self._evals[-1][0]} is {self._evals[-1][1]}", good)

    def _stays(self, line: Line) -> bool:
        """Whether a line of an earlier session stays: a run that begins anew keeps none."""
        return 0 < self._start.step >= line["step"]

    def _tokens(self, progress: Progress) -> int:
        return progress.samples * self._config.data.seq_len

    def _log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        step_s = (at - self._logged_at) / (step - self._logged)
        tokens_per_s = self._config.batch_size * self._config.data.seq_len / step_s
        speed = {
            "tokens": self._tokens(self.progress),
            "tokens_per_s": tokens_per_s,
            "step_s": step_s,
            **self._speed_of(tokens_per_s),
        }
        self._write({"step": step, **metrics, **speed, **device_memory()})
        mfu = speed.get("mfu")
        if step > self._start.step + 1:  # the first has compiled
            self._speed = f", {tokens_per_s:,.0f} tokens/s" + (f", mfu {mfu:.1%}" if mfu else "")
        self._logged, self._logged_at = step, at

    def _write(self, line: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
        if self._file:
            print(json.dumps(finite), file=self._file, flush=True)
        if self._events:
            self._events.write(line)
