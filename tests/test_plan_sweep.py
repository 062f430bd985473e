"""Sweeps: every combination, in as many processes as there are cores, and from disk the second time."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import pytest
from processes import end, spawn

from jzero import targets
from jzero.config import ConfigError, validate
from jzero.plan import Estimate, Memory, Plan, Traffic, kept, sweep, text
from jzero.plan import __main__ as cli
from jzero.plan.settings import combinations, setting_of

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the meshes are for 8 devices")

TINY = {"model": {"width": 16, "layers": 2, "heads": 2, "kv_heads": 2, "mlp_width": 32}, "data": {"seq_len": 16}}
FLAGS = ["--model.width", "16", "--model.layers", "2", "--model.heads", "2", "--model.kv_heads", "2"]
FLAGS += ["--model.mlp_width", "32", "--data.seq_len", "16"]


def setting(**changes):
    return setting_of(validate({**TINY, **changes}), None)


def test_combinations_are_all_of_them_and_leave_the_rest_as_it_is():
    config = validate(TINY)
    found = combinations(config, stages=[2, 3], remats=["none", "full"], meshes=["dp=8"])
    assert [(c.stage, c.model.remat, c.mesh) for c in found] == [
        (2, "none", "dp=8"), (3, "none", "dp=8"), (2, "full", "dp=8"), (3, "full", "dp=8"),
    ]  # fmt: skip
    assert all(c.model.width == 16 for c in found)
    assert combinations(config) == [config]
    with pytest.raises(ConfigError, match="--stage and --stages exclude each other"):
        combinations(validate({**TINY, "stage": 1}), stages=[2, 3])


def test_a_plan_is_made_once(tmp_path, monkeypatch):
    store = kept.Kept(tmp_path)
    first = sweep.plans([setting()], store)
    monkeypatch.setattr(sweep, "plan_of", lambda _: pytest.fail("it is kept"))
    assert sweep.plans([setting()], kept.Kept(tmp_path)) == first
    assert sweep.plans([setting(steps=7, seed=5)], kept.Kept(tmp_path)) == first, "these do not change a step"


@pytest.mark.parametrize(
    "changes", [{"stage": 2}, {"mesh": "dp=4,tp=2"}, {"batch_size": 32}, {"optim": {"name": "sgd"}}]
)
def test_another_setting_is_another_plan(changes):
    assert kept.digest(setting()) != kept.digest(setting(**changes))


def test_a_damaged_plan_is_made_anew(tmp_path):
    store = kept.Kept(tmp_path)
    (first,) = sweep.plans([setting()], store)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:100])
    assert sweep.plans([setting()], kept.Kept(tmp_path)) == [first]


def test_a_setting_that_cannot_be_has_its_reason_among_the_plans(tmp_path):
    bad = setting(zero={"replicate": ["no/such/leaf"]})
    (reason,) = sweep.plans([bad], kept.Kept(None))
    assert isinstance(reason, ConfigError)
    assert "no/such/leaf" in str(reason)


@pytest.mark.slow
def test_a_sweep_is_one_table_of_plans_by_several_processes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "cores", lambda: 2)
    argv = [*FLAGS, "--stages", "0,3", "--meshes", "dp=8; dp=4,tp=2", "--run.cache_dir", str(tmp_path)]
    assert cli.main(argv) == 0
    table = capsys.readouterr().out
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [
        ["dp=8", "0"], ["dp=8", "3"], ["dp=4,tp=2", "0"], ["dp=4,tp=2", "3"],
    ]  # fmt: skip
    assert len(list((tmp_path / "plans").iterdir())) == 4
    monkeypatch.setattr(sweep, "plan_of", lambda _: pytest.fail("they are kept"))
    assert cli.main([*argv, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["stage"] for plan in plans] == [0, 3, 0, 3]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--stages", "0,4"], "4: must be of 0, 1, 2, 3"),
        (["--remats", "some"], "some: must be of none, full, dots"),
        (["--micro_batches", "0"], "at least 1"),
        (["--meshes", "dp=8; pp=2"], "unknown axis 'pp'"),
    ],
)
def test_bad_sweeps_are_refused(argv, said, capsys):
    assert cli.main(argv) == 2
    assert said in capsys.readouterr().err


def test_a_table_names_the_fastest_of_those_that_fit():
    fast, slow, large = (plan_of_peak(peak, step_s) for peak, step_s in ((60, 1.0), (50, 2.0), (90, 0.5)))
    said = text.compare([slow, fast, large], 0.1).splitlines()
    assert len(said) == 6
    assert "18.00 too much" in said[4]
    assert said[-1] == "fastest that fits: dp=8, stage 3, remat full, 8 tokens/s over all devices"
    assert text.compare([large, large], 0.1).splitlines()[-1].startswith("none fits; of the last, what would fit: ")


def plan_of_peak(peak_gb, step_s):
    memory = Memory((), {}, 0, 0, 0, 0, 0, peak_gb * 10**9)
    time = Estimate(step_s, step_s, 0.0, 0.0, 0, 0.0, 8, 1, 0.0, (), (), ())
    nothing = Traffic((), 0, 0, 0.0, "")
    return Plan("GPU", True, {"dp": 8}, 3, 1, 8, 1, 80 * 10**9, memory, nothing, time, label={"remat": "full"})


@pytest.mark.slow
@pytest.mark.skipif(not list(Path("/proc/self/task").glob("*/children")), reason="no list of children in /proc")
def test_a_sweep_that_is_killed_leaves_no_process_behind(tmp_path):
    argv = [*FLAGS, "--stages", "0,1,2,3", "--run.cache_dir", "none"]
    planner = spawn(["-m", "jzero.plan", *argv], env={"TMPDIR": str(tmp_path)})
    try:
        wait_for(lambda: len(children(planner.pid)) >= 2)
        left = children(planner.pid)
    finally:
        end(planner)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


def children(pid):
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in files for word in file.read_text().split()]


def wait_for(happens, patience_s=60):
    until = time.monotonic() + patience_s
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_more_settings_than_a_process_plans_before_it_ends(monkeypatch):
    """A pool that ends its processes after some tasks may wait for ever."""
    monkeypatch.setattr(sweep, "_TASKS", 2)
    monkeypatch.setattr(sweep, "cores", lambda: 1)
    here = setting()
    config = here.config.model_copy(update={"mesh": "node=1,dp=12,tp=1"})  # does not fill its hosts: refused at once
    results = sweep.plans([dataclasses.replace(here, config=config, gpu=targets.parse("h100"))] * 5, kept.Kept(None))
    assert [type(result) for result in results] == [targets.TargetError] * 5
