"""Checkpoints of several processes: written by all of them, and read by however many there are the next time."""

import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from processes import end, spawn_run, wait
from same_program import same_program
from saved_arrays import arrays, losses, names
from tiny_run import TINY, random_text

from jzero import train

GONE = ("another process is gone", "another task died")  # said by us, or by JAX if it is first to see it
UNFINISHED = ".orbax-checkpoint-tmp"
STEPS, SAVED = 6, 3  # of a run, and the step that others go on from
LONG = 40  # steps of a run that is killed under way
LAYOUTS = {"s3dp8": ("--stage", "3", "--mesh", "dp=8"), "s1dp4tp2": ("--stage", "1", "--mesh", "dp=4,tp=2")}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Failed to open:UserWarning"),
    pytest.mark.skipif(jax.device_count() != 8, reason="compares with runs on the 8 devices of this process"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return random_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    monkeypatch.setattr(train, "make_run", same_program)


def flags(corpus, run_dir, *more):
    common = [*TINY, "--model.layers", "1", "--data.eval_batches", "1", "--batch_size", "16"]
    common += ["--run.dir", str(run_dir), "--data.path", str(corpus), "--run.cache_dir", "none"]
    common += ["--log.every", "1", "--log.tensorboard", "false", "--log.eval_every", "1000"]
    return [*common, "--steps", str(STEPS), "--checkpoint.every", str(SAVED), "--checkpoint.keep", "none", *more]


def trained(processes, argv, cwd):
    """What each process said of a run that went well; one process is this one, with its 8 devices, and is not heard."""
    if processes == 1:
        assert train.main(argv) == 0
        return []
    ended = wait(spawn_run(processes, argv, cwd))
    assert [process.status for process in ended] == [0] * processes, [process.err[-3000:] for process in ended]
    return ended


def crashed(run_dir, copy):
    """A copy of a run as a late crash leaves it: SAVED is its newest step, and its metrics go on after that."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / str(STEPS))
    return copy


def assert_same_run(got, wanted):
    """Every step once, with the numbers of the other run."""
    got, wanted = losses(got), losses(wanted)
    assert [row[0] for row in got] == [row[0] for row in wanted] == list(range(1, len(wanted) + 1))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


# Any number of processes goes on from what any other has saved.


def test_two_processes_train_as_one_end_when_one_is_signalled_and_one_goes_on(corpus, tmp_path):
    two, whole = tmp_path / "two", tmp_path / "whole"
    of_any_length = ["--optim.schedule", "constant", "--optim.warmup_steps", "0", "--checkpoint.every", "1000000"]
    argv = flags(corpus, two, *of_any_length, "--steps", "1000000")
    started = spawn_run(2, argv, tmp_path)
    try:
        happens(started, lambda: (two / "metrics.jsonl").exists() and len(losses(two)) >= 3)
        started[1].send_signal(signal.SIGTERM)
    finally:
        speaker, other = wait(started)
    assert (speaker.status, other.status) == (143, 143), speaker.err[-2000:] + other.err[-2000:]
    (step,) = complete(two)
    assert [row[0] for row in losses(two)] == list(range(1, step + 1))
    assert "2 x 4 fake CPU devices" in speaker.out
    assert f"stopped by SIGTERM after step {step} of 1000000" in speaker.out
    said = "process 1 of 2: SIGTERM: ending after this step; again to end at once"
    assert (other.out, other.err.strip()) == ("", said)

    for run_dir in (two, whole):
        trained(1, flags(corpus, run_dir, *of_any_length, "--steps", str(step + 3)), tmp_path)
    assert_same_run(two, whole)


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request, corpus, tmp_path_factory):
    """(flags of a layout, number of processes -> directory of a run of so many)."""
    path, layout = tmp_path_factory.mktemp("runs"), LAYOUTS[request.param]
    for count in (1, 2):
        trained(count, flags(corpus, path / str(count), *layout), path)
    return layout, {count: path / str(count) for count in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 4), (1, 2)])
def test_a_run_goes_on_with_any_number_of_processes(runs, corpus, tmp_path, old, new):
    layout, by = runs
    run_dir = crashed(by[old], tmp_path / "run")
    trained(new, flags(corpus, run_dir, *layout), tmp_path)
    assert_same_run(run_dir, by[1])
    assert names(run_dir / "checkpoints") == [str(SAVED), str(STEPS)]


RESAVE = """
import sys
import jzero
from jzero import distributed, together
from jzero.build import make_run
from jzero.config import load, resolve

source, target, *argv = sys.argv[1:]
config = load(argv)
distributed.start_cpu_devices(distributed.start(**config.distributed.model_dump()))
devices, hosts = together.devices_by_host()
config = resolve(config, len(devices), "cpu", hosts)
run = make_run(config, jzero.make_mesh(config.mesh, devices))
restored = jzero.Checkpoints(source).restore(run.abstract_state)
with jzero.Checkpoints(target) as checkpoints:
    checkpoints.save(restored.step, restored.state)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 4), (1, 2)])
