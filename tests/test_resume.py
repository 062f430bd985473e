"""A run that was stopped, killed or moved goes on as if nothing had happened."""

import json
import os
import shutil
import signal
import time
from collections import Counter

import jax
import numpy as np
import pytest
from processes import end, spawn, wait
from same_program import same_program
from saved_arrays import arrays, losses, names
from tiny_run import TINY, batch_for_these_devices, random_text

from jzero import seal, train
from jzero.data import sample_ids
from jzero.journal import Journal

pytestmark = pytest.mark.filterwarnings("ignore:Failed to open:UserWarning")
STEPS = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return random_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    """Sessions with the same settings share their program: `test_kills.py` has sessions that do not."""
    monkeypatch.setattr(train, "make_run", same_program)


def flags(corpus, run_dir, *more):
    common = ["--run.dir", str(run_dir), "--data.path", str(corpus), "--run.cache_dir", "none", *TINY]
    common += ["--log.every", "1", "--log.eval_every", "1000", "--log.tensorboard", "false"]
    return [*common, "--batch_size", batch_for_these_devices(), *more]


class Crash(BaseException):
    """What nobody catches."""


def crash_at(monkeypatch, step):
    taken = Journal.trained

    def trained(self, steps):
        taken(self, steps)
        if self.progress.step >= step:
            raise Crash

    monkeypatch.setattr(Journal, "trained", trained)


def test_two_crashes_change_no_bit_of_a_run(corpus, tmp_path, monkeypatch):
    """With dropout, four microbatches, a schedule, an average of the weights and epochs that end under way."""
    more = ["--steps", str(STEPS), "--checkpoint.every", "10", "--stage", "3", "--micro_batch", "1"]
    more += ["--batch_size", str(4 * jax.device_count()), "--model.dropout", "0.1", "--optim.ema", "0.9"]
    assert train.main(flags(corpus, tmp_path / "whole", *more)) == 0
    for step in (23, 38):
        crash_at(monkeypatch, step)
        with pytest.raises(Crash):
            train.main(flags(corpus, tmp_path / "parts", *more))
        monkeypatch.undo()
    assert train.main(flags(corpus, tmp_path / "parts", *more)) == 0

    assert [step for step, *_ in losses(tmp_path / "whole")] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = arrays(tmp_path / "whole", STEPS), arrays(tmp_path / "parts", STEPS)
    assert whole.keys() == parts.keys()
    for name, x in whole.items():
        np.testing.assert_array_equal(parts[name], x, err_msg=name)


# What checkpoint.resume asks for, and what is there.


