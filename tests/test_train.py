"""The command line: exit status, what it writes, and when it reads metrics."""

import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from tiny_run import TINY, batch_for_these_devices, fox_text

from jzero import config, train
from jzero.checkpoint import Checkpoints
from jzero.config import ConfigError, load
from jzero.journal import Journal, RunError
from jzero.loop import IN_FLIGHT, Loop
from jzero.loop import fit as fit_loop
from jzero.resume import Saves
from jzero.run_dir import locked, make_run_dir, session
from jzero.stop import Stop
from jzero.waiting import Waiting
from jzero.watch import Trace

ROOT = Path(__file__).parent.parent
CUDA_NOISE = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


@pytest.fixture
def corpus(tmp_path):
    return fox_text(tmp_path)


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# Bad input.


def refused(capsys, tmp_path, *argv):
    """The one line that bad input ends with; nothing is written."""
    before = sorted(tmp_path.rglob("*"))
    status = train.main([*argv])
    out, err = capsys.readouterr()
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert sorted(tmp_path.rglob("*")) == before
    return err


def test_wrong_settings_end_with_status_2(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean --optim.lr?" in refused(capsys, tmp_path, "--optim.lrr", "3")
    assert "stage = 4" in refused(capsys, tmp_path, "--stage", "4")
    assert "devices" in refused(capsys, tmp_path, "--mesh", f"dp={jax.device_count() + 1}")
    assert "batch_size" in refused(capsys, tmp_path, "--batch_size", "1", "--micro_batch", "7")


def test_wrong_data_end_with_status_2(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batch = ["--batch_size", batch_for_these_devices()]
    assert "/no/such" in refused(capsys, tmp_path, *batch, "--data.path", "/no/such")
    (tmp_path / "empty").touch()
    assert "empty" in refused(capsys, tmp_path, *batch, "--data.path", "empty")
    (tmp_path / "short").write_bytes(b"x" * 100)
    assert "100 tokens" in refused(capsys, tmp_path, *batch, "--data.path", "short")


def test_data_that_do_not_fit_the_settings_end_with_status_2(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    (tmp_path / ".cache" / "jzero" / "tokens").mkdir(parents=True)
    batch = ["--batch_size", batch_for_these_devices(), "--data.seq_len", "16"]
    np.arange(500, dtype="<u2").tofile(tmp_path / "ids.bin")
    assert "token 256 (from 0) has the id 256" in refused(capsys, tmp_path, *batch, "--data.path", "ids.bin")
    (tmp_path / "lines.jsonl").write_text('{"text": "' + "x" * 500 + '"}\n{"text: 1}\n')
    assert "lines.jsonl, line 2: not JSON" in refused(capsys, tmp_path, *batch, "--data.path", "lines.jsonl")
    assert "not a tokenizer.json" in refused(capsys, tmp_path, *batch, "--data.tokenizer", "lines.jsonl")
    assert "set model.vocab to at least 256" in refused(capsys, tmp_path, *batch, "--model.vocab", "100")
    mixture = ["--data.mixture", "none=0.5,ids.bin=0.4"]
    assert "sum to 0.9" in refused(capsys, tmp_path, *batch, *mixture)
    mixture = ["--data.mixture", "none=0.5,gone.bin=0.5"]
    assert "data.mixture = gone.bin: no such file" in refused(capsys, tmp_path, *batch, *mixture)


def test_a_directory_that_holds_a_run_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").touch()
    given = ["--batch_size", batch_for_these_devices(), "--run.dir", "old", "--checkpoint.resume", "never"]
    message = refused(capsys, tmp_path, *given)
    assert "old: already holds a run (metrics.jsonl)" in message


def test_a_directory_that_cannot_be_made_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert "not a directory" in refused(
        capsys, tmp_path, "--batch_size", batch_for_these_devices(), "--run.dir", "file/run"
    )
    with pytest.raises(ConfigError, match=r"run.dir = /proc/self/run: "):  # refuses root as well
        make_run_dir("/proc/self/run")


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(capsys, tmp_path):
    sizes = ["--model.preset", "llama-3-70b", "--batch_size", batch_for_these_devices()]
    message = refused(capsys, tmp_path, *sizes, "--run.dir", "large")
    assert re.search(
        r"a run takes .* GiB of each of \d+ devices, which have .*iB, for state and gradients alone", message
    )
    assert not (tmp_path / "large").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locked").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    message = refused(capsys, tmp_path, "--batch_size", batch_for_these_devices(), "--run.dir", "locked/run")
    assert "not writable" in message


def test_a_pattern_that_matches_no_parameter_is_refused(capsys, tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*TINY, "--data.path", str(corpus), "--batch_size", batch_for_these_devices()]
    assert "no_such_leaf" in refused(capsys, tmp_path, *argv, "--zero.replicate", "*no_such_leaf*")


def test_directories_without_a_name_are_new_every_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [make_run_dir(None) for _ in range(3)]
    assert len({d.resolve() for d in made}) == 3
    assert all(d.parent.name == "runs" and d.is_dir() for d in made)


def test_the_settings_of_a_run_name_its_directory_wherever_they_are_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv in (["--run.dir", "run"], []):
        with session(load(argv)) as (run_dir, settings):
            assert settings.run.dir == str(run_dir)
            assert run_dir.parent.parent == tmp_path if not argv else run_dir == tmp_path / "run"


# Metrics.


class Scalar:
    """A device scalar that notes when it is copied and read."""

    def __init__(self, value, events, step):
        self.value, self.events, self.step = value, events, step

    def copy_to_host_async(self):
        self.events.append(("copy", self.step))

    def __array__(self, dtype=None, copy=None):
        self.events.append(("read", self.step))
        return np.asarray(self.value, dtype)


class FakeRun:
    """A run that notes the order of events; its step k has the metrics `metrics(k)`."""

    def __init__(self, metrics):
        self.metrics, self.events = metrics, []

    def put(self, batch):
        return batch

    def step(self, state, batch):
        self.events.append(("dispatch", state + 1))
        scalars = {k: Scalar(v, self.events, state + 1) for k, v in self.metrics(state + 1).items()}
        return state + 1, scalars

    def evaluate(self, state, batch):
        self.events.append(("evaluate", state))
        return {"loss": batch["loss"], "weight": batch["weight"]}


def good(step):
    return {"loss": 5.0 / step, "grad_norm": 1.0, "lr": 0.5, "weight": 64.0, "skipped": 0, "skipped_in_row": 0}


def fit(run, tmp_path, *argv, evals=(), saves=None):
    settings = ["--steps", "20", "--log.every", "5", "--log.eval_every", "100", "--data.seq_len", "4", *argv]
    settings = load([*settings, "--checkpoint.every", "none"])
    saves = saves or Saves(settings, 0, [], Checkpoints(tmp_path / "checkpoints"))
    with Journal(tmp_path / "metrics.jsonl", settings) as journal:
        fit_loop(Loop(run, [{}] * settings.steps, evals, journal, Trace(None, tmp_path), saves, Stop()), 0)
        return journal.summary()


def test_metrics_of_a_step_are_read_when_later_steps_are_dispatched(tmp_path):
    run = FakeRun(good)
    fit(run, tmp_path)
    at = {event: i for i, event in reversed(list(enumerate(run.events)))}  # where each event happens first
    for step in range(1, 21 - IN_FLIGHT):
        assert at["dispatch", step] < at["copy", step] < at["dispatch", step + 1]
        assert at["dispatch", step + IN_FLIGHT] < at["read", step]
        assert at["read", step] < at.get(("dispatch", step + IN_FLIGHT + 1), len(run.events))
    assert {step for event, step in run.events if event == "read"} == set(range(1, 21))


def test_every_line_has_the_fields_of_the_contract(tmp_path):
    fit(FakeRun(good), tmp_path, "--batch_size", "8")
    lines = rows(tmp_path)
    assert [line["step"] for line in lines] == [1, 5, 10, 15, 20]
    for line in lines:
        assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s"} <= line.keys()
        assert line["tokens"] == line["step"] * 8 * 4
        assert line["tokens_per_s"] == pytest.approx(8 * 4 / line["step_s"])
        assert line["loss"] == pytest.approx(5.0 / line["step"])
        assert line["lr"] == 0.5


def test_skipped_steps_are_counted_and_what_is_not_finite_is_null(tmp_path):
    def metrics(step):
        skipped = {"skipped": min(3, max(0, step - 5))}
        return good(step) | skipped | ({"loss": float("nan"), "skipped_in_row": step - 5} if step in (6, 7, 8) else {})

    summary = fit(FakeRun(metrics), tmp_path, "--log.every", "1")
    lines = {line["step"]: line for line in rows(tmp_path)}
    assert lines[7]["loss"] is None  # NaN is not JSON
    assert "3 steps skipped" in summary


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    run = FakeRun(lambda step: good(step) | {"skipped_in_row": max(0, step - 4)})
    with pytest.raises(RunError, match=r"step 7: .* 3 steps in a row \(optim.max_skipped\)"):
        fit(run, tmp_path, "--optim.max_skipped", "3")
    assert rows(tmp_path)[-1]["step"] == 7
    dispatched = max(step for event, step in run.events if event == "dispatch")
    assert dispatched == 7 + IN_FLIGHT


def test_evaluation_weights_batches_by_their_tokens(tmp_path):
    # loss sums 2 over 1 token and 90 over 9 tokens: 92 / 10, not the mean 6.0 of the two means
    evals = [{"loss": 2.0, "weight": 1.0}, {"loss": 10.0, "weight": 9.0}]
    run = FakeRun(good)
    fit(run, tmp_path, "--log.eval_every", "8", evals=evals)
    evaluations = [line for line in rows(tmp_path) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 8, 16, 20]
    assert all(line["eval_loss"] == pytest.approx(9.2) and line["eval_tokens"] == 10 for line in evaluations)


class AtOnce:
    """In place of the thread that waits for the end of steps: where a step has ended when it is dispatched."""

    def __init__(self, *_):
        pass

    def submit(self, function, *args):
        done = Future()
        done.set_result(function(*args))
        return done


@pytest.mark.parametrize("every", [1, 5])
def test_steps_that_are_read_at_once_have_taken_the_time_that_they_took(tmp_path, monkeypatch, every):
    now = [0.0]

    class TimedRun(FakeRun):
        def step(self, state, batch):
            now[0] += 1.0
            return super().step(state, batch)

        def evaluate(self, state, batch):
            now[0] += 1000.0
            return super().evaluate(state, batch)

    class Saves:
        def due(self, step):
            return step % 4 == 0

        def save(self, *_):
            now[0] += 100.0

    monkeypatch.setattr("jzero.journal.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("jzero.waiting.ThreadPoolExecutor", AtOnce)
    argv = ["--log.every", str(every), "--log.eval_every", "7"]
    fit(TimedRun(good), tmp_path, *argv, evals=[{"loss": 2.0, "weight": 1.0}], saves=Saves())
    lines = {line["step"]: line["step_s"] for line in rows(tmp_path) if "loss" in line}
    assert lines == dict.fromkeys([1, *range(every, 21, every)], 1.0)


def test_the_end_of_a_step_is_when_its_metrics_are_there():
    ended, now = Event(), [0.0]

    class Late:
        def copy_to_host_async(self):
            pass

        def block_until_ready(self):
            assert ended.wait(60)

        def __array__(self, dtype=None, copy=None):
            return np.asarray(3.0)

    waiting = Waiting(1, lambda: now[0])
    waiting.put(1, {"loss": Late()})
    assert list(waiting.ready()) == []
    now[0] = 5.0
    ended.set()
    assert list(waiting.rest()) == [(1, {"loss": 3.0}, 5.0)]


# A real run.


def test_a_run_trains_and_leaves_its_settings_and_metrics(tmp_path, corpus, capsys):
    run_dir = tmp_path / "run"
    argv = [*TINY, "--data.path", str(corpus), "--run.dir", str(run_dir), "--steps", "12", "--optim.lr", "1e-2"]
    argv += ["--batch_size", batch_for_these_devices(), "--micro_batch", "1", "--log.every", "4"]
    assert train.main(argv) == 0
    out = capsys.readouterr().out
    assert "stage 3 on mesh" in out
    assert "at rest per device" in out
    lines = rows(run_dir)
    assert [line["step"] for line in lines if "loss" in line] == [1, 4, 8, 12]
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert evaluations[0] == pytest.approx(np.log(256), abs=0.2)
    assert evaluations[-1] < evaluations[0] - 0.3
    settings = load(["--config", str(run_dir / "config.yaml")])
    assert settings == config.validate(yaml.safe_load((run_dir / "config.yaml").read_text()))
    assert settings.run.dir == str(run_dir)
    assert settings.steps == 12
    # the same command again has nothing left to do, and leaves the metrics as they are
    before = (run_dir / "metrics.jsonl").read_text()
    assert train.main(argv) == 0
    assert "done: 0 steps after step 12" in capsys.readouterr().out
    assert (run_dir / "metrics.jsonl").read_text() == before
    assert train.main([*argv, "--checkpoint.resume", "never"]) == 2
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_a_file_that_shrinks_under_way_ends_the_run_with_status_1(tmp_path, corpus, capsys, monkeypatch):
    argv = [*TINY, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run"), "--steps", "200"]
    argv += ["--batch_size", batch_for_these_devices(), "--data.eval_fraction", "0"]
    init = train.jzero.Run.init
    monkeypatch.setattr(train.jzero.Run, "init", lambda run: (os.truncate(corpus, 1000), init(run))[1])
    assert train.main(argv) == 1
    err = capsys.readouterr().err
    assert f"{corpus}: changed while it was read: it had 18,000 bytes and now has 1,000" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "status"), [("INTERNAL: CUDA_ERROR_ECC", 75), ("RESOURCE_EXHAUSTED: of memory", None)]
)
def test_a_device_that_fails_is_worth_another_start_and_one_that_is_too_small_is_not(monkeypatch, capsys, text, status):
    def fails(*_):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(train, "load", fails)
    if status is None:
        with pytest.raises(jax.errors.JaxRuntimeError):
            train.main([])
    else:
        assert train.main([]) == status
        assert capsys.readouterr().err.endswith(f"\nerror: a device or XLA has failed ({text})\n")


def test_a_run_on_packed_documents_of_a_mixture_evaluates_all_that_is_held_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    lengths = {"a.jsonl": rng.integers(0, 60, 100), "b.jsonl": rng.integers(0, 60, 40)}
    for name, sizes in lengths.items():
        (tmp_path / name).write_text("".join(json.dumps({"text": "ab" * n}) + "\n" for n in sizes))
    argv = [*TINY, "--run.dir", str(tmp_path / "run"), "--steps", "3", "--batch_size", batch_for_these_devices()]
    argv += ["--micro_batch", "1", "--data.eval_batches", "none", "--data.eval_fraction", "0.1"]
    argv += ["--data.mixture", f"{tmp_path}/a.jsonl=0.75,{tmp_path}/b.jsonl=0.25", "--data.packing", "documents"]
    assert train.main(argv) == 0
    assert "evaluation: all" in capsys.readouterr().out
    predicted = sum(
        2 * n - (i == len(sizes) - 1) for sizes in lengths.values() for i, n in enumerate(sizes) if held(i, 0.1)
    )
    evaluations = [line for line in rows(tmp_path / "run") if "eval_loss" in line]
    assert [line["eval_tokens"] for line in evaluations] == [predicted] * 2


def held(document, fraction):
    return np.floor((document + 1) * fraction + 0.5) > np.floor(document * fraction + 0.5)


LINES = {
    "adamw": "lr 0.003, weight_decay 0.1, b1 0.9, b2 0.95, eps 1e-08); weight decay on 16 of 21 leaves",
    "lion": "lr 0.001, weight_decay 0.3, b1 0.9, b2 0.99); weight decay on 16 of 21 leaves",
    "adafactor": "lr 0.01, weight_decay 0.0, eps 1e-30); weight decay on none of 21 leaves",
    "sgd": "lr 0.1, weight_decay 0.0, momentum 0.9, nesterov False); weight decay on none of 21 leaves",
    "muon": "eps 1e-08); weight decay on 16 of 21 leaves, 14 orthogonalised",
}


@pytest.mark.parametrize("name", LINES)
def test_every_optimizer_trains_at_the_rate_of_its_own(name, tmp_path, corpus, capsys):
    argv = [*TINY, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run"), "--steps", "12", "--log.every", "1"]
    argv += ["--batch_size", batch_for_these_devices(), "--model.scan", "false", "--optim.name", name]
    argv += ["--optim.warmup_steps", "0", "--optim.schedule", "linear"]
    assert train.main(argv) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer: ")]
    assert line.startswith(f"optimizer: {name} (lr ")
    assert line.endswith(LINES[name])
    lines = [line for line in rows(tmp_path / "run") if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.01
    lr = load(["--config", str(tmp_path / "run" / "config.yaml")]).optim.lr
    assert [line["lr"] for line in lines] == pytest.approx([lr * (1 - 0.9 * k / 12) for k in range(12)])


def test_a_plateau_and_an_average_of_the_weights_are_in_the_metrics(tmp_path, corpus, capsys):
    argv = [*TINY, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run"), "--steps", "8", "--log.every", "1"]
    argv += ["--batch_size", batch_for_these_devices(), "--optim.lr", "1e-6", "--optim.warmup_steps", "0"]
    argv += ["--optim.schedule", "constant", "--optim.plateau_patience", "1", "--optim.plateau_window", "2"]
    argv += ["--optim.plateau_factor", "0.25", "--optim.min_lr_ratio", "0.2", "--optim.ema", "0.5"]
    assert train.main(argv) == 0
    assert "average of the weights, decay 0.5" in capsys.readouterr().out
    lines = rows(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    lowest, scale, expected = float("inf"), 1.0, []
    for first in range(0, 8, 2):
        mean = sum(losses[first : first + 2]) / 2
        after = scale if mean < (1 - 1e-4) * lowest else max(0.2, 0.25 * scale)
        lowest = min(lowest, mean) if after == scale else lowest
        expected += [1e-6 * scale, 1e-6 * after]
        scale = after
    assert [line["lr"] for line in lines if "loss" in line] == pytest.approx(expected)
    evaluations = [line for line in lines if "eval_loss" in line]
    assert evaluations[0]["ema_eval_loss"] == evaluations[0]["eval_loss"]
    assert evaluations[-1]["ema_eval_loss"] == pytest.approx(evaluations[-1]["eval_loss"], rel=1e-3)
    assert evaluations[-1]["ema_eval_loss"] != evaluations[-1]["eval_loss"]


def test_a_pattern_of_matrices_that_matches_none_is_refused(capsys, tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*TINY, "--data.path", str(corpus), "--batch_size", batch_for_these_devices(), "--optim.name", "muon"]
    assert "optim.adamw_leaves: no parameter matches '*tabel*'" in refused(
        capsys, tmp_path, *argv, "--optim.adamw_leaves", "*embed*,*tabel*"
    )


def test_a_loss_that_is_not_finite_ends_the_run_with_status_1(tmp_path, corpus, capsys):
    argv = [*TINY, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run"), "--steps", "20"]
    argv += ["--batch_size", batch_for_these_devices(), "--optim.max_skipped", "2", "--optim.clip_norm", "none"]
    argv += ["--optim.lr", "1e38", "--optim.warmup_steps", "0", "--optim.schedule", "constant"]
    assert train.main(argv) == 1
    err = capsys.readouterr().err
    assert "not finite in 2 steps in a row" in err
    assert "Traceback" not in err
    assert rows(tmp_path / "run")[-1]["skipped_in_row"] == 2


def command_line(tmp_path, flags, *argv):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | CUDA_NOISE | {"PYTHONPATH": str(ROOT)}
    if flags:
        env["XLA_FLAGS"] = flags
    words = [sys.executable, "-m", "jzero.train", *argv]
    return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_the_command_line_starts_eight_fake_devices_and_says_so(tmp_path, corpus):
    argv = [*TINY, "--data.path", str(corpus), "--steps", "2", "--batch_size", "8", "--mesh", "dp=4,tp=2"]
    done = command_line(tmp_path, None, *argv)
    assert done.returncode == 0, done.stderr
    assert "8 fake CPU devices" in done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert load(["--config", str(run_dir / "config.yaml")]).mesh == "node=1,dp=4,tp=2"


def test_a_device_count_in_xla_flags_is_respected(tmp_path):
    done = command_line(tmp_path, "--xla_force_host_platform_device_count=3", "--mesh", "dp=8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "3 devices" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_session_at_a_time_works_in_a_directory(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigError, match="another run is at work there"):
        locked(tmp_path)
    with locked(tmp_path):
        pass
