"""The training loop: dispatches steps ahead of their metrics, saves, evaluates, and ends when it is told to."""

import math
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

import jzero
from jzero import data, watch
from jzero.journal import Journal
from jzero.resume import Saves
from jzero.stop import Stop
from jzero.waiting import Waiting

IN_FLIGHT = 2  # steps dispatched beyond the one whose metrics are read


@dataclass(frozen=True)
class Loop:
    """What the loop works with, beside the state.

    Attributes:
        run: the compiled step.
        batches: of the steps that are left.
        evals: batches of an evaluation.
        journal: knows how far the run has come.
        trace: of the steps to profile.
        saves: the checkpoints.
        stop: whether a signal asks this process to end.
        averages: whether the run keeps an average of its weights, which is evaluated too.
        agreed: given whether this process is asked to end, says whether all processes end.
    """

    run: jzero.Run
    batches: Iterable[data.Batch]
    evals: Iterable[data.Batch]
    journal: Journal
    trace: watch.Trace
    saves: Saves
    stop: Stop
    averages: bool = False
    agreed: Callable[[bool], bool] = bool

    def ends(self) -> bool:
        """Whether all processes end after this step; True once, True from then on."""
        return self.agreed(self.stop.asked is not None)


def fit(loop: Loop, state: jzero.TrainState) -> tuple[jzero.TrainState, int]:
    """The loop: dispatches steps, and reads the metrics of a step when later ones are on their way.

    Returns:
        The state after the last step, and the number of the signal that ended the loop, 0 for none.
    """
    run, journal, waiting = loop.run, loop.journal, Waiting(IN_FLIGHT, loop.journal.now)
    step = journal.progress.step
    if journal.evaluation_is_due(step):
        take_evaluation(loop, state)
    loop.trace.dispatched(step, None)
    for step, batch in enumerate(loop.batches, start=journal.progress.step + 1):
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, metrics = run.step(state, run.put(batch))
        loop.stop.hold()  # what comes from here on finds a state that is worth keeping
        loop.trace.dispatched(step, metrics)
        waiting.put(step, metrics)
        journal.trained(waiting.ready())
        if loop.saves.due(step):
            journal.trained(waiting.rest())  # first: the next session begins with the lines after this step
            with journal.aside():
                loop.saves.save(journal.progress, state)
        if journal.evaluation_is_due(step):
            journal.trained(waiting.rest())
            take_evaluation(loop, state)
        if loop.ends():
            journal.trained(waiting.rest())
            loop.saves.save(journal.progress, state)
            return state, loop.stop.asked or signal.SIGTERM  # the second: another process was asked
    return state, 0


def take_evaluation(loop: Loop, state: jzero.TrainState) -> None:
    """Tells the journal the held-out loss of the weights and, if the run keeps one, of their average.

    A run that is asked to end does not stay for it; the session that goes on from here takes it.
    """
    states = [state, loop.run.averaged(state)] if loop.averages else [state]
    with loop.journal.aside():
        results = [evaluate(loop.run, each, loop.evals, loop.ends) for each in states]
    if None not in results:
        loop.journal.evaluated(*filter(None, results))


def evaluate(
    run: jzero.Run,
    state: jzero.TrainState,
    evals: Iterable[data.Batch],
    ends: Callable[[], bool] = lambda: False,
) -> tuple[float, float] | None:
    """(loss per token in nats, number of tokens) over all batches: the sum of losses over the sum of weights.

    Args:
        ends: asked before every batch; the answer True ends the evaluation, without a result.
    """
    waiting, losses, weights = deque[Any](), [0.0], [0.0]

    def read() -> None:
        result = waiting.popleft()
        weights.append(float(result["weight"]))
        losses.append(float(result["loss"]) * weights[-1])

    for batch in evals:
        if ends():
            return None
        waiting.append(run.evaluate(state, run.put(batch)))
        if len(waiting) > IN_FLIGHT:  # a long evaluation does not wait in device memory
            read()
    while waiting:
        read()
    tokens = math.fsum(weights)
    return (math.fsum(losses) / tokens if tokens else math.nan), tokens