def test_a_state_is_the_same_in_any_number_of_processes(runs, corpus, tmp_path, old, new):
    layout, by = runs
    source, target = by[old] / "checkpoints", tmp_path / "checkpoints"
    argv = flags(corpus, "none", *layout)
    ended = wait(spawn_run(new, argv, tmp_path, program=("-c", RESAVE, str(source), str(target))))
    assert [process.status for process in ended] == [0] * new, [process.err[-3000:] for process in ended]
    assert checksums(target / str(STEPS)) == checksums(source / str(STEPS))
    got, wanted = arrays(tmp_path, STEPS), arrays(by[old], STEPS)
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


def checksums(step_dir):
    found = json.loads((step_dir / "seal.json").read_text())["checksums"]
    assert found
    return found


# A process dies.


def long_run(corpus, run_dir):
    more = ["--steps", str(LONG), "--checkpoint.every", "2", "--checkpoint.keep", "2"]
    return flags(corpus, run_dir, *LAYOUTS["s3dp8"], "--distributed.heartbeat_timeout_s", "10", *more)


@pytest.fixture(scope="module")
def never_killed(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    trained(1, long_run(corpus, run_dir), run_dir.parent)
    return run_dir


def unfinished(run_dir):
    """Steps that a save has begun."""
    left = [name.partition(UNFINISHED) for name in names(run_dir / "checkpoints")]
    return [int(step) for step, mark, rest in left if step.isdecimal() and mark and not rest.endswith("removed")]


def complete(run_dir):
    return sorted(int(name) for name in names(run_dir / "checkpoints") if name.isdecimal())


def killed(started, victim, run_dir, moment):
    """Kills one of the processes some steps into the run; what the others said, and the step that it was to save.

    In a save: while there is a directory of an unfinished step, of which it has not written its part, since the step
    does not become complete without it.
    """
    step = None
    try:
        happens(started, lambda: len(complete(run_dir)) >= 2)
        while moment == "save":
            happens(started, lambda: unfinished(run_dir), every_s=0.002)
            started[victim].send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            if found := unfinished(run_dir):
                (step,) = found
                break
            started[victim].send_signal(signal.SIGCONT)
    except BaseException:
        for process in started:
            end(process)
        raise
    end(started[victim])
    return wait([process for process in started if process is not started[victim]], 60), step


def happens(started, condition, every_s=0.05):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        assert [process.poll() for process in started] == [None] * len(started)
        time.sleep(every_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment", "restarts"), [(1, "training", [2, 1]), (1, "save", [2]), (0, "save", [1])]
)
def test_a_run_that_loses_a_process_ends_and_goes_on_from_its_newest_step(
    corpus, never_killed, tmp_path, victim, moment, restarts
):
    run_dir = tmp_path / "run"
    (other,), step = killed(spawn_run(2, long_run(corpus, run_dir), tmp_path), victim, run_dir, moment)
    assert other.status != 0
    assert any(words in other.err for words in GONE), other.err
    left = complete(run_dir)
    assert len(left) >= 2
    assert step not in left

    for processes in restarts:
        again = shutil.copytree(run_dir, tmp_path / str(processes))
        said = trained(processes, long_run(corpus, again), tmp_path)
        assert all(f"goes on from step {left[-1]} in" in speaker.out for speaker in said[:1])
        assert_same_run(again, never_killed)
        assert names(again / "checkpoints") == sorted([str(LONG - 2), str(LONG)])


# A step is damaged, or cannot be written.


def newest_data(run_dir):
    """The largest file that process 1 has written of the newest step."""
    files = (run_dir / "checkpoints" / str(STEPS) / "state" / "ocdbt.process_1" / "d").iterdir()
    return max(files, key=lambda path: path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, flip])
def test_all_processes_leave_a_damaged_step_for_the_same_one(corpus, two, tmp_path, damage):
    run_dir = shutil.copytree(two, tmp_path / "run")
    damage(newest_data(run_dir))
    speaker, other = trained(2, flags(corpus, run_dir, *LAYOUTS["s3dp8"]), tmp_path)
    assert f"warning: step {STEPS} in {run_dir / 'checkpoints'} is damaged: " in speaker.out
    assert f"goes on from step {SAVED} in" in speaker.out
    assert (other.out, other.err) == ("", "")
    assert names(run_dir / "checkpoints") == [str(SAVED), str(STEPS), f"{STEPS}.replaced"]
    assert_same_run(run_dir, two)


