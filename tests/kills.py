"""A training run that is killed again and again at moments drawn from a seed, and what it left each time."""

import json
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from processes import end, environment
from saved_arrays import names
from tiny_run import TINY

UNFINISHED = ".orbax-checkpoint-tmp"
EVERY = 2
STEPS_PER_KILL = 16  # the run is to outlive the kills
# "saving": while a save is under way; "training": after the session's first save; "any": at any time from its start.
AIMS = ("saving", "saving", "training", "any")
WITHIN_S = {"saving": 0.15, "training": 1.0, "any": 8.0}
PATIENCE_S = 120


@dataclass(frozen=True)
class Kill:
    """A session that was killed.

    Attributes:
        aim: one of `AIMS`.
        resumed: the step it went on from, 0 for a fresh start, None if it was killed before it said so.
        trained: last step in metrics.jsonl when it was dead, 0 for none.
        complete: steps of the directories that were complete then.
        unfinished: names of the directories of unfinished steps.
        new: those of them that this session has made.
        entries: how many names there were in the directory of checkpoints.
    """

    aim: str
    resumed: int | None
    trained: int
    complete: list[int]
    unfinished: list[str]
    new: list[str]
    entries: int

    @property
    def hit(self) -> str:
        """What was under way when it died."""
        if self.resumed is None:
            return "start"
        removal = any(name.endswith("removed") for name in self.new)
        return "removal of an old step" if removal else "save" if self.new else "training"


class Sessions:
    """One command that is started again and again."""

    def __init__(self, directory: Path, corpus: Path, steps: int) -> None:
        self.run_dir, self.checkpoints = directory, directory / "checkpoints"
        self._log = directory.with_suffix(".log")
        self._command = [sys.executable, "-m", "jzero.train", "--run.dir", str(directory), "--data.path", str(corpus)]
        self._command += ["--run.cache_dir", str(directory.parent / "programs"), "--steps", str(steps), *TINY]
        self._command += ["--checkpoint.every", str(EVERY), "--log.every", "1", "--log.tensorboard", "false"]
        self._command += ["--batch_size", "4", "--log.eval_every", "1000000", "--model.dropout", "0.1"]

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"}
        env = environment(JAX_ENABLE_COMPILATION_CACHE="true", **flags)
        with self._log.open("wb") as log:
            return subprocess.Popen([*self._command, *more], stdout=log, stderr=subprocess.STDOUT, env=env)

    def finish(self, *more: str) -> str:
        """Runs to the end, and returns what was said."""
        process = self.start(*more)
        try:
            status = process.wait(PATIENCE_S)
        finally:
            end(process)
        assert status == 0, self.said()
        return self.said()

    def kill(self, aim: str, rng: random.Random) -> Kill:
        """Starts a session and kills it at a moment of its own."""
        before, old, first, process = set(self._names()), self._inodes(), self._newest(), self.start()
        try:
            if aim != "any":
                self._wait(process, lambda: set(self._names()) - before)
            if aim == "saving":
                for _ in range(rng.randrange(4)):
                    self._wait(process, lambda: not self._unfinished())
                    self._wait(process, self._unfinished)
            self._pause(rng.uniform(0, WITHIN_S[aim]), until_step=first + STEPS_PER_KILL - 3 * EVERY)
        finally:
            end(process)
        assert process.returncode == -9, f"the run ended by itself: {self.said()}"
        left = self._names()
        lines = self.lines()
        return Kill(
            aim=aim,
            resumed=self.resumed(),
            trained=max((line["step"] for line in lines if "loss" in line), default=0),
            complete=sorted(int(name) for name in left if name.isdecimal()),
            unfinished=self._unfinished(),
            new=[name for name, inode in self._inodes().items() if old.get(name) != inode],
            entries=len(left),
        )

    def lines(self) -> list[dict]:
        """Of metrics.jsonl; the last one may be cut off."""
        path = self.run_dir / "metrics.jsonl"
        raw = path.read_text().split("\n") if path.exists() else [""]
        return [json.loads(line) for line in raw[:-1]]

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def resumed(self) -> int | None:
        """What the session that was started last went on from."""
        said = self.said()
        if found := re.search(r"goes on from step (\d+) in", said):
            return int(found[1])
        return 0 if "step 0: held-out loss" in said else None

    def _names(self) -> list[str]:
        return names(self.checkpoints)

    def _unfinished(self) -> list[str]:
        return [name for name in self._names() if UNFINISHED in name]

    def _inodes(self) -> dict[str, int]:
        return {name: (self.checkpoints / name).stat().st_ino for name in self._unfinished()}

    def _newest(self) -> int:
        return max((int(name) for name in self._names() if name.isdecimal()), default=0)

    def _pause(self, seconds: float, until_step: int) -> None:
        """Sleeps, but not until a session has taken more steps than its share: a fast machine would end the run."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._newest() < until_step:
            time.sleep(0.002)

    def _wait(self, process, happens) -> None:
        until = time.monotonic() + PATIENCE_S
        while not happens():
            assert process.poll() is None, self.said()
            assert time.monotonic() < until, "nothing happens"
            time.sleep(0.002)


def kill_again_and_again(sessions: Sessions, kills: int, seed: int) -> list[Kill]:
    """The kills, in order; the run is not at its end then."""
    rng = random.Random(seed)
    return [sessions.kill(AIMS[i % len(AIMS)], rng) for i in range(kills)]
