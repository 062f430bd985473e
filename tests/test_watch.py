"""The instruments of a run: each says what is known or nothing, and what it says is what happened."""

import json
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from event_files import events_in
from jax.profiler import ProfileData
from tiny_run import TINY, batch_for_these_devices

from jzero import compile_cache, gpus, train, watch
from jzero.compile_cache import CacheError
from jzero.config import load
from jzero.journal import Journal
from jzero.waiting import Ended

ROOT = Path(__file__).parent.parent


def devices(monkeypatch, *kinds, memory=()):
    memory = memory or [None] * len(kinds)
    found = [SimpleNamespace(device_kind=k, memory_stats=lambda m=m: m) for k, m in zip(kinds, memory, strict=True)]
    monkeypatch.setattr(jax, "devices", lambda: found)
    monkeypatch.setattr(jax, "local_devices", lambda: found)


# What the devices are and hold.


def test_the_peak_is_that_of_the_very_device_or_unknown():
    assert gpus.bf16_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert gpus.bf16_flops("NVIDIA A100-SXM4-80GB") == 312e12
    # other variants have other peaks; a V100 has no bfloat16
    for kind in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "TPU v5p", "Tesla V100-SXM2-16GB", ""):
        assert gpus.bf16_flops(kind) is None


def test_utilization_is_against_the_peak_of_all_devices(monkeypatch):
    devices(monkeypatch, *["NVIDIA H200"] * 4)
    # 6e9 operations a token, 100,000 tokens a second: 6e14 of 4 x 989e12
    assert watch.utilization(6e9)(100_000.0) == {"mfu": pytest.approx(6e14 / (4 * 989e12))}


def test_a_device_without_a_known_peak_has_no_utilization(monkeypatch):
    devices(monkeypatch, "NVIDIA H200", "NVIDIA of tomorrow")
    assert watch.utilization(6e9)(100_000.0) == {}


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    memory = [{"bytes_in_use": 5, "peak_bytes_in_use": 7}, {"bytes_in_use": 4, "peak_bytes_in_use": 9}]
    devices(monkeypatch, "a", "b", memory=memory)
    assert watch.device_memory() == {"memory_bytes": 5, "peak_memory_bytes": 9}


def test_memory_that_nobody_counts_has_no_figure(monkeypatch):
    devices(monkeypatch, "a", "b", memory=[None, {"other": 1}])
    assert watch.device_memory() == {}


def test_a_run_on_known_devices_logs_utilization_and_memory(tmp_path, monkeypatch):
    settings = load(["--steps", "3", "--log.tensorboard", "false"])
    monkeypatch.setattr("jzero.journal.device_memory", lambda: {"memory_bytes": 5})
    with Journal(tmp_path / "metrics.jsonl", settings, lambda rate: {"mfu": rate / 1e9}) as journal:
        journal.trained([Ended(1, {"loss": 1.0, "skipped": 0, "skipped_in_row": 0}, journal.now())])
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["mfu"] == pytest.approx(line["tokens_per_s"] / 1e9)
    assert line["memory_bytes"] == 5
    assert sorted(f.name for f in tmp_path.iterdir()) == ["metrics.jsonl"]  # and no events