@pytest.fixture(scope="module")
def old(corpus, tmp_path_factory):
    """A run of six steps with checkpoints after 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("old") / "run"
    assert train.main(flags(corpus, run_dir, *SHORT)) == 0
    return run_dir


SHORT = ["--steps", "6", "--checkpoint.every", "2", "--checkpoint.keep", "none", "--stage", "2"]


@pytest.fixture
def run_dir(old, tmp_path):
    """A copy of the old run."""
    return shutil.copytree(old, tmp_path / "run")


@pytest.fixture
def begins(monkeypatch):
    """The steps that sessions begin after, which train nothing."""
    found = []

    def fit(loop, state):
        found.append(loop.journal.progress.step)
        assert int(state.step) == found[-1]
        return state, 0

    monkeypatch.setattr(train, "fit", fit)
    return found


def tree(path):
    """Every file below a directory, with its size and the time of its last change; the lock is no content."""
    files = [f for f in path.rglob("*") if f.is_file() and f.name != ".lock"]
    return {str(f.relative_to(path)): (f.stat().st_size, f.stat().st_mtime_ns) for f in files}


def refused(capsys, argv, parent):
    """The one line that a run ends with that cannot begin; nothing has changed on the disk."""
    before = tree(parent)
    capsys.readouterr()
    assert train.main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert tree(parent) == before
    return err


def lay_out(old, run_dir, there):
    """A run directory with so much of a run."""
    if there == "nothing":
        return
    run_dir.mkdir()
    if there == "empty":
        return
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(old / name, run_dir)
    (run_dir / "checkpoints" / "8.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    if there == "several":
        for step in (2, 4, 6):
            shutil.copytree(old / "checkpoints" / str(step), run_dir / "checkpoints" / str(step))


BEGINS = {
    ("auto", "nothing"): 0,
    ("auto", "empty"): 0,
    ("auto", "unfinished"): 0,
    ("auto", "several"): 6,
    ("must", "several"): 6,
    ("never", "nothing"): 0,
    ("never", "empty"): 0,
    ("4", "several"): 4,
}
ENDS = {
    ("must", "nothing"): "there is no complete checkpoint in",
    ("must", "empty"): "there is no complete checkpoint in",
    ("must", "unfinished"): "there is no complete checkpoint in",
    ("never", "unfinished"): "already holds a run",
    ("never", "several"): "already holds a run",
    ("4", "nothing"): "there is no complete checkpoint in",
    ("4", "empty"): "there is no complete checkpoint in",
    ("4", "unfinished"): "there is no complete checkpoint in",
    ("5", "several"): "there are 2, 4, 6",
    ("8", "several"): "there are 2, 4, 6",
}


@pytest.mark.parametrize(("asked", "there"), BEGINS)
def test_a_run_begins_after_the_step_that_is_asked_for(corpus, old, tmp_path, begins, asked, there):
    lay_out(old, tmp_path / "run", there)
    assert train.main(flags(corpus, tmp_path / "run", *SHORT, "--checkpoint.resume", asked)) == 0
    assert begins == [BEGINS[asked, there]]


@pytest.mark.parametrize(("asked", "there"), ENDS)
def test_what_is_asked_for_and_is_not_there_ends_with_status_2(corpus, old, tmp_path, begins, capsys, asked, there):
    lay_out(old, tmp_path / "run", there)
    err = refused(capsys, flags(corpus, tmp_path / "run", *SHORT, "--checkpoint.resume", asked), tmp_path)
    assert ENDS[asked, there] in err
    assert asked in err
    assert begins == []


def test_a_run_without_a_name_has_nothing_to_go_on_from(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "run.dir" in refused(capsys, [*SHORT, *TINY, "--checkpoint.resume", "must"], tmp_path)


# What may change.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--model.width", "32"], ["checkpoint.resume", "has shape", "in the checkpoint and", "in this run"]),
        (["--model.layers", "3"], ["has shape (2,", "in the checkpoint and (3,", "(model.layers = 3, and was 2)"]),
        (["--model.learned_positions", "64"], ["checkpoint.resume", "is not in the checkpoint"]),
        (["--model.norm_eps", "1e-4"], ["model.norm_eps = 0.0001, and was 1e-05 at step 6"]),
        (["--optim.name", "lion"], ["opt_state", "which this run does not have", "optim.name = lion, and was adamw"]),
        (["--optim.name", "adafactor"], ["checkpoint.resume", "opt_state", "is not in the checkpoint"]),
        (["--seed", "1"], ["seed = 1, and was 0 at step 6", "run.dir"]),
        (["--data.eval_fraction", "0.3"], ["data.eval_fraction = 0.3, and was"]),
        (["--data.seq_len", "8"], ["data.seq_len = 8, and was 16"]),
        (["--data.path", "README.md"], ["data.path: ", "training sequences, digest", "the same data"]),
        (["--steps", "5"], ["steps = 5 is less than step 6 in"]),
    ],
)
def test_another_run_is_refused_in_one_line(corpus, run_dir, begins, capsys, change, words):
    err = refused(capsys, flags(corpus, run_dir, *SHORT, *change), run_dir.parent)
    for word in words:
        assert word in err
    assert begins == []


def test_other_text_of_the_same_length_is_refused(corpus, run_dir, begins, capsys, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text().swapcase())
    err = refused(capsys, flags(other, run_dir, *SHORT), run_dir.parent)
    assert "training sequences, digest" in err
    assert "the same data" in err


def test_what_is_written_for_the_next_session_goes_on_from_the_end(corpus, run_dir, begins):
    assert train.main(flags(corpus, run_dir, *SHORT, "--checkpoint.resume", "4")) == 0
    assert train.main(["--config", str(run_dir / "config.yaml")]) == 0
    assert begins == [4, 4]  # what came after was set aside, and nothing was saved since


def test_what_changes_on_purpose_is_said_and_done(corpus, run_dir, capsys):
    rows = 4 * jax.device_count()
    more = ["--steps", "8", "--optim.lr", "1e-4", "--optim.schedule", "constant", "--stage", "3"]
    assert train.main(flags(corpus, run_dir, *SHORT, *more, "--batch_size", str(rows), "--micro_batch", "1")) == 0
    out = capsys.readouterr().out
    assert f"goes on from step 6 in {run_dir / 'checkpoints'}: {12 * jax.device_count():,} sequences trained on" in out
    for line in (
        "changed: steps = 8, and was 6",
        f"changed: batch_size = {rows}, and was {2 * jax.device_count()}",
        "changed: optim.lr = 0.0001, and was 0.003",
        "changed: optim.schedule = constant, and was cosine",
    ):
        assert line in out
    assert "changed: stage" not in out
    lines = losses(run_dir)
    assert [step for step, *_ in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [lr for *_, lr, _ in lines[6:]] == [pytest.approx(1e-4)] * 2
    assert lines[-1][-1] == (6 * 2 + 2 * 4) * jax.device_count() * 16


def test_a_run_changes_its_precision_and_changes_it_back(corpus, old, run_dir, capsys):
    narrow = ["--precision.params", "bfloat16", "--checkpoint.resume", "2"]
    assert train.main(flags(corpus, run_dir, *SHORT, *narrow)) == 0
    out = capsys.readouterr().out
    assert "changed: precision.params = bfloat16, and was float32" in out
    assert "leaves converted, such as 'params/" in out
    wide, held = arrays(old, 6), arrays(run_dir, 6)
    params = {name.removeprefix("params/") for name in wide if name.startswith("params/")}
    assert {str(held[f"params/{name}"].dtype) for name in params} == {"bfloat16"}
    assert {name.removeprefix("master/") for name in held if name.startswith("master/")} == params
    masters = arrays(run_dir, 4)

    assert train.main(flags(corpus, run_dir, *SHORT, "--checkpoint.resume", "4")) == 0
    out = capsys.readouterr().out
    assert "changed: precision.params = float32, and was bfloat16" in out
    again = arrays(run_dir, 6)
    assert {name: (x.dtype, x.shape) for name, x in again.items()} == {
        name: (x.dtype, x.shape) for name, x in wide.items()
    }
    for name in params:  # near those of the run that was wide all the time: two steps of a rate of 0.003
        np.testing.assert_allclose(again[f"params/{name}"], masters[f"master/{name}"], atol=0.01, err_msg=name)
    assert [step for step, *_ in losses(run_dir)] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([x[1] for x in losses(run_dir)], [x[1] for x in losses(old)], rtol=0.01)


def test_going_back_sets_later_steps_aside_and_metrics_follow(corpus, old, run_dir):
    assert train.main(flags(corpus, run_dir, *SHORT, "--checkpoint.resume", "2")) == 0
    assert names(run_dir / "checkpoints") == ["2", "4", "4.replaced", "6", "6.replaced"]
    assert losses(run_dir) == losses(old)
    dropped = [json.loads(line) for line in (run_dir / "metrics.dropped.jsonl").read_text().splitlines()]
    assert [line["step"] for line in dropped if "loss" in line] == [3, 4, 5, 6]
    for name, x in arrays(old, 6).items():
        np.testing.assert_array_equal(arrays(run_dir, 6)[name], x, err_msg=name)


def test_a_finished_run_that_is_started_again_has_nothing_to_do(corpus, old, run_dir, capsys):
    assert train.main(flags(corpus, run_dir, *SHORT)) == 0
    assert "goes on from step 6" in capsys.readouterr().out
    assert (run_dir / "metrics.jsonl").read_text() == (old / "metrics.jsonl").read_text()
    assert names(run_dir / "checkpoints") == ["2", "4", "6"]


# What goes wrong.


def test_a_damaged_step_is_said_and_the_one_before_goes_on(corpus, old, run_dir, capsys):
    (run_dir / "checkpoints" / "6" / "seal.json").unlink()
    assert train.main(flags(corpus, run_dir, *SHORT)) == 0
    out = capsys.readouterr().out
    assert f"warning: step 6 in {run_dir / 'checkpoints'} is damaged: seal.json is missing" in out
    assert "goes on from step 4" in out
    assert names(run_dir / "checkpoints") == ["2", "4", "6", "6.replaced"]
    assert losses(run_dir) == losses(old)


def test_a_run_whose_steps_are_all_damaged_does_not_begin_anew(corpus, run_dir, begins, capsys):
    for step in (2, 4, 6):
        (run_dir / "checkpoints" / str(step) / "seal.json").unlink()
    err = refused(capsys, flags(corpus, run_dir, *SHORT), run_dir.parent)
    assert all(f"step {step} in" in err for step in (2, 4, 6))


FOREIGN = {
    "nothing": {},
    "a note": {"note": "of my own"},
    "no config": {"samples": 1, "sequences": [1], "config": []},
    "no numbers": {"samples": "many", "sequences": {}, "config": {}},
    "less than nothing": {"samples": -5, "sequences": [1], "config": {}},
    "a list": [1, 2],
    "another config": {"samples": 1, "sequences": [1], "config": {"model": 3, "seed": {"a": []}}},
}


@pytest.mark.parametrize("about", FOREIGN)
def test_a_checkpoint_of_another_program_is_refused(corpus, run_dir, begins, capsys, about):
    for step in (2, 4, 6):
        path = run_dir / "checkpoints" / str(step)
        (path / "about" / "metadata").write_text(json.dumps(FOREIGN[about]))
        seal.write(path, json.loads((path / "seal.json").read_text())["checksums"])
    assert "step 6" in refused(capsys, flags(corpus, run_dir, *SHORT), run_dir.parent)


def test_a_run_that_diverges_ends_with_status_1_and_its_earlier_steps_go_on(corpus, old, run_dir, capsys):
    wild = ["--optim.lr", "1e38", "--optim.schedule", "constant", "--optim.max_skipped", "2", "--steps", "20"]
    assert (
        train.main(flags(corpus, run_dir, *SHORT, *wild, "--checkpoint.resume", "4", "--optim.clip_norm", "none")) == 1
    )
    err = capsys.readouterr().err
    assert "not finite in 2 steps in a row" in err
    assert "go back with --checkpoint.resume 4" in err
    assert "Traceback" not in err
    assert train.main(flags(corpus, run_dir, *SHORT, "--checkpoint.resume", "4")) == 0
    assert losses(run_dir) == losses(old)


def test_a_full_disk_ends_a_run_with_one_line(corpus, tmp_path):
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    code += "from jzero import train; sys.exit(train.main(sys.argv[1:]))"
    argv = flags(corpus, tmp_path / "run", *SHORT)
    (ended,) = wait([spawn(["-c", code, *argv], env={"XLA_FLAGS": os.environ["XLA_FLAGS"]})])
    assert ended.status == 1
    said = [line for line in ended.err.replace("\r", "\n").splitlines() if line.strip() and "%|" not in line]
    assert said == [
        f"error: step 2 could not be written to {tmp_path / 'run' / 'checkpoints'} (File too large); there is no other"
    ]
    assert names(tmp_path / "run" / "checkpoints") == []


def test_two_runs_started_into_one_directory_at_once_are_one(corpus, tmp_path):
    argv = flags(corpus, tmp_path / "run", "--steps", "100000", "--checkpoint.every", "100")
    both = [spawn(["-m", "jzero.train", *argv], env={"XLA_FLAGS": os.environ["XLA_FLAGS"]}) for _ in range(2)]
    try:
        until = time.monotonic() + 120
        while all(process.poll() is None for process in both):
            assert time.monotonic() < until
            time.sleep(0.1)
        both.sort(key=lambda process: process.poll() is None)
        refused, running = both
        assert refused.returncode == 2
        err = refused.communicate()[1]
        assert f"error: run.dir = {tmp_path / 'run'}: another run is at work there; name another directory\n" in err
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not losses(tmp_path / "run"):
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        assert wait([running])[0].status == 128 + signal.SIGTERM
        steps = [step for step, *_ in losses(tmp_path / "run")]
        assert steps == list(range(1, len(steps) + 1))
    finally:
        for process in both:
            end(process)


# Which samples.


def test_every_sample_of_the_stream_is_trained_on_once_over_shrinking_and_growing(corpus, tmp_path, monkeypatch):
    """Over three epochs, and two ends of an epoch within a batch."""
    (tmp_path / "text").write_text(corpus.read_text()[: 16 * 60])
    read, parts = [], []

    def recorded(config, mesh, its_parts, *position):
        batches, evals = make_batches(config, mesh, its_parts, *position)
        parts[:] = its_parts
        return (read.append(batch["tokens"]) or batch for batch in batches), evals

    make_batches = train.make_batches
    monkeypatch.setattr(train, "make_batches", recorded)
    devices, sessions = jax.device_count(), [(3, 2, "dp=-1"), (7, 1, "dp=-1"), (11, 3, "dp=-1,tp=2")]
    for steps, rows, mesh in sessions:
        argv = ["--steps", str(steps), "--batch_size", str(rows * devices), "--mesh", mesh, "--checkpoint.every", "100"]
        assert train.main(flags(tmp_path / "text", tmp_path / "run", *argv)) == 0

    count = (3 * 2 + 4 * 1 + 4 * 3) * devices
    train_set = parts[0].train
    ids = [index for _, index in sample_ids(train_set, seed=0, count=count)]
    np.testing.assert_array_equal(np.concatenate(read), [train_set[index]["tokens"] for index in ids])
    times = Counter(ids)
    assert len(times) == len(train_set)
    assert set(times.values()) == {count // len(train_set), -(-count // len(train_set))}