@pytest.mark.slow
def test_what_no_process_can_go_on_from_one_of_them_refuses(corpus, two, tmp_path):
    first, second = wait(spawn_run(2, flags(corpus, two, *LAYOUTS["s3dp8"], "--seed", "1"), tmp_path))
    assert (first.status, second.status) == (2, 2)
    (line,) = first.err.splitlines()
    assert line.startswith(f"error: seed = 1, and was 0 at step {STEPS} in {two / 'checkpoints'}: a run goes on with")
    assert not second.err


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """A run of two processes."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    trained(2, flags(corpus, run_dir, *LAYOUTS["s3dp8"]), run_dir.parent)
    return run_dir


LIMITED = """
import resource, sys
from jzero import train
if sys.argv[sys.argv.index("--distributed.process") + 1] == sys.argv.pop(1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_cannot_write_ends_all_and_is_named_at_the_next_save(corpus, tmp_path, victim):
    argv = flags(corpus, tmp_path / "run", "--checkpoint.every", "2", "--model.layers", "2")
    first, second = wait(spawn_run(2, argv, tmp_path, program=("-c", LIMITED, str(victim))), 60)
    assert (first.status, second.status) == (1, 1)
    (line,) = [line for line in first.err.splitlines() if line.startswith("error:")]
    assert line == (
        f"error: step 2 could not be written to {tmp_path / 'run' / 'checkpoints'} "
        f"(process {victim} of 2: File too large); there is no other"
    )
    assert not second.err
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3, 4]
    assert names(tmp_path / "run" / "checkpoints") == []


AGAIN = """
import resource
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with jzero.Checkpoints(target + "-again") as checkpoints:
    if not together.is_first():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    checkpoints.save(restored.step, restored.state)
    try:
        checkpoints.wait()
    except jzero.CheckpointError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for _ in range(2):
        checkpoints.save(restored.step, restored.state)
        checkpoints.wait()
        restored = dataclasses.replace(restored, step=restored.step + 1)
"""


@pytest.mark.slow
def test_a_program_that_outlives_a_failed_save_saves_the_same_step_again(corpus, two, tmp_path):
    argv = flags(corpus, "none", *LAYOUTS["s3dp8"])
    words = ("-c", f"import dataclasses{RESAVE}{AGAIN}", str(two / "checkpoints"), str(tmp_path / "checkpoints"))
    ended = wait(spawn_run(2, argv, tmp_path, program=words), 60)
    assert [process.status for process in ended] == [0, 0], [process.err[-3000:] for process in ended]
    for process in ended:
        assert f"step {STEPS} could not be written to " in process.out
        assert "(process 1 of 2: File too large); there is no other" in process.out
    again = tmp_path / "checkpoints-again"
    assert names(again) == [str(STEPS), str(STEPS + 1)]
    for step in names(again):
        assert checksums(again / step) == checksums(two / "checkpoints" / str(STEPS))


@pytest.mark.slow
def test_what_processes_keep_on_the_host_is_saved_by_one_of_them_and_goes_on_anywhere(corpus, tmp_path):
    """Over `node`, which the processes are, the state is in copies."""
    layout = ["--stage", "2", "--mesh", "node=2,dp=4", "--zero.axes", "dp", "--offload.group_size", "6000"]
    host, files = ["--offload.optimizer", "host"], ["--offload.optimizer", "nvme", "--offload.dir", str(tmp_path / "t")]
    trained(2, flags(corpus, tmp_path / "two", *layout, *host), tmp_path)
    on_cpu = [*host, "--offload.update", "cpu"]
    for name, processes, where in (("one", 1, []), ("again", 2, files), ("cpu", 2, on_cpu)):
        run_dir = crashed(tmp_path / "two", tmp_path / name)
        trained(processes, flags(corpus, run_dir, *layout, *where), tmp_path)
        np.testing.assert_allclose(losses(run_dir), losses(tmp_path / "two"), rtol=1e-5)
        before, after = arrays(tmp_path / "two", STEPS), arrays(run_dir, STEPS)
        assert before.keys() == after.keys()
        for key, x in before.items():
            np.testing.assert_allclose(after[key].astype(float), x.astype(float), rtol=1e-3, atol=1e-6, err_msg=key)
