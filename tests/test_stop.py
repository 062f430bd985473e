"""SIGTERM and SIGINT: the run ends at the right place, with the right status, and without a traceback."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train import FakeRun, good
from tiny_run import TINY, batch_for_these_devices

from jzero.checkpoint import Checkpoints
from jzero.config import load
from jzero.journal import Journal
from jzero.loop import Loop
from jzero.loop import fit as fit_loop
from jzero.stop import Interrupted, Stop, _command
from jzero.watch import Trace

ROOT = Path(__file__).parent.parent
TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture(autouse=True)
def handlers_are_restored():
    def installed():
        return [signal.getsignal(TERM), signal.getsignal(INT), sys.unraisablehook, signal.set_wakeup_fd(-1)]

    before = installed()
    yield
    assert installed() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "jzero-signals"]


# The handlers.


@pytest.mark.parametrize("number", [TERM, INT])
def test_what_leaves_files_unless_it_unwinds_is_unwound(number):
    message = f"^stopped by {number.name} before the first step$"
    with pytest.raises(Interrupted, match=message) as raised, Stop() as stop, stop.unwinding():
        signal.raise_signal(number)
    assert raised.value.status == 128 + number


@pytest.mark.parametrize("number", [TERM, INT])
def test_from_the_first_step_on_a_signal_is_noted_and_told(number, capfd):
    with Stop() as stop:
        stop.hold()
        assert stop.asked is None
        signal.raise_signal(number)
        assert stop.asked == number
        assert told(capfd) == f"\n{number.name}: ending after this step; again to end at once\n"


def told(capfd):
    """What the watching thread writes, which is soon."""
    err, end = "", time.monotonic() + 10
    while not err.endswith("\n") and time.monotonic() < end:
        time.sleep(0.01)
        err += capfd.readouterr().err
    return err


def test_a_signal_and_its_echo_are_one():
    # `timeout` sends a signal to its child and then to its child's group; launchers do the like
    with Stop() as stop:
        stop.hold()
        for _ in range(3):
            signal.raise_signal(TERM)
        time.sleep(0.1)
        assert stop.asked == TERM


def test_an_echo_does_not_disturb_the_unwinding():
    unwound = []

    def under_way():
        try:
            signal.raise_signal(INT)
        finally:
            signal.raise_signal(INT)
            unwound.append(True)

    with pytest.raises(Interrupted), Stop() as stop, stop.unwinding():
        under_way()
    assert unwound


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(INT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(INT)
            assert signal.getsignal(INT) == signal.SIG_IGN
        assert stop.asked is None
    finally:
        signal.signal(INT, before)


def test_off_the_main_thread_there_are_no_handlers():
    asked = []

    def run():
        with Stop() as stop:
            stop.hold()
            asked.append(stop.asked)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert asked == [None]


def ends(program, *numbers, pause=0.0):
    """(status, seconds until the end, what is said) of a program that gets signals once it has printed a line."""
    words = [sys.executable, "-c", f"import gc, hashlib, os, time\nfrom jzero.stop import Stop\n{program}"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            for i, number in enumerate(numbers):
                time.sleep(pause if i else 0.1)
                process.send_signal(number)
            start = time.monotonic()
            _, err = process.communicate(timeout=60)
            return process.returncode, time.monotonic() - start, words_of(err)
        finally:
            process.kill()


# The main thread is in C, as in a long compilation, so that no handler in Python runs.
BUSY = "print('ready', flush=True)\nhashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


def test_a_second_signal_ends_the_process_at_once_whatever_the_main_thread_does():
    status, seconds, said = ends(f"stop = Stop().__enter__()\nstop.hold()\n{BUSY}", TERM, INT, pause=1.5)
    assert status == 130
    assert said == [
        "SIGTERM: ending after this step; again to end at once",
        "stopped by SIGINT at once, since it came again",
    ]
    assert seconds < 2


def test_before_the_first_step_the_process_ends_at_once_whatever_the_main_thread_does():
    status, seconds, said = ends(f"stop = Stop().__enter__()\n{BUSY}", TERM)
    assert (status, said) == (143, ["stopped by SIGTERM before the first step"])
    assert seconds < 2


def test_one_of_several_processes_is_named():
    program = "from jzero import ending\nending.is_one_of(1, 2)\nstop = Stop().__enter__()\nstop.hold()"
    assert ends(f"{program}\n{BUSY}", TERM, INT, pause=1.5)[2] == [
        "process 1 of 2: SIGTERM: ending after this step; again to end at once",
        "process 1 of 2: stopped by SIGINT at once, since it came again",
    ]


def test_what_does_not_unwind_is_ended_all_the_same():
    status, seconds, said = ends(
        f"stop = Stop().__enter__()\nwith stop.unwinding():\n {BUSY.replace(chr(10), chr(10) + ' ')}", TERM
    )
    assert (status, said) == (143, ["stopped by SIGTERM before the first step"])
    assert 2 < seconds < 8


def test_an_exception_that_a_callback_swallows_ends_the_process_without_a_traceback():
    program = """
