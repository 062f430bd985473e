"""The launch files fit the program that they start, and the smoke script says PASS only where all is well."""

import os
import re
import shlex
import subprocess

import pytest
import yaml
from processes import ROOT, free_address, spawn, wait

from jzero.config import load
from jzero.ending import LOST

LAUNCH = ROOT / "examples" / "launch"
SMOKE = str(LAUNCH / "two_host_smoke.py")


# Files.


def flags_after(words, module):
    return words[words.index(module) + 1 :]


def test_the_slurm_script_is_bash_and_its_flags_are_known(monkeypatch):
    script = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    (command,) = [line for line in text.replace("\\\n", " ").splitlines() if re.match("srun .*jzero.train", line)]
    monkeypatch.chdir(ROOT)
    config = load(flags_after(shlex.split(command), "jzero.train"))
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.MULTILINE))
    assert config.mesh.startswith(f"node={options['nodes']},")
    assert config.run.dir == "$run_dir"
    assert options["signal"].startswith("TERM@")  # not B:, which signals the script alone


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
        (LOST, 3, True),
        (LOST, 20, False),
        (134, 0, True),
        (137, 0, True),
        (143, 0, True),
    ],
)
def test_the_slurm_script_starts_a_job_again_where_the_reason_goes_away(tmp_path, status, restarts, requeued):
    for name, body in {"srun": f"exit {status}", "scontrol": f'echo "$@" > {tmp_path}/requeued'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch")], env=env | {"SLURM_RESTART_COUNT": str(restarts)}, check=False
    )
    assert done.returncode == status
    assert (tmp_path / "requeued").exists() == requeued


def test_the_kubernetes_file_holds_together_and_its_flags_are_known(monkeypatch):
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"], service["spec"]["clusterIP"]) == ("Service", "Job", "None")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "jzero.train"]  # no shell between the signal and the program
    monkeypatch.chdir(ROOT)
    config = load(container["args"])
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == config.distributed.processes
    host, _, port = config.distributed.coordinator.partition(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert int(port) in [each["containerPort"] for each in container["ports"]]
    assert config.mesh.startswith(f"node={spec['completions']},")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert config.run.dir.startswith(mounts["shared"])
    (rule,) = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [1, 2]


# The smoke script.


def smoke(tmp_path, own=(("--cpu",), ("--cpu",)), patch="", timeout=60):
    """Two processes of the script, each with flags of its own."""
    address, started = free_address(), []
    program = f"import runpy, sys\nsys.argv[0] = {SMOKE!r}\n{patch}\nrunpy.run_path({SMOKE!r}, run_name='__main__')"
    for process, flags in enumerate(own):
        words = ["--coordinator", address, "--processes", "2", "--process", str(process)]
        words += ["--dir", str(tmp_path), "--megabytes", "1", *flags]
        started.append(spawn(["-c", program, *words], tmp_path, {"JAX_NUM_CPU_DEVICES": "2"}))
    return wait(started, timeout)


def test_the_smoke_script_passes_where_all_is_well(tmp_path):
    first, second = smoke(tmp_path)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    lines = first.out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == [
        "process",
        "process",
        "all-reduce",
        "reduce-scatter",
        "all-gather",
    ]
    assert lines[-1] == "PASS: 2 processes, 4 devices"
    assert second.out == ""
    assert list(tmp_path.iterdir()) == []


BROKEN = """import jax
real = jax.lax.psum_scatter
jax.lax.psum_scatter = lambda *args, **kwargs: real(*args, **kwargs).at[0, 0].add(1)"""


@pytest.mark.parametrize(
    ("own", "patch", "message"),
    [
        pytest.param(((), ()), "", "JAX sees no GPU here", marks=pytest.mark.slow),
        ((("--cpu",), ("--cpu",)), BROKEN, r"reduce-scatter: 1 of \d+ numbers are wrong on"),
        pytest.param(
            (("--cpu", "--timeout", "2"),),
            "",
            r"process 0 of 2: not all processes came to .* within 2 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (("--cpu", "--dir", "/proc/no"), ("--cpu",)),
            "",
            "No such file or directory: '/proc/no/smoke",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_smoke_script_says_what_is_wrong(tmp_path, own, patch, message):
    ended = smoke(tmp_path, own, patch)
    assert all(process.status == 1 for process in ended), ended
    (line,) = [line for process in ended for line in process.out.splitlines() if line.startswith("FAIL: ")]
    assert re.search(message, line), line
    assert "PASS" not in ended[0].out
