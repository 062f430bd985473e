"""`--stage auto` takes the first of the ladder that fits, with the most rows, and says what was rejected."""

import dataclasses
import subprocess
import sys

import jax
import pytest
from processes import environment
from tiny_run import TINY

from jzero.config import ConfigError, validate
from jzero.plan import auto
from jzero.plan.memory import Memory, Part
from jzero.plan.report import Plan
from jzero.plan.traffic import Traffic

GB = 10**9


def config_of(**values):
    return validate({"stage": "auto", **values})


class Compiler:
    """Peaks by a rule, and what was asked for."""

    def __init__(self, capacity=80 * GB):
        self.asked, self.capacity = [], capacity

    def __call__(self, config):
        self.asked.append((auto.name_of(config), config.micro_batch))
        states = {0: 110, 1: 60, 2: 40, 3: 20}[config.stage] + (0 if config.zero.regather else 15)
        per_row = {"none": 12, "dots": 6, "full": 2}[config.model.remat]
        peak = (states + per_row * config.micro_batch) * GB
        parts = (Part("gradients", 2 * GB, 0.0, ""),)
        memory = Memory(parts, {}, 0, 0, states * GB - 2 * GB, 0, 0, peak)
        return Plan("a GPU", True, {"dp": 8}, config.stage, 1, 8, 1, self.capacity, memory, Traffic((), 0, 0, 0.0, ""))


@pytest.mark.parametrize(
    ("capacity", "stage", "rows", "kept", "remat"),
    [
        (200, 1, 10, False, "none"),
        (72, 2, 2, False, "none"),  # 64.8 may be used
        (53, 3, 1, True, "none"),
        (40, 3, 1, False, "none"),
        (30, 3, 1, False, "dots"),
        (25, 3, 1, False, "full"),
    ],
)
def test_the_cheapest_that_fits_is_taken_with_the_most_rows(capacity, stage, rows, kept, remat):
    compiler = Compiler(capacity * GB)
    choice = auto.choose(config_of(batch_size=80), 8, compiler)
    config = choice.config
    assert (config.stage, config.micro_batch, config.zero.regather, config.model.remat) == (
        stage,
        rows,
        not kept,
        remat,
    )
    assert choice.plan.memory.peak_bytes <= 0.9 * capacity * GB
    assert len(choice.lines) == len({name for name, _ in compiler.asked})
    assert all("GB missing" in line for line in choice.lines[:-1])


def test_rows_are_those_that_divide_the_batch():
    assert auto.rows_that_divide(config_of(batch_size=96), 8) == (1, 2, 3, 4, 6, 12)
    assert auto.rows_that_divide(config_of(micro_batch=3), 8) == (3,)
    with pytest.raises(ConfigError, match="batch_size = 12 must be a multiple of 8"):
        auto.rows_that_divide(config_of(batch_size=12), 8)


def test_few_sizes_are_compiled():
    compiler = Compiler(500 * GB)
    auto.choose(config_of(), 8, compiler)
    assert [rows for _, rows in compiler.asked] == [1, 2, 32]


def test_one_device_shards_nothing():
    names = [auto.name_of(config) for config in auto.ladder(config_of(), 1)]
    assert names == [
        "stage 0, remat none",
        "stage 0, remat dots",
        "stage 0, remat full",
        "stage 0, remat full, optimizer on the host",
        "stage 0, remat full, optimizer on the host, params on the host",
    ]


def test_what_fits_nowhere_says_by_how_much_and_what_would():
    with pytest.raises(ConfigError) as error:
        auto.choose(config_of(), 8, Compiler(20 * GB))
    said = str(error.value)
    assert "stage 1, remat none: 54.00 GB missing at a microbatch of 1" in said
    assert "stage 3, remat full: 4.00 GB missing" in said
    assert "about 10 devices like these" in said  # 8 x 20 / (18 - 2)
    assert "at least 24.4 GB (v100-32, rtx4090, " in said


def test_a_device_that_does_not_tell_its_memory_is_refused():
    compiler = Compiler()
    silent = lambda config: dataclasses.replace(compiler(config), capacity_bytes=None)  # noqa: E731
    with pytest.raises(ConfigError, match="nobody tells"):
        auto.choose(config_of(), 8, silent)


@pytest.mark.skipif(jax.device_count() != 8, reason="8 devices")
def test_training_says_what_it_has_chosen(tmp_path):
    argv = [*TINY, "--stage", "auto", "--run.dir", str(tmp_path / "run"), "--steps", "2", "--batch_size", "16"]
    command = [sys.executable, "-m", "jzero.train", *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "stage 1, remat none, micro_batch" in done.stdout
    assert "stage: 1\n" in (tmp_path / "run" / "config.yaml").read_text()


class WithAHost(Compiler):
    """Off the device goes half of the states with the optimizer, and nearly all with the parameters."""

    def __call__(self, config):
        plan = super().__call__(config)
        away = {("host", "none"): 10, ("host", "host"): 18}.get((config.offload.optimizer, config.offload.params), 0)
        memory = dataclasses.replace(
            plan.memory, peak_bytes=plan.memory.peak_bytes - away * GB, host_bytes_per_machine=8 * away * GB
        )
        return dataclasses.replace(plan, memory=memory)


@pytest.mark.parametrize(("capacity", "params"), [(15, "none"), (5, "host")])
def test_offload_comes_last_the_optimizer_before_the_parameters(capacity, params):
    choice = auto.choose(config_of(batch_size=8), 8, WithAHost(capacity * GB))
    offload = choice.config.offload
    assert (choice.config.model.remat, offload.optimizer, offload.params) == ("full", "host", params)
    assert "optimizer on the host" in choice.lines[-1]


def test_what_the_machine_has_no_memory_for_is_passed_over():
    with pytest.raises(ConfigError, match=r"optimizer on the host: 30\.00 GB of host memory missing"):
        auto.choose(config_of(batch_size=8), 8, WithAHost(15 * GB), host_bytes=50 * GB)


def test_offload_that_the_user_has_set_stays():
    config = config_of(offload={"optimizer": "device"})
    assert {kind.offload.optimizer for kind in auto.ladder(config, 8)} == {"device"}
