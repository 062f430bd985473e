"""Whether the hosts of a cluster can train together: run it in every process, it prints PASS or what is wrong.

    srun python examples/launch/two_host_smoke.py --dir /shared/scratch
    python examples/launch/two_host_smoke.py --coordinator HOST:PORT --processes 2 --process I --dir /shared/scratch

Checked, in this order: the processes find each other; each sees its GPUs, and all GPUs of a host are in use; the
collectives of a step give the right numbers, and how fast; a directory is shared.  `--cpu` takes CPU devices instead.

It has run with processes on one machine only.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import distributed, ending, together

REPEATS = 10
NETWORK = "NCCL_DEBUG=INFO tells more, NCCL_SOCKET_IFNAME chooses a network"


class SmokeError(RuntimeError):
    """What is wrong, in one line."""


def main() -> int:
    args = parse()
    try:
        distributed.start(args.coordinator, args.processes, args.process, start_timeout_s=args.timeout)
        if args.cpu:
            jax.config.update("jax_platforms", "cpu")
        with limit(args.timeout, "the first exchange", NETWORK):
            check_devices(cpu=args.cpu)
        with limit(args.timeout, "the collectives", NETWORK):
            check_collectives(args.megabytes)
        with limit(args.timeout, "the look at --dir", "does its file system answer?"):
            check_directory(Path(args.dir))
    except distributed.StartError as error:
        failed(ending.named(error))
        ending.leave(1)  # on the usual way out JAX would go on waiting
    except together.ProcessError as error:
        return failed(error) if together.is_first() else 1
    except jax.errors.JaxRuntimeError as error:  # a process that died, a network that broke, NCCL
        failed(ending.named(f"{str(error).splitlines()[0]}; {NETWORK}"))
        ending.leave(1)
    say(f"PASS: {jax.process_count()} processes, {jax.device_count()} devices")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", default=distributed.AUTO, help="HOST:PORT; without it, as the launcher says")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--dir", default=".", help="a directory that all hosts should see")
    parser.add_argument("--megabytes", type=int, default=256, help="that each device holds of what is exchanged")
    parser.add_argument("--timeout", type=int, default=120, help="seconds after which a step is taken for stuck")
    parser.add_argument("--cpu", action="store_true", help="take CPU devices: to try the script")
    return parser.parse_args()


def failed(error: object) -> int:
    print(f"FAIL: {error}", flush=True)
    return 1


def say(line: str) -> None:
    if together.is_first():
        print(line, flush=True)


@contextmanager
def limit(seconds: int, what: str, hint: str) -> Iterator[None]:
    """Ends the process, with a line, if what is inside gets stuck: a collective cannot be interrupted."""

    def stuck() -> None:
        failed(ending.named(f"{what} did not end within {seconds} s: {hint}"))
        ending.leave(1)

    timer = threading.Timer(seconds, stuck)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_devices(*, cpu: bool) -> None:
    """Every process has devices of the right kind, and no GPU of a host is left over."""
    with together.agreed((SmokeError,)):
        if jax.process_count() == 1:
            raise SmokeError("this process found no others: start it with srun or mpirun, or give --coordinator")
        if jax.default_backend() == "cpu" and not cpu:
            raise SmokeError("JAX sees no GPU here: is jax[cuda12] installed, and does nvidia-smi work?")
    devices, hosts = together.devices_by_host()
    local = jax.local_devices()
    host_of = {device.process_index: host for device, host in zip(devices, hosts, strict=True)}
    for process, line in enumerate(together.gather_texts(f"{len(local)} x {local[0].device_kind}")):
        say(f"process {process} on {host_of[process]}: {line}")
    here = host_of[jax.process_index()]
    present = 0 if cpu else len(list(Path("/dev").glob("nvidia[0-9]*")))
    with together.agreed((SmokeError,)):
        if present > hosts.count(here):
            raise SmokeError(
                f"{here} has {present} GPUs, of which its processes use {hosts.count(here)} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
            )


def check_collectives(megabytes: int) -> None:
    """All-reduce, all-gather and reduce-scatter over all devices: whole numbers, so that every sum is exact."""
    devices, hosts = together.devices_by_host()
    count = len(devices)
    mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,), devices=devices)
    rows = max(1, megabytes * 2**20 // (4 * 1024 * count))
    split = NamedSharding(mesh, P("all"))

    def filled(index: Any) -> np.ndarray:
        """Device k holds k + row % 7 in every column; a row of another block or device would be seen."""
        first = index[0].start or 0
        return np.tile((first // (rows * count) + np.arange(rows * count) % 7)[:, None], 1024).astype(np.float32)

    x = jax.make_array_from_callback((rows * count * count, 1024), split, filled)
    pattern = (np.arange(rows * count) % 7)[:, None]
    summed = count * pattern + count * (count - 1) // 2
    one = pattern[:rows]
    programs: dict[str, tuple[Callable, np.ndarray, float]] = {
        "all-reduce": (lambda x: jax.lax.psum(x, "all"), summed, 2.0),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "all", tiled=True), summed, 1.0),
        "all-gather": (
            lambda x: jax.lax.all_gather(x[:rows], "all", tiled=True),
            np.concatenate([one + k for k in range(count)]),
            1.0,
        ),
    }
    for name, (function, expected, trips) in programs.items():
        program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False))
        result = jax.block_until_ready(program(x))
        with together.agreed((SmokeError,)):
            check_shards(name, result, expected, scattered=name == "reduce-scatter")
        start = time.perf_counter()
        for _ in range(REPEATS):
            jax.block_until_ready(program(x))
        seconds = (time.perf_counter() - start) / REPEATS
        wire = trips * (count - 1) / count * rows * count * 1024 * 4
        size = f"{rows * count * 4096 / 2**20:.0f} MiB over {len(set(hosts))} host(s), {count} devices"
        say(f"{name} of {size}: right, {seconds * 1e3:.1f} ms, {wire / seconds / 1e9:.2f} GB/s from each device")


def check_shards(name: str, result: jax.Array, expected: np.ndarray, *, scattered: bool) -> None:
    for shard in result.addressable_shards:
        size = shard.data.shape[0]
        first = (shard.index[0].start or 0) % len(expected) if scattered else 0
        wrong = int(jnp.sum(shard.data != jnp.asarray(expected[first : first + size], jnp.float32)))
        if wrong:
            raise SmokeError(f"{name}: {wrong} of {shard.data.size} numbers are wrong on {shard.device}")


def check_directory(directory: Path) -> None:
    """What one process writes all others read, within a minute: network file systems may be slow to tell."""
    directory = Path(together.broadcast_text(str(directory.absolute())))
    stamp = together.broadcast_text(f"{time.time_ns()}")
    mine = directory / f"smoke-{stamp}-{jax.process_index()}"
    with together.agreed((SmokeError,)):
        mine.write_text(stamp)
    with together.agreed((SmokeError,)):
        wanted = {mine.with_name(f"smoke-{stamp}-{process}") for process in range(jax.process_count())}
        end = time.monotonic() + 60
        while missing := {path for path in wanted if not path.exists()}:
            if time.monotonic() > end:
                raise SmokeError(f"{directory} is not shared: {min(missing).name} is not there")
            time.sleep(0.2)
    mine.unlink()
    say(f"{directory}: shared")


if __name__ == "__main__":
    sys.exit(main())
