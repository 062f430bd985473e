"""Several processes are one run: they start, agree, train and end together, and nobody waits for ever."""

import json
import os
import re
import signal
import socket
import time
from types import SimpleNamespace

import pytest
from processes import end, free_address, peer_flags, spawn, spawn_run, wait
from tiny_run import TINY, fox_text

from jzero import distributed, together
from jzero.config import ConfigError
from jzero.distributed import StartError
from jzero.ending import LOST
from jzero.launchers import Launcher, launcher
from jzero.run_dir import check_seen

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture
def corpus(tmp_path):
    return fox_text(tmp_path)


# Who has started this process.


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # inside salloc, not under srun
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # an interactive step
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a pod that is no part of an indexed job
    ],
)
def test_a_process_on_its_own_is_nobodys_peer(env, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "KUBERNETES", "JOB_", "JAX_COORD"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert launcher(os.environ) is None
    assert distributed.start() == 1
    assert not distributed.started()


def test_what_a_launcher_tells_is_read():
    slurm = {**SLURM, "SLURM_NTASKS": "5", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert launcher(slurm) == Launcher("Slurm", "slurm", 5, 1, 2, 1)
    assert launcher({**slurm, "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}) == Launcher("Slurm", "slurm", 5, 1, 1, 0)
    assert launcher({**slurm, "SLURM_GPUS_PER_TASK": "1"}) == Launcher("Slurm", "slurm", 5, 1)
    old = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert launcher(old) == Launcher("Open MPI", "ompi", 4, 3, 2, 1)
    found = launcher(KUBERNETES)
    assert (found.processes, found.process) == (None, 2)


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ({}, []),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, []),  # one task per host has all its GPUs
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, [1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_GPUS_PER_TASK": "1"}, []),  # Slurm shows each task its own
    ],
)
def test_every_gpu_of_a_host_belongs_to_one_process(env, devices):
    found = launcher({**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", **env}) if env else None
    assert distributed._local_devices("auto", found) == devices
    assert distributed._local_devices("all", found) == []
    assert distributed._local_devices("2,3", found) == [2, 3]


@pytest.mark.parametrize(
    ("env", "settings", "parts"),
    [
        ({}, {"processes": 2}, ["distributed.processes = 2", "no launcher", "distributed.coordinator = HOST:PORT"]),
        ({}, {"process": 0}, ["distributed.process = 0", "no launcher", "distributed.coordinator = HOST:PORT"]),
        ({}, {"coordinator": "a:1", "process": 1}, ["a:1 needs distributed.processes"]),
        ({}, {"coordinator": "a:1", "processes": 2}, ["a:1 needs distributed.process,"]),
        ({"JAX_COORDINATOR_ADDRESS": "b:1"}, {}, ["b:1 needs distributed.processes"]),
        ({}, {"coordinator": "a:1", "processes": 2, "process": 2}, ["distributed.process = 2", "processes = 2"]),
        (OPEN_MPI, {}, ["process 3 of a job of Open MPI", "mpi4py", "distributed.coordinator = none"]),
        (KUBERNETES, {}, ["process 2 of a job of Kubernetes", "the package kubernetes"]),
    ],
)
def test_a_start_that_cannot_be_is_refused_in_words(env, settings, parts, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(StartError) as caught:
        distributed.start(**settings)
    assert caught.value.bad_input
    for part in parts:
        assert part in str(caught.value)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"{address}: process 0 cannot listen .*: Address already in use"):
            distributed.start(address, processes=2, process=0)


WHO = """
import jax
from jzero import distributed, together
jax.config.update("jax_num_cpu_devices", 1)
assert distributed.start(start_timeout_s=30) == 2
print(jax.process_index(), together.gather_texts(str(jax.device_count())))
"""
SLURM_STEP = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
MPIRUN = {"OMPI_MCA_orte_hnp_uri": f"{os.getpid() << 12}.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("common", "own"),
    [
        (SLURM_STEP, ("SLURM_PROCID", "SLURM_LOCALID")),
        pytest.param(MPIRUN, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), marks=pytest.mark.slow),
    ],
)
def test_processes_of_a_launcher_find_each_other_without_a_flag(common, own):
    ended = wait([spawn(["-c", WHO], env=common | dict.fromkeys(own, str(process))) for process in range(2)])
    assert [(process.status, process.out) for process in ended] == [(0, f"{i} ['2', '2']\n") for i in range(2)]


# What they know of each other.

AGREE = """
import sys
import jax
from jzero import distributed, together

jax.config.update("jax_num_cpu_devices", 2)
process = int(sys.argv[2])
distributed.start(sys.argv[1], processes=2, process=process)
print("text:", together.broadcast_text("of 0, ü" if process == 0 else "no"), together.gather_texts("x" * process))


def outcome(*errors):
    try:
        with together.agreed((ValueError,)):
            if errors[process] is not None:
                raise errors[process]
    except Exception as error:
        return f"{type(error).__name__} {error} {getattr(error, 'bad_input', '')}"


print("1:", outcome(None, None))
print("2:", outcome(None, ValueError("data.path = x")))
print("3:", outcome(ValueError("lr"), ValueError("lr")))
print("4:", outcome(OSError("disk"), ValueError("lr")))
print("5:", outcome(KeyError("bug"), None))
together.same_everywhere({"a": 1})
try:
    together.same_everywhere({"a": 1, "optim.lr": 0.1 * (process + 1)})
except together.ProcessError as error:
    print("6:", str(error).partition(": all processes must be")[0])
flag = together.Flag(2)
print("flag:", *[int(flag.ask(process == 1 and step == 3)) for step in range(8)])
devices, hosts = together.devices_by_host()
print("devices:", [d.process_index for d in devices], len(set(hosts)))
"""


def test_processes_agree_on_what_failed_on_settings_and_on_stopping():
    address = free_address()
    ended = wait([spawn(["-c", AGREE, address, str(i)]) for i in range(2)])
    assert [process.status for process in ended] == [0, 0], ended[0].err + ended[1].err
    told = [process.out.splitlines() for process in ended]
    both = [
        "text: of 0, ü ['', 'x']",
        "1: None",
        "2: ProcessError process 1 of 2: data.path = x True",
        "3: ProcessError lr True",
        "4: ProcessError process 0 of 2: disk; process 1 of 2: lr False",
        "6: optim.lr is 0.2 in process 1 and 0.1 in process 0",
        "flag: 0 0 0 0 0 1 0 0",
        "devices: [0, 0, 1, 1] 1",
    ]
    assert [[line for line in lines if not line.startswith("5:")] for lines in told] == [both, both]
    assert "5: KeyError 'bug' " in told[0]
    assert "5: ProcessError process 0 of 2: KeyError: 'bug' False" in told[1]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:9903: Connection reset by peer", True),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited", True),
        ("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats)", True),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes", False),
        ("the connection of layers 3 and 4 has the shape (2, 3)", False),
    ],
)
def test_only_errors_of_the_network_are_blamed_on_another_process(monkeypatch, text, lost):
    assert not distributed.lost_peer(ValueError(text))  # a process on its own has none to lose
    monkeypatch.setattr(distributed, "started", lambda: True)
    assert distributed.lost_peer(ValueError(text)) == lost