# Events and trace of a real run.


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory):
    """The directory of a run of 8 steps with a trace of steps 4 to 6."""
    path = tmp_path_factory.mktemp("watched")
    (path / "corpus.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    argv = [*TINY, "--data.path", str(path / "corpus.txt"), "--run.dir", str(path / "run"), "--steps", "8"]
    argv += ["--batch_size", batch_for_these_devices(), "--log.every", "2", "--log.profile", "4-6"]
    assert train.main(argv) == 0
    return path / "run"


def test_the_events_are_the_lines_of_the_metrics(watched_run):
    lines = [json.loads(line) for line in (watched_run / "metrics.jsonl").read_text().splitlines()]
    written = {(line["step"], name): value for line in lines for name, value in line.items() if name != "step"}
    assert {(8, "loss"), (8, "eval_loss"), (2, "tokens_per_s")} <= written.keys()
    assert events_in(watched_run) == pytest.approx(written, rel=1e-6)  # events are float32


def test_the_trace_holds_the_steps_that_were_asked_for_and_all_of_them(watched_run):
    (path,) = (watched_run / "profile").rglob("*.xplane.pb")
    events = [e for plane in ProfileData.from_file(str(path)).planes for line in plane.lines for e in line.events]
    steps = [dict(e.stats)["step_num"] for e in events if e.name == "train"]
    assert steps == [4, 5, 6]
    ops = [s for s in (dict(e.stats) for e in events) if s.get("hlo_module") == "jit_train_step"]
    executions = Counter((s["device_ordinal"], s["run_id"]) for s in ops)
    assert len(executions) == 3 * jax.device_count()  # a part of another step would be of another execution
    assert len(set(executions.values())) == 1  # and of these none is cut off


# The cache of compiled programs.

COUNT = """
import sys, jax
from collections import Counter
from jzero import train
seen = Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rpartition("/")[2]]))
status = train.main(sys.argv[1:])
print("hits", seen["cache_hits"], "misses", seen["cache_misses"])
sys.exit(status)
"""


def start(tmp_path, name, *argv):
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    words = [*TINY, "--steps", "3", "--batch_size", batch_for_these_devices(), "--run.dir", str(tmp_path / name)]
    words = [sys.executable, "-c", COUNT, *words, "--data.path", str(ROOT / "README.md"), *argv]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_start_compiles_nothing_and_two_may_start_at_once(tmp_path):
    first = [start(tmp_path, "a"), start(tmp_path, "b")]
    ends = [(*p.communicate(timeout=300), p.returncode) for p in first]
    ends.append((*(p := start(tmp_path, "c")).communicate(timeout=300), p.returncode))
    for out, err, status in ends:
        assert status == 0, err
        assert f"compiled programs: {tmp_path / 'jzero'}" in out
        assert "cache" not in err  # JAX warns of an entry that it cannot read
    counts = [end[0].split("\nhits ")[1].split() for end in ends]
    assert any(int(misses) > 0 for _, _, misses in counts[:2])
    hits, _, misses = counts[2]
    assert (int(hits) > 0, misses) == (True, "0")
    runs = [[json.loads(x)["loss"] for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines() if '"loss"' in x]
            for n in "abc"]  # fmt: skip
    assert runs[0] == runs[1] == runs[2]
    assert stat.S_IMODE((tmp_path / "jzero").stat().st_mode) == 0o700


def test_none_keeps_no_programs(tmp_path):
    out, err = start(tmp_path, "a", "--run.cache_dir", "none").communicate(timeout=300)
    assert "hits 0 misses 0" in out, err
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a"]


@pytest.fixture
def cache_on(monkeypatch):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def test_a_cache_that_cannot_be_is_refused_by_name(cache_on, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"run.cache_dir = .*/file/x: .*/file is not a directory; name another"):
        compile_cache.directory(str(tmp_path / "file" / "x"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CacheError, match=r"run.cache_dir = auto \(.*/file/jzero\): .* is not a directory; .* or none"):
        compile_cache.directory("auto")
    with pytest.raises(CacheError, match=r"run.cache_dir = /proc/self/x: "):  # refuses root as well
        compile_cache.use("/proc/self/x")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CacheError, match=rf"run.cache_dir = {tmp_path}/new: {tmp_path} is not writable"):
        compile_cache.directory(str(tmp_path / "new"))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file"]


def test_a_bad_cache_ends_with_status_2_before_anything_is_written(cache_on, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    batch = ["--batch_size", batch_for_these_devices()]
    assert train.main([*TINY, *batch, "--run.cache_dir", "file"]) == 2
    assert capsys.readouterr().err.startswith("error: run.cache_dir = file: ")
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_jax_was_given_stays_its_own(tmp_path, monkeypatch):
    config = SimpleNamespace(jax_compilation_cache_dir="/theirs", jax_enable_compilation_cache=True)
    monkeypatch.setattr(jax, "config", config)
    assert compile_cache.directory("auto") is None
    assert compile_cache.directory(str(tmp_path / "other")) == tmp_path / "other"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for first_or_second_time in (None, str(tmp_path / "jzero")):
        config.jax_compilation_cache_dir = first_or_second_time
        assert compile_cache.directory("auto") == tmp_path / "jzero"


@pytest.mark.parametrize("named", [True, False])
def test_a_cache_is_bounded_and_so_locked_where_jax_can_do_it(tmp_path, monkeypatch, named):
    set_to = {}
    config = SimpleNamespace(
        jax_compilation_cache_dir=None, jax_enable_compilation_cache=True, update=set_to.__setitem__
    )
    monkeypatch.setattr(jax, "config", config)
    if not named:  # a user of a container that is in no list of users
        monkeypatch.setattr(Path, "owner", lambda _: {}["no such user"])
    assert compile_cache.use(str(tmp_path / "programs")) == tmp_path / "programs"
    bound = {"jax_compilation_cache_max_size": compile_cache.MAX_BYTES} if named else {}
    every_program = {"jax_persistent_cache_min_compile_time_secs": 0.0}
    assert set_to == {"jax_compilation_cache_dir": str(tmp_path / "programs"), **every_program, **bound}


# The gap between steps.


@pytest.mark.slow
def test_the_host_keeps_the_devices_busy_in_the_default_run(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / "examples/benchmarks/host_gap.py"), "--data.eval_batches", "1"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600)
    steps, share = re.search(r"^(\d+) steps: .* in ([\d.]+)% of the time$", done.stdout, re.MULTILINE).groups()
    assert (int(steps), float(share) < 2.0) == (30, True), done.stdout


def test_events_that_cannot_be_written_are_an_error_at_once(tmp_path):
    events = watch.Events(tmp_path)
    events._records.close()
    with pytest.raises((OSError, ValueError), match="closed file"):
        events.write({"step": 1, "loss": 2.0})
