"""The command line with the optimizer's state in host memory and in files, and what goes wrong with those."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tiny_run import TINY, batch_for_these_devices, fox_text

import jzero
from jzero import train
from jzero.build import make_run
from jzero.config import load, resolve
from jzero.offload.files import InFiles


@pytest.fixture
def fox(tmp_path):
    flags = [
        "--data.path",
        str(fox_text(tmp_path)),
        "--batch_size",
        batch_for_these_devices(),
        "--run.cache_dir",
        "none",
    ]
    return [*TINY, *flags, "--steps", "4", "--log.every", "1", "--log.tensorboard", "false"]


def run(tmp_path, name, *flags):
    status = train.main([*flags, "--run.dir", str(tmp_path / name)])
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    return status, [(row["loss"], row["grad_norm"], row["lr"]) for row in lines if "loss" in row]


def test_the_losses_are_those_of_the_same_run_on_the_device(tmp_path, fox):
    here = [*fox, "--checkpoint.every", "none", "--offload.group_size", "4000"]
    files = ["--offload.optimizer", "nvme", "--offload.dir", f"{tmp_path / 'a'},{tmp_path / 'b'}"]
    status, expected = run(tmp_path, "device", *here, "--offload.optimizer", "device")
    assert status == 0
    assert len(expected) == 4
    assert run(tmp_path, "nvme", *here, *files) == (0, expected)
    all_of_it = ["--stage", "3", "--offload.params", "nvme", "--offload.min_param_bytes", "0"]
    assert run(tmp_path, "params", *here, *files, *all_of_it)[0] == 0
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]
    assert run(tmp_path, "host", *here, "--offload.optimizer", "host") == (0, expected)


def test_files_that_are_deleted_while_it_trains_end_the_run(tmp_path, fox, capsys, monkeypatch):
    fetch, calls = InFiles.fetch, []

    def after_a_while(self, group, parts):
        calls.append(group)
        if len(calls) == 5:
            shutil.rmtree(tmp_path / "disk")
        return fetch(self, group, parts)

    monkeypatch.setattr(InFiles, "fetch", after_a_while)
    files = ["--offload.optimizer", "nvme", "--offload.dir", str(tmp_path / "disk"), "--offload.group_size", "4000"]
    status, _ = run(tmp_path, "run", *fox, *files, "--checkpoint.every", "none")
    err = capsys.readouterr().err
    assert status == 1
    assert str(tmp_path / "disk") in err
    assert "go on from the last checkpoint" in err
    assert "Traceback" not in err


KILLED_IN_A_GROUP = """
import os, signal, sys
from jzero import train
from jzero.build import make_run
from jzero.config import load, resolve
from jzero.offload.files import InFiles
store, calls = InFiles.store, []

def until_killed(self, group, arrays):
    calls.append(group)
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return store(self, group, arrays)

InFiles.store = until_killed
sys.exit(train.main(sys.argv[2:]))
"""


def test_a_run_that_is_killed_between_two_groups_goes_on_from_its_last_checkpoint(tmp_path, fox):
    """And so does one that goes on with the state elsewhere: in memory, or on the device."""
    files = ["--offload.optimizer", "nvme", "--offload.dir", str(tmp_path / "disk"), "--offload.group_size", "4000"]
    flags = [*fox, "--steps", "6", "--checkpoint.every", "2"]
    _, expected = run(tmp_path, "whole", *flags, *files)
    assert len(expected) == 6
    groups = len(list(_groups(tmp_path, fox, files)))
    killed = [*flags, *files, "--run.dir", str(tmp_path / "killed")]
    in_step_5 = str(groups * 5 + groups // 2 + 1)  # each group is stored once at the start, then once a step
    environment = {**os.environ, "PYTHONPATH": str(Path(jzero.__file__).parents[1])}
    command = [sys.executable, "-c", KILLED_IN_A_GROUP, in_step_5, *killed]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == -signal.SIGKILL
    shutil.copytree(tmp_path / "killed", tmp_path / "on the device")
    left = list((tmp_path / "disk").iterdir())
    status, losses = run(tmp_path, "killed", *flags, *files)
    assert (status, losses) == (0, expected)
    assert left
    assert not set(left) & set((tmp_path / "disk").iterdir())  # what the dead process left is removed
    status, losses = run(tmp_path, "on the device", *flags)
    assert status == 0
    assert losses[:4] == expected[:4]
    assert [row[0] for row in losses] == pytest.approx([row[0] for row in expected], rel=1e-5)


def _groups(tmp_path, fox, files):
    config = load([*fox, *files, "--run.dir", str(tmp_path / "none")])
    config = resolve(config, jax.device_count(), "cpu")
    return make_run(config, jzero.make_mesh(config.mesh)).stream.groups


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, fox, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    status = train.main(
        [
            *fox,
            "--run.dir",
            str(tmp_path / "run"),
            "--offload.optimizer",
            "nvme",
            "--offload.dir",
            str(tmp_path / "disk"),
        ]
    )
    err = capsys.readouterr().err
    assert status == 2
    assert err.startswith(f"error: offload.dir = {tmp_path / 'disk'}: what rests in files takes ")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--offload.optimizer", "nvme"], ["offload.optimizer = nvme needs offload.dir"]),
        (["--offload.optimizer", "disk"], ["offload.optimizer = disk", "none, device, host, nvme"]),
        (["--offload.update", "cpu"], ["offload.update = cpu", "offload.optimizer = none"]),
        (["--offload.update", "delayed"], ["offload.update = delayed", "device, cpu", "one step late"]),
        (["--offload.params", "host", "--zero.regather", "false"], ["offload.params", "zero.regather"]),
        (["--offload.params", "host"], ["offload.params", "1,048,576 bytes"]),
        (["--offload.group_size", "0"], ["offload.group_size = 0", ">= 1"]),
        (["--offload.optimizer", "host", "--offload.update", "cpu", "--optim.name", "muon"], ["offload.update = cpu"]),
        (["--offload.optimiser", "host"], ["offload.optimiser", "offload.optimizer"]),
    ],
)
def test_bad_input_names_the_key_and_what_is_allowed(tmp_path, fox, capsys, flags, words):
    assert train.main([*fox, "--run.dir", str(tmp_path / "run"), *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_the_error_of_the_files_is_public():
    assert issubclass(jzero.TierError, RuntimeError)


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("{file}", "is no directory; name another place"),
        ("{tmp}/missing/deep", "missing is not there; make it, or mount the disk"),
        ("{tmp}/a,{tmp}/../{name}/a", "names a directory twice; name one on each disk"),
    ],
)
def test_a_bad_directory_is_refused_before_anything_is_written(directory, message, tmp_path, fox, capsys):
    (tmp_path / "file").touch()
    directory = directory.format(file=tmp_path / "file", tmp=tmp_path, name=tmp_path.name)
    files = ["--offload.optimizer", "nvme", "--offload.dir", directory]
    assert train.main([*fox, "--run.dir", str(tmp_path / "run"), *files]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