def test_devices_of_one_host_stand_next_to_each_other_however_processes_were_dealt_out(monkeypatch):
    hosts = ["b", "a", "b", "a"]  # of processes 0 to 3: a launcher that deals them out in turn
    devices = [SimpleNamespace(process_index=process, id=10 * process + i) for process in range(4) for i in range(2)]
    monkeypatch.setattr(together.jax, "devices", lambda: devices)
    monkeypatch.setattr(together, "gather_texts", lambda _: [json.dumps([f"boot of {host}", host]) for host in hosts])
    ordered, names = together.devices_by_host()
    assert [device.id for device in ordered] == [0, 1, 20, 21, 10, 11, 30, 31]
    assert names == ["b"] * 4 + ["a"] * 4


def test_a_directory_that_only_one_host_sees_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"run.dir = {tmp_path}: .* not there on .*; name a directory that all hosts"):
        check_seen(tmp_path, 0.0)


# Through the command line.


def argv_of(corpus, *more):
    return [*TINY, "--model.layers", "1", "--data.path", str(corpus), "--log.every", "1", "--steps", "4", *more]


def losses(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], name, line[name])
        for line in lines
        for name in ("loss", "grad_norm", "eval_loss")
        if name in line
    ]


def trained(tmp_path, corpus, processes, *more):
    run_dir = tmp_path / f"by {processes}"
    ended = wait(spawn_run(processes, argv_of(corpus, "--run.dir", str(run_dir), *more), tmp_path), 300)
    assert [process.status for process in ended] == [0] * processes, [process.err[-3000:] for process in ended]
    return losses(run_dir)


def same(first, second):
    assert [row[:2] for row in first] == [row[:2] for row in second]
    assert [row[2] for row in first] == pytest.approx([row[2] for row in second], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "mesh"), [("3", "dp=4,tp=2"), ("2", "node=2,dp=4"), ("1", "dp=2,tp=4"), ("0", "dp=8")]
)
def test_the_number_of_processes_does_not_change_a_run(tmp_path, corpus, stage, mesh):
    flags = ["--stage", stage, "--mesh", mesh, "--steps", "20", "--batch_size", "16", "--micro_batch", "1"]
    flags += ["--model.heads", "4", "--model.kv_heads", "4"]
    one = trained(tmp_path, corpus, 1, *flags)
    assert len(one) == 2 + 2 * 20
    for processes in (2, 4):
        several = trained(tmp_path, corpus, processes, *flags)
        same(one, several)


def errors(process):
    return [line for line in process.err.splitlines() if line.startswith("error:")]


