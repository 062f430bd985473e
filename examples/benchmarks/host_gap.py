"""Time in which no device works between two steps, in a profiler trace of a training run.

A step's work are the operations of its program: on an accelerator the events on its device's streams, on the CPU
backend the events that carry an operation's name on the threads of the process.  For step k and the next one, on all
devices together:

    gap  = start of the first operation of step k + 1 - end of the last operation of step k, at least 0
    step = start of the first operation of step k + 1 - start of the first operation of step k

What is printed is the sum of gaps over the sum of steps.  In a gap the host has not handed over the next step yet; a
wait inside of a step, of one device for another, is no gap.

    python examples/benchmarks/host_gap.py [--trace DIRECTORY] [--steps 40] [flags of jzero.train]

Without a trace it trains the default run, its last 30 steps traced, in a directory that is removed afterwards.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jax.profiler import ProfileData

PROGRAM = "jit_train_step"
TRACED = 30


def main() -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--trace", type=Path, help="a directory with a trace of `jzero.train --log.profile`")
    cli.add_argument("--steps", type=int, default=40)
    args, flags = cli.parse_known_args()
    if args.trace:
        return report(args.trace)
    from jzero import train

    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        window = f"{max(1, args.steps - TRACED)}-{args.steps - 1}"
        status = train.main(["--run.dir", str(run), "--steps", str(args.steps), "--log.profile", window, *flags])
        return status or report(run / "profile")


def report(directory: Path) -> int:
    """Prints gaps and steps of the trace under `directory`; 1 if there is nothing to measure."""
    steps = executions(directory)
    if len(steps) < 2:
        print(f"{directory}: no trace with two steps of {PROGRAM}", file=sys.stderr)
        return 1
    pairs = list(itertools.pairwise(steps))
    gaps = [max(0.0, later[0] - earlier[1]) for earlier, later in pairs]
    whole = [later[0] - earlier[0] for earlier, later in pairs]
    print(
        f"{len(steps)} steps: {statistics.median(whole) / 1e6:.2f} ms each, gap {statistics.median(gaps) / 1e6:.3f} ms "
        f"(medians; largest {max(gaps) / 1e6:.3f} ms); no device works in {sum(gaps) / sum(whole):.3%} of the time"
    )
    return 0


def executions(directory: Path) -> list[tuple[float, float]]:
    """(start, end) in ns of every execution of the training step, over all devices, in order."""
    found: dict[int, tuple[float, float]] = {}
    for path in sorted(directory.rglob("*.xplane.pb")):
        for run, start, end in operations(path):
            first, last = found.get(run, (start, end))
            found[run] = min(first, start), max(last, end)
    return sorted(found.values())


def operations(path: Path) -> Iterator[tuple[int, float, float]]:
    """(run, start, end) of all operations of the training step: devices of one execution have one run id."""
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == PROGRAM and "run_id" in stats:
                    yield stats["run_id"], event.start_ns, event.end_ns


if __name__ == "__main__":
    sys.exit(main())