def callback(*_):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
stop = Stop().__enter__()
with stop.unwinding():
    gc.callbacks.append(callback)
    gc.collect()
"""
    status, seconds, said = ends(program, TERM)
    assert (status, said) == (143, ["stopped by SIGTERM before the first step"])
    assert seconds < 2


def test_stderr_that_nobody_reads_does_not_keep_a_second_signal_from_ending_the_process():
    program = f"""
stop = Stop().__enter__()
stop.hold()
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x")
except BlockingIOError:
    os.set_blocking(2, True)
{BUSY}"""
    assert ends(program, TERM, TERM, pause=1.5)[0] == 143


# The loop.


def fit(tmp_path, signalled, evals=(), agreed=bool):
    """A run of 20 steps that gets SIGTERM while the step `signalled` is dispatched, or in the evaluation after it."""

    class Signalled(FakeRun):
        def step(self, state, batch):
            if state + 1 == signalled:
                signal.raise_signal(TERM)
            return super().step(state, batch)

        def evaluate(self, state, batch):
            if signalled == ("evaluation", state):
                signal.raise_signal(TERM)
            return super().evaluate(state, batch)

    settings = load(["--steps", "20", "--log.every", "1", "--log.eval_every", "10", "--data.seq_len", "4"])
    run, saved = Signalled(good), []
    saves = SimpleNamespace(due=lambda step: False, save=lambda progress, state: saved.append((progress.step, state)))
    with Stop() as stop, Journal(tmp_path / "metrics.jsonl", settings) as journal:
        loop = Loop(run, [{}] * 20, evals, journal, Trace(None, tmp_path), saves, stop, agreed=agreed)
        state, number = fit_loop(loop, 0)
    return SimpleNamespace(run=run, state=state, number=number, saved=saved, journal=journal)


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("signalled", [2, 3, 13, 20])
def test_the_run_is_saved_after_the_step_under_way_with_all_metrics_up_to_it(tmp_path, signalled):
    ended = fit(tmp_path, signalled)
    assert (ended.state, ended.number) == (signalled, TERM)
    assert ended.saved == [(signalled, signalled)]  # the step, and the state, which is a count of steps here
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, signalled + 1))


EVALS = [{"loss": 2.0, "weight": 1.0}] * 3


def test_a_run_that_is_asked_to_end_leaves_its_evaluation_to_the_next_session(tmp_path):
    ended = fit(tmp_path, ("evaluation", 10), evals=EVALS)
    assert (ended.number, ended.saved) == (TERM, [(10, 10)])
    assert [line["step"] for line in lines(tmp_path) if "eval_loss" in line] == [0]
    assert ended.run.events.count(("evaluate", 10)) == 1  # of 3 batches
    assert ended.journal.evaluation_is_due(10)


def test_a_signal_in_a_step_that_is_evaluated_does_not_wait_for_the_evaluation(tmp_path):
    ended = fit(tmp_path, 10, evals=EVALS)
    assert ended.saved == [(10, 10)]
    assert ("evaluate", 10) not in ended.run.events


def test_the_run_goes_on_until_all_processes_agree(tmp_path):
    asked = []

    def late(mine):
        asked.append(mine)
        return len(asked) > 2 and asked[-3]

    ended = fit(tmp_path, 5, agreed=late)
    assert (ended.number, ended.saved) == (TERM, [(7, 7)])


def test_a_process_ends_with_the_others_though_nobody_signalled_it(tmp_path):
    asked = []

    def agreed(mine):
        asked.append(mine)
        return len(asked) >= 7

    ended = fit(tmp_path, None, agreed=agreed)
    assert (ended.number, ended.saved, any(asked)) == (TERM, [(7, 7)], False)


def test_nobody_asks_and_the_run_is_complete(tmp_path):
    ended = fit(tmp_path, None)
    assert (ended.state, ended.number, ended.saved) == (20, 0, [])


# The command line.


@pytest.fixture
def command_line(tmp_path):
    """Starts a long run."""
    started = []

    def start(*argv):
        noise = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": str(ROOT)}
        (tmp_path / "corpus.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
        words = [sys.executable, "-m", "jzero.train", *TINY, "--data.path", "corpus.txt", "--run.dir", "run"]
        words += [
            "--batch_size",
            batch_for_these_devices(),
            "--steps",
            "1000000",
            "--log.every",
            "1",
            "--checkpoint.every",
            "1000000",
            *argv,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, cwd=tmp_path, env=os.environ | noise, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def words_of(err):
    """The lines of stderr without the progress bar and what plugins say when JAX starts."""
    found = [line.strip() for line in err.replace("\r", "\n").splitlines()]
    said = ("stopped", "process", "error", "SIG", "Traceback", "Exception", "Fatal")
    return [line for line in found if line.startswith(said)]


def wait_for(path, process):
    end = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "profile"), [(INT, "2-999999"), pytest.param(TERM, "none", marks=pytest.mark.slow)])
def test_a_run_that_is_signalled_ends_after_its_step_and_says_where(tmp_path, command_line, number, profile):
    process = command_line("--log.profile", profile)
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    process.send_signal(number)
    process.send_signal(number)  # as `timeout` does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert words_of(err) == [f"{number.name}: ending after this step; again to end at once"]
    steps = [line["step"] for line in lines(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert out.splitlines()[-1] == (
        f"stopped by {number.name} after step {steps[-1]} of 1000000, which is saved; "
        f"to go on: python -m jzero.train --config {tmp_path}/run/config.yaml (on other devices with --mesh dp=-1)"
    )
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [steps[-1]]
    traces = list((tmp_path / "run").rglob("*.xplane.pb"))
    assert len(traces) == (profile != "none")  # one that was under way has been written


@pytest.mark.parametrize(("number", "after_s"), [(INT, 0.3), (TERM, 1.0), (INT, 2.5), (TERM, 4.0)])
def test_a_start_that_is_signalled_ends_soon_in_one_line(command_line, number, after_s):
    process = command_line()
    time.sleep(after_s)  # while it imports, reads, traces or compiles, on any machine
    process.send_signal(number)
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert time.monotonic() - start < 30
    (line,) = words_of(err)
    assert line in (
        f"stopped by {number.name} before the first step",
        f"{number.name}: ending after this step; again to end at once",
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize("after_s", [0.2 + k * 0.4 for k in range(20)])  # before, it is no program of ours
def test_no_moment_of_a_start_loses_a_signal(command_line, number, after_s):
    test_a_start_that_is_signalled_ends_soon_in_one_line(command_line, number, after_s)


@pytest.mark.parametrize(
    ("argv", "commands"),
    [
        (["python", "-m", "jzero.train", "--stage", "3"], True),
        (["python", "-X", "dev", "-m", "jzero.train"], True),
        (["python", "-m", "theirs.train", "-m", "jzero.train"], False),
        (["python", "-m", "jzerox.train"], False),
        (["python", "-m"], False),
        (["python", "train.py"], False),
    ],
)
def test_programs_that_import_the_package_keep_their_own_handlers(argv, commands):
    assert bool(_command(argv)) == commands