def test_data_that_one_process_lacks_ends_all_with_one_message(tmp_path, corpus):
    own = {0: [], 1: ["--data.path", "/no/such"]}
    ended = wait(spawn_run(2, argv_of(corpus), tmp_path, own))
    assert [process.status for process in ended] == [2, 2]
    assert errors(ended[0]) == ["error: process 1 of 2: data.path = /no/such: no such file or directory"]
    assert not ended[1].err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_settings_that_differ_end_all_with_one_message(tmp_path, corpus):
    ended = wait(spawn_run(2, argv_of(corpus), tmp_path, {0: [], 1: ["--optim.lr", "0.5"]}))
    assert [process.status for process in ended] == [2, 2]
    (message,) = errors(ended[0])
    assert message.startswith("error: optim.lr is 0.5 in process 1 and 0.003 in process 0")
    assert not ended[1].err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_different_numbers_of_devices_end_all_with_one_message(tmp_path, corpus):
    address, started = free_address(), []
    for index, devices in enumerate(("4", "2")):
        peers = peer_flags(address, 2, index)
        started.append(
            spawn(["-m", "jzero.train", *argv_of(corpus), *peers], tmp_path, {"JAX_NUM_CPU_DEVICES": devices})
        )
    ended = wait(started)
    assert [process.status for process in ended] == [2, 2]
    (message,) = errors(ended[0])
    assert message.startswith("error: process 1 of 2 has 2 devices and process 0 has 4: all must have as many")
    assert not errors(ended[1])


@pytest.mark.parametrize(
    ("alone", "message"),
    [
        (0, r"^error: process 0 of 2: not all processes came to .* within 2 s \(distributed.start_timeout_s\)"),
        (
            1,
            r"^error: process 1 of 2: did not reach the coordinator, process 0, at .* within 2 s .* Connection refused",
        ),
    ],
)
def test_a_missing_process_is_missed_within_a_bounded_time(tmp_path, corpus, alone, message):
    argv = argv_of(corpus, "--distributed.start_timeout_s", "2")
    (ended,) = wait(spawn_run(2, argv, tmp_path, {alone: []}), 30)
    assert ended.status == LOST
    (line,) = errors(ended)
    assert re.search(message, line), line
    assert "Check failure" not in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


@pytest.mark.slow
def test_a_process_that_fails_under_way_says_why_and_the_others_end(tmp_path, corpus):
    flags = ["--steps", "100000", "--distributed.heartbeat_timeout_s", "10", "--data.eval_fraction", "0"]
    flags += ["--run.dir", str(tmp_path / "run"), "--data.path", "own.txt", "--checkpoint.every", "none"]
    address, started, cwds = free_address(), [], [tmp_path / "a", tmp_path / "b"]
    for index, cwd in enumerate(cwds):  # each reads a file of its own
        cwd.mkdir()
        (cwd / "own.txt").write_bytes(corpus.read_bytes())
        peers = peer_flags(address, 2, index)
        started.append(spawn(["-m", "jzero.train", *argv_of(corpus, *flags), *peers], cwd))
    under_way(tmp_path / "run", started)
    os.truncate(cwds[1] / "own.txt", 1000)
    first, second = wait(started, 60)
    assert first.status in GONE
    assert second.status == 1
    (line,) = errors(second)
    assert line.startswith("error: process 1 of 2: ")
    assert "own.txt: changed while it was read" in line
    assert any(words in first.err for words in SAID), first.err


def under_way(run_dir, started):
    """Waits until some steps are in the metrics."""
    metrics, latest = run_dir / "metrics.jsonl", time.monotonic() + 120
    try:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
            assert time.monotonic() < latest
            assert [process.poll() for process in started] == [None] * len(started)
            time.sleep(0.2)
    except AssertionError:
        for process in started:
            end(process)
        raise


def killed_under_way(tmp_path, corpus, victim, sent, processes=2):
    """The other processes of a run of which one gets a signal after some steps."""
    run_dir = tmp_path / "run"
    flags = ["--steps", "100000", "--run.dir", str(run_dir), "--distributed.heartbeat_timeout_s", "10"]
    started = spawn_run(processes, argv_of(corpus, *flags), tmp_path)
    under_way(run_dir, started)
    started[victim].send_signal(sent)
    try:
        return wait([process for index, process in enumerate(started) if index != victim], 60)
    finally:
        end(started[victim])


GONE = (LOST, -signal.SIGABRT)  # ends by our own hand, or by JAX's
DEATHS = [(0, signal.SIGKILL, 2), (1, signal.SIGSTOP, 2), (0, signal.SIGSTOP, 2), (2, signal.SIGKILL, 4)]
SAID = (
    "another process is gone",
    "another task died",
)  # by us, or by JAX, which ends a process when it is first to see it


@pytest.mark.parametrize(
    ("victim", "sent", "processes"),
    [(1, signal.SIGKILL, 2), *(pytest.param(*death, marks=pytest.mark.slow) for death in DEATHS)],
)
def test_when_a_process_dies_the_others_stop_and_say_so(tmp_path, corpus, victim, sent, processes):
    for other in killed_under_way(tmp_path, corpus, victim, sent, processes):
        assert other.status in GONE
        assert other.seconds < 40
        assert any(words in other.err for words in SAID), other.err
